"""Text files of clicks (CSV or TSV, plain or .gz) -> ``ClickLog``, by columns; the formats themselves are elsewhere.

Needs pyarrow. The file is read in blocks: memory holds the tensors and one block. Refused, with file and column named:
missing columns, text where a number belongs, labels other than 0 and 1, an empty file.
Dense value v -> log(1 + max(v, 0)) unless the format has its own way, missing -> 0. Categorical value -> a hash in
[1, rows), missing -> 0.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike, fspath
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from heterps_compile.data.click_log import ClickLog
from heterps_compile.errors import FileFormatError, MissingPackageError

Numbers = NDArray[np.float64]
Path = str | PathLike[str]
BLOCK_BYTES = 1 << 24


def log_transform(values: Numbers) -> Numbers:
    """log(1 + v), for v below 0 as for 0 (Criteo's counts hold a few negatives)."""
    return np.log1p(np.maximum(values, 0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The names that matter in a file, matched without regard to case."""

    label: str
    dense: tuple[str, ...]
    categorical: tuple[str, ...]
    dense_transform: Callable[[Numbers], Numbers] = log_transform

    @property
    def names(self) -> tuple[str, ...]:
        """Label, dense, categorical."""
        return (self.label, *self.dense, *self.categorical)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a file is written: its delimiter, the names of all its columns, and whether the first line gives them."""

    delimiter: str
    names: tuple[str, ...]
    has_header: bool


def load_pyarrow(module: str) -> ModuleType:
    """Import ``pyarrow.<module>``, which only reading files needs.

    Raises:
        MissingPackageError: pyarrow is not installed.
    """
    import importlib

    try:
        return importlib.import_module(f"pyarrow.{module}")
    except ImportError as error:
        raise MissingPackageError(
            "reading data files needs pyarrow, which is not installed", hint="pip install 'heterps-compile[data]'"
        ) from error


def first_line(path: Path) -> str:
    """The first line of a text file, unpacked when its name ends in .gz or the like.

    Raises:
        FileFormatError: the file is empty.
    """
    with load_pyarrow("lib").input_stream(fspath(path), compression="detect") as stream:
        line = bytes(stream.read(1 << 16)).decode("utf-8-sig", errors="replace").split("\n", 1)[0].rstrip("\r")
    if not line:
        raise FileFormatError(f"{fspath(path)} is empty, or its first line is")
    return line


def header_layout(line: str) -> Layout:
    """The layout of a file whose first line names its columns."""
    delimiter = "\t" if "\t" in line else ","
    return Layout(delimiter=delimiter, names=tuple(next(csv.reader([line], delimiter=delimiter))), has_header=True)


def read_clicks(
    path: Path, columns: Columns, layout: Layout, *, rows: int | Sequence[int], max_samples: int | None = None
) -> ClickLog:
    """Read the columns named, block by block, at most ``max_samples`` of them; ``rows`` is per table or one for all.

    Raises:
        FileFormatError: a column is missing, or a value is not what its column holds.
    """
    rows_of = _rows_per_table(rows, len(columns.categorical))
    found = _match(path, layout.names, columns)
    blocks: list[tuple[torch.Tensor, ...]] = []
    num_samples = 0
    for block in _blocks(path, found, layout):
        blocks.append(_encode(path, block, found, rows_of))
        num_samples += block.num_rows
        if max_samples is not None and num_samples >= max_samples:
            break
    if not num_samples:
        raise FileFormatError(f"{fspath(path)} has no samples below its header")
    dense, ids, labels = (torch.cat(parts)[:max_samples] for parts in zip(*blocks, strict=True))
    return ClickLog(dense=dense, ids=ids, labels=labels, rows=rows_of)


def hash_ids(values: NDArray[np.bytes_], rows: int) -> NDArray[np.int64]:
    """Rows in [1, rows) of byte strings: 64-bit FNV-1a, mixed, modulo. Equal in every process and on every machine.

    The loop runs over the characters of the longest value, never over the values.
    """
    if not len(values):
        return np.zeros(0, np.int64)
    characters = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
    state = np.full(len(values), 0xCBF29CE484222325, np.uint64)
    for column in characters.T:
        stepped = (state ^ column) * np.uint64(0x100000001B3)
        state = np.where(column == 0, state, stepped)  # numpy pads shorter values with zero bytes
    state ^= state >> np.uint64(33)  # FNV's low bits mix badly for short values
    state *= np.uint64(0xFF51AFD7ED558CCD)
    state ^= state >> np.uint64(33)
    return (state % np.uint64(rows - 1)).astype(np.int64) + 1


def _rows_per_table(rows: int | Sequence[int], num_tables: int) -> tuple[int, ...]:
    rows_of = (rows,) * num_tables if isinstance(rows, int) else tuple(rows)
    if len(rows_of) != num_tables:
        raise ValueError(f"rows has {len(rows_of)} entries; the format has {num_tables} categorical columns")
    if min(rows_of) < 2:
        raise ValueError(f"rows must be at least 2 (one of them is for missing values), got {min(rows_of)}")
    return rows_of


def _match(path: Path, names: Sequence[str], columns: Columns) -> Columns:
    """The columns as the file spells them."""
    spelled = {name.strip().lower(): name for name in names}
    missing = [name for name in columns.names if name.lower() not in spelled]
    if missing:
        raise FileFormatError(
            f"{fspath(path)}: no column {', '.join(missing)}; found {len(names)} columns: {_shorten(names)}",
            hint="the first line must name the columns, separated by commas or tabs",
        )
    label, *rest = (spelled[name.lower()] for name in columns.names)
    num_dense = len(columns.dense)
    return replace(columns, label=label, dense=tuple(rest[:num_dense]), categorical=tuple(rest[num_dense:]))


def _shorten(names: Sequence[str], limit: int = 45) -> str:
    shown = [name if len(name) <= 24 else f"{name[:21]}..." for name in names[:limit]]
    return ", ".join(shown) + (", ..." if len(names) > limit else "")


def _blocks(path: Path, columns: Columns, layout: Layout) -> Iterator[Any]:
    """Record batches of the columns, numbers as float64, the rest as text."""
    arrow, reader = load_pyarrow("lib"), load_pyarrow("csv")
    types = {name: arrow.float64() for name in (columns.label, *columns.dense)}
    types |= {name: arrow.string() for name in columns.categorical}
    try:
        yield from reader.open_csv(
            fspath(path),
            read_options=reader.ReadOptions(
                block_size=BLOCK_BYTES, column_names=list(layout.names), skip_rows=int(layout.has_header)
            ),
            parse_options=reader.ParseOptions(delimiter=layout.delimiter),
            convert_options=reader.ConvertOptions(
                column_types=types, include_columns=list(types), null_values=[""], strings_can_be_null=True
            ),
        )
    except arrow.ArrowInvalid as error:
        raise FileFormatError(f"{fspath(path)}: {error}") from error


def _encode(path: Path, block: Any, columns: Columns, rows: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Dense, ids and labels of one record batch."""
    dense = np.zeros((block.num_rows, len(columns.dense)), np.float32)
    for position, name in enumerate(columns.dense):
        values = block.column(name).to_numpy(zero_copy_only=False)
        dense[:, position] = np.nan_to_num(columns.dense_transform(values))
    ids = np.zeros((block.num_rows, len(columns.categorical)), np.int64)
    for position, name in enumerate(columns.categorical):
        ids[:, position] = _categorical_ids(block.column(name), rows[position])
    labels = block.column(columns.label).to_numpy(zero_copy_only=False)
    wrong = labels[(labels != 0) & (labels != 1)]
    if len(wrong):
        raise FileFormatError(f"{fspath(path)}: column {columns.label} must hold 0 or 1, found {wrong[0]:g}")
    return torch.from_numpy(dense), torch.from_numpy(ids), torch.from_numpy(labels.astype(np.float32))


def _categorical_ids(column: Any, rows: int) -> NDArray[np.int64]:
    """Hash each distinct value once, then spread over the samples; a missing value is id 0."""
    encoded = column.dictionary_encode()
    distinct = encoded.dictionary.cast("binary").to_numpy(zero_copy_only=False).astype(np.bytes_)
    id_of_code = np.append(hash_ids(distinct, rows), 0)
    codes: NDArray[np.int64] = encoded.indices.fill_null(len(distinct)).to_numpy(zero_copy_only=False)
    return id_of_code[codes]
