"""Criteo's click logs: 13 integer columns I1-I13 and 26 hashed categorical columns C1-C26.

Read as ``Id,Label,I1..C26`` (Kaggle CSV), as ``label,I1..C26``, in any column order, or as the original tab-separated
file without a header (label first). See ``tabular`` for the encoding and what is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import fspath

from heterps_compile.data.click_log import ClickLog
from heterps_compile.data.tabular import Columns, Layout, Path, first_line, header_layout, read_clicks
from heterps_compile.errors import FileFormatError

COLUMNS = Columns(
    label="Label",
    dense=tuple(f"I{number}" for number in range(1, 14)),
    categorical=tuple(f"C{number}" for number in range(1, 27)),
)


def read_criteo(path: Path, *, rows: int | Sequence[int] = 200_000, max_samples: int | None = None) -> ClickLog:
    """Read a Criteo file; ``rows`` is the size of each table (one number, or 26).

    Raises:
        FileFormatError: a column is missing or holds what it should not.
        MissingPackageError: pyarrow is not installed.
    """
    return read_clicks(path, COLUMNS, _layout(path), rows=rows, max_samples=max_samples)


def _layout(path: Path) -> Layout:
    """By the first line: named columns, or a label of 0 or 1 followed by 39 values."""
    named = header_layout(first_line(path))
    if named.names[0] not in ("0", "1"):
        return named
    if len(named.names) != len(COLUMNS.names):
        raise FileFormatError(
            f"{fspath(path)}: a file without a header needs {len(COLUMNS.names)} columns (label, I1-I13, C1-C26), "
            f"found {len(named.names)}"
        )
    return Layout(delimiter=named.delimiter, names=COLUMNS.names, has_header=False)
