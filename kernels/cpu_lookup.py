"""Host side of the look-up kernels: tensors in, addresses out.

Enters: the look-ups of one (dim, dtype) as structs of int64. Leaves: filled outputs, or one gradient per table. It
refuses nothing itself: ``lookup.py`` sends here only what the kernels can do. The fields below are in the order of
the structs ``Fixed`` and ``Call`` in ``cpu_lookup_source.py``.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from heterps_compile.kernels.specs import LookupSpec

MODES = {"none": 0, "sum": 1, "mean": 2, "max": 3}
BAD_OFFSETS = 2
FIXED_FIELDS, CALL_FIELDS = 4, 12


def call_fields(
    ids: Tensor, offsets: Tensor | None, weights: Tensor | None, winners: Tensor | None, bags: int
) -> tuple[int, ...]:
    """The struct ``Call`` of a look-up with ``bags`` rows of output, whose place is filled in by :func:`place`.

    ``ids`` has one or two dimensions; ``offsets`` is int64 of length ``bags + 1``; ``weights`` is flat and contiguous.
    """
    if ids.dim() == 1:
        size0, size1, step0, step1 = ids.shape[0], 1, ids.stride(0), 1
    else:
        (size0, size1), (step0, step1) = ids.shape, ids.stride()
    return (
        ids.data_ptr(),
        ids.dtype is torch.int64,
        size0,
        size1,
        step0,
        step1,
        0 if offsets is None else offsets.data_ptr(),
        bags,
        0 if weights is None else weights.data_ptr(),
        0,
        0,
        0 if winners is None else winners.data_ptr(),
    )


def place(calls: array[int], addresses: Sequence[int], strides: Sequence[int]) -> None:
    """Say where output (or gradient) row 0 of each ``Call`` lies, and how many elements apart its rows are."""
    calls[9::CALL_FIELDS] = array("q", addresses)
    calls[10::CALL_FIELDS] = array("q", strides)


def fixed_fields(spec: LookupSpec, address: int, rows: int) -> tuple[int, ...]:
    """The struct ``Fixed`` of a look-up of the table at ``address``."""
    padding = -1 if spec.padding_idx is None else spec.padding_idx % rows
    return address, rows, MODES[spec.mode], padding


def pointer(values: array[Any]) -> int:
    """Address of an array's first element; valid while it lives and keeps its length."""
    return values.buffer_info()[0]


class LookupKernels:
    """The functions of one loaded look-up unit."""

    def __init__(self, library: ctypes.CDLL) -> None:
        address, integer = ctypes.c_void_p, ctypes.c_int64
        self._forward = library.heterps_forward
        self._forward.argtypes = [address, address, integer, integer, address]
        self._forward.restype = integer
        self._weights_backward = library.heterps_weights_backward
        self._weights_backward.argtypes = [address, address, integer, address, integer, address]
        self._weights_backward.restype = integer
        self._plan = library.heterps_plan
        self._plan.argtypes = [address, address, integer, address, integer, integer, address, address]
        self._plan.restype = address
        self._free = library.heterps_plan_free
        self._free.argtypes, self._free.restype = [address], None
        self._sum = library.heterps_sum
        self._sum.argtypes, self._sum.restype = [address, address, integer], None

    def forward(self, fixed: array[int], calls: array[int]) -> tuple[int, int, int, int] | None:
        """Fill the outputs. Returns None, or the first fault: (status, look-up, position of the id, its value)."""
        fault = array("q", (0, 0, 0, 0))
        num_lookups = len(calls) // CALL_FIELDS
        if self._forward(pointer(fixed), pointer(calls), num_lookups, torch.get_num_threads(), pointer(fault)):
            return tuple(fault)  # type: ignore[return-value]
        return None

    def weights_backward(self, fixed: array[int], calls: array[int], targets: array[int]) -> None:
        """Fill the gradients of per-sample weights at the addresses ``targets`` (0: not wanted)."""
        fault = array("q", (0, 0, 0, 0))
        self._weights_backward(
            pointer(fixed), pointer(calls), len(targets), pointer(targets), torch.get_num_threads(), pointer(fault)
        )

    def table_gradients(self, fixed: array[int], calls: array[int], tables: Sequence[TableGradient]) -> list[Tensor]:
        """One gradient per table, sparse ones coalesced; look-ups of one table follow each other in ``calls``.

        Raises RuntimeError if an id has left its table since the forward call, which checked it.
        """
        first = array("q", (0,))
        for table in tables:
            first.append(first[-1] + table.num_lookups)
        distinct, fault = array("q", bytes(8 * len(tables))), array("q", (0, 0, 0, 0))
        threads = torch.get_num_threads()
        plan = self._plan(
            pointer(fixed),
            pointer(calls),
            len(calls) // CALL_FIELDS,
            pointer(first),
            len(tables),
            threads,
            pointer(distinct),
            pointer(fault),
        )
        if not plan:
            raise RuntimeError(f"id {fault[3]} of look-up {fault[1]} was written to between forward and backward")
        try:
            gradients, targets = _allocate(tables, distinct)
            self._sum(plan, pointer(targets), threads)
        finally:
            self._free(plan)
        return gradients


@dataclass(frozen=True, slots=True)
class TableGradient:
    """What is wanted for one table: ``shape`` and ``dtype`` of the table, and how many look-ups add to the gradient."""

    shape: torch.Size
    dtype: torch.dtype
    num_lookups: int
    sparse: bool
    by_frequency: bool

    def of(self, num_lookups: int) -> TableGradient:
        """The same with as many look-ups as a gradient came back to."""
        return self if num_lookups == self.num_lookups else replace(self, num_lookups=num_lookups)


def _allocate(tables: Sequence[TableGradient], distinct: array[int]) -> tuple[list[Tensor], array[int]]:
    """Gradients to be filled, and the struct ``Target`` of each. Sparse ones share two buffers: two allocations in
    all.
    """
    counts = [count if table.sparse else 0 for count, table in zip(distinct, tables, strict=True)]
    total = sum(counts)
    dim, dtype = tables[0].shape[1], tables[0].dtype
    rows, sums = torch.empty(1, total, dtype=torch.int64), torch.empty(total, dim, dtype=dtype)
    row_address = rows.data_ptr() or 1  # an address that is not null says "sparse", also when there are no rows
    sum_address, row_bytes = sums.data_ptr(), dim * dtype.itemsize
    gradients: list[Tensor] = []
    targets = array("q")
    for table, count, its_rows, its_sums in zip(
        tables, counts, torch.split(rows, counts, 1), torch.split(sums, counts), strict=True
    ):
        if table.sparse:
            gradient = torch.sparse_coo_tensor(
                its_rows, its_sums, table.shape, is_coalesced=True, check_invariants=False
            )
            targets.extend((row_address, sum_address, table.by_frequency))
            row_address += count * 8
            sum_address += count * row_bytes
        else:
            gradient = torch.zeros(table.shape, dtype=table.dtype)
            targets.extend((0, gradient.data_ptr(), table.by_frequency))
        gradients.append(gradient)
    return gradients, targets
