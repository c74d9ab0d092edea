"""How a group of look-ups is served: which by which kernels, which by the reference, and the half of every call that
repeats.

Enters: a :class:`GroupSpec` and the key of each table. Leaves: a :class:`Layout`, cached, so that a training loop
decides once.
"""

from __future__ import annotations

import functools
from array import array
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from heterps_compile.kernels import cpu_units
from heterps_compile.kernels.cpu_lookup import LookupKernels, TableGradient, fixed_fields
from heterps_compile.kernels.specs import GroupSpec, LookupSpec

MAX_ROWS = 2**31 - 1

TableKey = tuple[int, torch.Size, tuple[int, ...], torch.dtype]
"""Address, shape, strides and dtype: all a kernel needs to know of a table."""


@dataclass(frozen=True, slots=True)
class Job:
    """The look-ups of one table within a part: ``lookups`` are positions in ``Part.lookups``."""

    table: int
    lookups: range
    gradient: TableGradient


@dataclass(frozen=True, slots=True)
class Part:
    """Look-ups whose tables share (dim, dtype), those of one table side by side, and the kernels that serve them.

    ``lookups`` are positions in the spec, ``slots`` the same look-ups as positions in ``Layout.served``.
    """

    kernels: LookupKernels
    dim: int
    dtype: torch.dtype
    lookups: tuple[int, ...]
    slots: tuple[int, ...]
    jobs: tuple[Job, ...]
    fixed: array[int]


@dataclass(frozen=True, slots=True)
class Layout:
    """``parts`` run on kernels and together serve the look-ups ``served``, whose output rows are ``dims`` wide.

    ``leftover`` are look-ups for the reference. ``dtype`` is None if the served tables differ in it.
    """

    parts: tuple[Part, ...]
    served: tuple[int, ...]
    dims: tuple[int, ...]
    dtype: torch.dtype | None
    leftover: tuple[int, ...]


def table_key(table: Tensor) -> TableKey | None:
    """The key of a table the kernels may be able to read, else None."""
    if type(table) not in (Parameter, Tensor) or not table.is_cpu:
        return None
    return table.data_ptr(), table.shape, table.stride(), table.dtype


@functools.lru_cache(maxsize=256)
def make_layout(spec: GroupSpec, keys: tuple[TableKey | None, ...]) -> Layout:
    """Decide for every look-up, by the static arguments of its call and by its table."""
    uses = Counter(lookup.table for lookup in spec.lookups)
    shapes: dict[tuple[int, torch.dtype], list[int]] = {}
    leftover: list[int] = []
    for index, lookup in enumerate(spec.lookups):
        key = keys[lookup.table]
        if key is None or not _has_kernels(lookup, key, uses[lookup.table], lazy=spec.lazy):
            leftover.append(index)
        else:
            shapes.setdefault((key[1][1], key[3]), []).append(index)
    kernels = {shape: cpu_units.lookup_kernels(*shape) for shape in shapes}
    for shape in [shape for shape, found in kernels.items() if found is None]:
        leftover.extend(shapes.pop(shape))
    dims = {index: dim for (dim, _), lookups in shapes.items() for index in lookups}
    served = tuple(sorted(dims))
    parts = []
    for shape, lookups in shapes.items():
        found = kernels[shape]
        assert found is not None
        parts.append(_make_part(spec, keys, lookups, found, served))
    dtypes = {part.dtype for part in parts}
    return Layout(
        parts=tuple(parts),
        served=served,
        dims=tuple(dims[index] for index in served),
        dtype=dtypes.pop() if len(dtypes) == 1 else None,
        leftover=tuple(sorted(leftover)),
    )


def _has_kernels(lookup: LookupSpec, key: TableKey, uses: int, *, lazy: bool) -> bool:
    _, shape, strides, dtype = key
    if (
        len(shape) != 2
        or strides != (shape[1], 1)
        or shape[0] > MAX_ROWS
        or not cpu_units.is_supported(shape[1], dtype)
    ):
        return False
    if lookup.max_norm is not None or (lookup.has_weights and lookup.mode != "sum"):
        return False
    if lookup.padding_idx is not None and not -shape[0] <= lookup.padding_idx < shape[0]:
        return False
    if lookup.scale_grad_by_freq and (uses > 1 or lookup.mode != "none"):
        # eager counts within each look-up, the kernel within each table; and eager's embedding_bag divides by the
        # count of another row (2.13.0: counts[indices[i]] with i the number of the distinct row): keep what eager
        # gives
        return False
    return lazy or not (lookup.sparse and (lookup.scale_grad_by_freq or lookup.mode == "max"))


def _make_part(
    spec: GroupSpec,
    keys: tuple[TableKey | None, ...],
    lookups: list[int],
    kernels: LookupKernels,
    served: tuple[int, ...],
) -> Part:
    by_table: dict[int, list[int]] = {}
    for index in lookups:
        by_table.setdefault(spec.lookups[index].table, []).append(index)
    jobs: list[Job] = []
    order: list[int] = []
    fixed = array("q")
    for table, group in by_table.items():
        key = keys[table]
        assert key is not None
        address, shape, _, dtype = key
        members = [spec.lookups[index] for index in group]
        gradient = TableGradient(
            shape=shape,
            dtype=dtype,
            num_lookups=len(group),
            sparse=spec.lazy or all(lookup.sparse for lookup in members),
            by_frequency=any(lookup.scale_grad_by_freq for lookup in members),
        )
        jobs.append(Job(table, range(len(order), len(order) + len(group)), gradient))
        order.extend(group)
        for lookup in members:
            fixed.extend(fixed_fields(lookup, address, shape[0]))
    return Part(
        kernels=kernels,
        dim=shape[1],
        dtype=dtype,
        lookups=tuple(order),
        slots=tuple(served.index(index) for index in order),
        jobs=tuple(jobs),
        fixed=fixed,
    )
