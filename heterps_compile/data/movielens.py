"""MovieLens ratings from a parquet file (user_id, movie_id, rating, timestamp) -> ``ClickLog`` of two id columns.

Samples come in the order of time, so ``ClickLog.split(fraction)`` tests on the future and ``split(fraction, seed=...)``
on a random part. The label is 1 for a rating of 4 or more. There are no dense columns. Needs pyarrow.
"""

from __future__ import annotations

from os import fspath
from typing import Any

import numpy as np
import torch

from heterps_compile.data.click_log import ClickLog
from heterps_compile.data.tabular import Path, load_pyarrow
from heterps_compile.errors import FileFormatError

COLUMNS = ("user_id", "movie_id", "rating", "timestamp")
LIKED = 4


def read_movielens(path: Path) -> ClickLog:
    """Read the ratings; ids are numbered from 0 without gaps, users in column 0 and films in column 1.

    Raises:
        FileFormatError: not a parquet file, a column is missing or has gaps.
        MissingPackageError: pyarrow is not installed.
    """
    users, films, ratings, stamps = _read_columns(path)
    order = np.argsort(stamps, kind="stable")
    distinct = [np.unique(column[order], return_inverse=True) for column in (users, films)]
    return ClickLog(
        dense=torch.zeros(len(order), 0),
        ids=torch.from_numpy(np.stack([inverse for _, inverse in distinct], axis=1)),
        labels=torch.from_numpy((ratings[order] >= LIKED).astype(np.float32)),
        rows=tuple(len(values) for values, _ in distinct),
    )


def _read_columns(path: Path) -> list[Any]:
    arrow, parquet = load_pyarrow("lib"), load_pyarrow("parquet")
    try:
        names = parquet.read_schema(fspath(path)).names
    except arrow.ArrowInvalid as error:
        raise FileFormatError(f"{fspath(path)} is not a parquet file: {error}") from error
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise FileFormatError(f"{fspath(path)}: no column {', '.join(missing)}; found: {', '.join(names)}")
    table = parquet.read_table(fspath(path), columns=list(COLUMNS))
    for name in COLUMNS:
        if table.column(name).null_count:
            raise FileFormatError(f"{fspath(path)}: column {name} has {table.column(name).null_count} missing values")
    return [table.column(name).to_numpy() for name in COLUMNS]
