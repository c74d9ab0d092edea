"""How a group of look-ups is served: which by which kernels, which by the reference, and the half of every call that
repeats.

Enters: a :class:`GroupSpec` and the key of each table. Leaves: a :class:`Layout`, cached, so that a training loop
decides once.
"""

from __future__ import annotations

import functools
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from heterps_compile.kernels import cpu_units
from heterps_compile.kernels.cpu_lookup import FIXED_FIELDS, LookupKernels, fixed_fields
from heterps_compile.kernels.specs import GroupSpec, LookupSpec

MAX_ROWS = 2**31 - 1

TableKey = tuple[int, torch.Size, tuple[int, ...], torch.dtype]
"""Address, shape, strides and dtype: all a kernel needs to know of a table."""


@dataclass(frozen=True, slots=True)
class Job:
    """The look-ups of one table within a part: ``lookups`` are positions in ``Part.lookups``."""

    table: int
    lookups: range
    sparse: bool
    by_frequency: bool


@dataclass(frozen=True, slots=True)
class Part:
    """Look-ups whose tables share (dim, dtype), those of one table side by side, and the kernels that serve them."""

    kernels: LookupKernels
    dim: int
    dtype: torch.dtype
    lookups: tuple[int, ...]
    jobs: tuple[Job, ...]
    fixed: array[int]

    def fixed_of(self, positions: Sequence[int]) -> array[int]:
        """The ``Fixed`` structs of some look-ups of this part."""
        chosen = array("q")
        for at in positions:
            chosen.extend(self.fixed[at * FIXED_FIELDS : (at + 1) * FIXED_FIELDS])
        return chosen


@dataclass(frozen=True, slots=True)
class Layout:
    """``parts`` run on kernels; ``leftover`` are look-ups for the reference."""

    parts: tuple[Part, ...]
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
    parts = []
    for (dim, dtype), lookups in shapes.items():
        kernels = cpu_units.lookup_kernels(dim, dtype)
        if kernels is None:
            leftover.extend(lookups)
        else:
            parts.append(_make_part(spec, keys, lookups, kernels))
    return Layout(tuple(parts), tuple(leftover))


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


def _make_part(spec: GroupSpec, keys: tuple[TableKey | None, ...], lookups: list[int], kernels: LookupKernels) -> Part:
    by_table: dict[int, list[int]] = {}
    for index in lookups:
        by_table.setdefault(spec.lookups[index].table, []).append(index)
    order = [index for group in by_table.values() for index in group]
    jobs, at = [], 0
    for table, group in by_table.items():
        jobs.append(
            Job(
                table,
                range(at, at + len(group)),
                spec.lazy or all(spec.lookups[index].sparse for index in group),
                any(spec.lookups[index].scale_grad_by_freq for index in group),
            )
        )
        at += len(group)
    fixed = array("q")
    for index in order:
        key = keys[spec.lookups[index].table]
        assert key is not None
        fixed.extend(fixed_fields(spec.lookups[index], key[0], key[1][0]))
    first = keys[spec.lookups[order[0]].table]
    assert first is not None
    return Part(kernels, first[1][1], first[3], tuple(order), tuple(jobs), fixed)
