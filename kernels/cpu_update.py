"""Host side of the optimizer kernels: steps on the rows that got a gradient, and catching up those that did not.

Enters: tables as structs of int64 and their history of steps as float64. Leaves: tables and state changed in place;
bumping version counters is the caller's part. Fields are in the order of ``Table`` and ``Step`` in
``cpu_update_source.py``.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from heterps_compile.kernels.cpu_lookup import pointer
from heterps_compile.kernels.cpu_update_source import STEP_FIELDS

STEP_BYTES = 8 * len(STEP_FIELDS)


class Rule(IntEnum):
    """What one step does to a row; numbers as in the C++ enum."""

    SGD = 0
    MOMENTUM = 1
    NESTEROV = 2
    ADAGRAD = 3
    RMSPROP = 4
    ADAM = 5
    SPARSE_ADAM = 6
    ROWWISE_ADAGRAD = 7
    FTRL = 8


def table_fields(
    weight: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    *,
    history: int,
    now: int,
    last: Tensor | None = None,
    rows: Tensor | None = None,
    grad: Tensor | None = None,
    horizon: int = 1,
) -> tuple[int, ...]:
    """The struct ``Table``: ``history`` is the address of step 0, ``now`` the step to make or to be at.

    ``rows`` is one-dimensional, int32 or int64, of any stride; without it every row is meant.
    """
    return (
        weight.data_ptr(),
        0 if first is None else first.data_ptr(),
        0 if second is None else second.data_ptr(),
        0 if last is None else last.data_ptr(),
        weight.shape[0],
        0 if rows is None else rows.data_ptr() or 1,
        rows is not None and rows.dtype is torch.int64,
        0 if rows is None else rows.stride(0),
        0 if grad is None else grad.data_ptr(),
        0 if rows is None else rows.shape[0],
        history,
        now,
        horizon,
    )


class UpdateKernels:
    """The functions of one loaded update unit."""

    def __init__(self, library: ctypes.CDLL) -> None:
        address, integer = ctypes.c_void_p, ctypes.c_int64
        self._first_unsorted = library.heterps_first_unsorted
        self._first_unsorted.argtypes, self._first_unsorted.restype = [address, integer], integer
        self._update = library.heterps_update
        self._update.argtypes, self._update.restype = [integer, address, integer, integer], None
        self._catch_up = library.heterps_catch_up
        self._catch_up.argtypes, self._catch_up.restype = [integer, address, integer, integer], integer

    def first_unsorted(self, tables: Sequence[tuple[int, ...]]) -> int:
        """Position of the first table whose rows are not strictly ascending and inside it, or -1."""
        structs = _structs(tables)
        return int(self._first_unsorted(pointer(structs), len(tables)))

    def update(self, rule: Rule, tables: Sequence[tuple[int, ...]]) -> None:
        """One step on the rows with a gradient, which must be strictly ascending."""
        structs = _structs(tables)
        self._update(rule, pointer(structs), len(tables), torch.get_num_threads())

    def catch_up(self, rule: Rule, tables: Sequence[tuple[int, ...]]) -> bool:
        """Bring rows to step ``now``; False, with nothing written, if a row lies outside its table."""
        structs = _structs(tables)
        return not self._catch_up(rule, pointer(structs), len(tables), torch.get_num_threads())


def _structs(tables: Sequence[tuple[int, ...]]) -> array[int]:
    structs = array("q")
    for fields in tables:
        structs.extend(fields)
    return structs
