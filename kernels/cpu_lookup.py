"""Host side of the look-up kernels: tensors in, pointers out, errors turned into exceptions.

Enters: the look-ups of one (dim, dtype) as :class:`Request` objects. Leaves: filled outputs, or one gradient per
table. It refuses nothing itself: ``lookup.py`` sends here only what the kernels can do. The order of the int64 fields
below is that of the structs ``Fixed`` and ``Call`` in ``cpu_lookup_source.py``.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from heterps_compile.errors import IdRangeError
from heterps_compile.kernels.specs import LookupSpec

MODES = {"none": 0, "sum": 1, "mean": 2, "max": 3}
BAD_OFFSETS = 2
FIXED_FIELDS, CALL_FIELDS = 4, 12


class BadOffsets(Exception):  # not an error a user meets: eager says what is wrong
    """Offsets that do not cut the ids into bags; the reference raises what eager raises."""


@dataclass(frozen=True, slots=True)
class Request:
    """One look-up of one call: ``ids`` of at most two dimensions, ``bags`` rows of output, ``offsets`` int64 and
    ``bags + 1``.
    """

    spec: LookupSpec
    ids: Tensor
    offsets: Tensor | None
    weights: Tensor | None
    bags: int
    winners: Tensor | None

    def tensors(self) -> list[Tensor]:
        """What the kernels read besides the table."""
        return [tensor for tensor in (self.ids, self.offsets, self.weights) if tensor is not None]

    def fields(self, data: int, stride: int) -> tuple[int, ...]:
        """The struct ``Call`` for rows at address ``data``, ``stride`` elements apart."""
        ids = self.ids
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
            0 if self.offsets is None else self.offsets.data_ptr(),
            self.bags,
            0 if self.weights is None else self.weights.data_ptr(),
            data,
            stride,
            0 if self.winners is None else self.winners.data_ptr(),
        )


def fixed_fields(spec: LookupSpec, address: int, rows: int) -> tuple[int, ...]:
    """The struct ``Fixed`` of a look-up of the table at ``address``."""
    padding = -1 if spec.padding_idx is None else spec.padding_idx % rows
    return address, rows, MODES[spec.mode], padding


def pointer(values: array[int]) -> int:
    """Address of an ``array('q')``; valid while it lives and keeps its length."""
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

    def forward(self, fixed: array[int], calls: array[int], requests: Sequence[Request]) -> None:
        """Fill the outputs. Raises :class:`IdRangeError` for an id outside its table, :class:`BadOffsets`."""
        fault = array("q", (0, 0, 0, 0))
        if self._forward(pointer(fixed), pointer(calls), len(requests), torch.get_num_threads(), pointer(fault)):
            raise_fault(fault, requests, fixed)

    def weights_backward(self, fixed: array[int], calls: array[int], targets: array[int]) -> None:
        """Fill the gradients of per-sample weights at the addresses ``targets`` (0: not wanted)."""
        fault = array("q", (0, 0, 0, 0))
        self._weights_backward(
            pointer(fixed), pointer(calls), len(targets), pointer(targets), torch.get_num_threads(), pointer(fault)
        )

    def table_gradients(
        self, fixed: array[int], calls: array[int], requests: Sequence[Request], tables: Sequence[TableGradient]
    ) -> list[Tensor]:
        """One gradient per table, sparse ones coalesced; look-ups of one table follow each other in ``requests``."""
        first = array("q", (0,))
        for table in tables:
            first.append(first[-1] + table.num_lookups)
        distinct, fault = array("q", bytes(8 * len(tables))), array("q", (0, 0, 0, 0))
        threads = torch.get_num_threads()
        plan = self._plan(
            pointer(fixed),
            pointer(calls),
            len(requests),
            pointer(first),
            len(tables),
            threads,
            pointer(distinct),
            pointer(fault),
        )
        if not plan:
            raise_fault(fault, requests, fixed)
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


def _allocate(tables: Sequence[TableGradient], distinct: array[int]) -> tuple[list[Tensor], array[int]]:
    """Gradients to be filled, and the struct ``Target`` of each. Sparse ones share two buffers: two allocations in
    all.
    """
    counts = [count if table.sparse else 0 for count, table in zip(distinct, tables, strict=True)]
    total = sum(counts)
    rows = torch.empty(1, total, dtype=torch.int64).split(counts, 1)
    sums = torch.empty(total, tables[0].shape[1], dtype=tables[0].dtype).split(counts)
    gradients: list[Tensor] = []
    targets = array("q")
    for k, table in enumerate(tables):
        if table.sparse:
            gradient = torch.sparse_coo_tensor(rows[k], sums[k], table.shape, is_coalesced=True, check_invariants=False)
            # an address that is not null says "sparse", also when there are no rows
            targets.extend((rows[k].data_ptr() or 1, sums[k].data_ptr(), table.by_frequency))
        else:
            gradient = torch.zeros(table.shape, dtype=table.dtype)
            targets.extend((0, gradient.data_ptr(), table.by_frequency))
        gradients.append(gradient)
    return gradients, targets


def raise_fault(fault: array[int], requests: Sequence[Request], fixed: array[int]) -> NoReturn:
    """Turn the struct ``Fault`` into an exception."""
    status, at, position, value = fault
    if status == BAD_OFFSETS:
        raise BadOffsets
    request = requests[at]
    place = divmod(position, request.ids.shape[1]) if request.ids.dim() == 2 else position
    name = f" ({request.spec.name})" if request.spec.name else ""
    rows = fixed[at * FIXED_FIELDS + 1]
    raise IdRangeError(
        f"id {value} at position {place} is outside table {request.spec.table}{name}, which has {rows} rows",
        hint="ids must be in [0, rows); check the vocabulary size, or hash ids into the table",
    )
