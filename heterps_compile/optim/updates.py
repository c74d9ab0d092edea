"""Sparse gradients applied to their tables: one kernel call per rule and kind of table.

Enters: :class:`Update` values, each a table, its gradient and the step it goes to. Leaves: tables and state changed
in place, with their version counters bumped, so that a graph built before the step is still found out when it goes
backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from heterps_compile.kernels import cpu_units
from heterps_compile.kernels.coalesce import coalesce
from heterps_compile.kernels.cpu_update import Rule, UpdateKernels, table_fields
from heterps_compile.optim.table_optimizer import wide


class Update(NamedTuple):  # a frozen dataclass takes 3 us to make, and a step makes one per table
    """One table, its gradient, its state, and where its step stands.

    ``history`` is the address of step 0 and ``now`` the number of the step to make; ``last`` are the steps its rows
    stand at, or None if rows wait for nothing.
    """

    rule: Rule
    table: Tensor
    grad: Tensor
    first: Tensor | None
    second: Tensor | None
    history: int
    now: int
    last: Tensor | None = None
    horizon: int = 1


def is_applicable(parameter: Tensor) -> bool:
    """Whether the kernels can apply ``parameter.grad``: sparse in rows, on CPU, of a supported kind."""
    grad = parameter.grad
    return (
        grad is not None
        and grad.layout is torch.sparse_coo
        and parameter.is_cpu
        and grad.is_cpu
        and parameter.dim() == 2
        and grad.sparse_dim() == 1
        and grad.dtype is parameter.dtype
        and parameter.is_contiguous()
        and cpu_units.is_supported(parameter.shape[1], parameter.dtype)
        and cpu_units.update_kernels(parameter.shape[1], parameter.dtype) is not None
    )


def fits(state: Tensor, table: Tensor, rule: Rule) -> bool:
    """Whether the kernels of ``rule`` can keep ``state`` of ``table`` where it is."""
    return (
        state.is_cpu
        and state.is_contiguous()
        and state.dtype is (wide(table.dtype) if rule in (Rule.ROWWISE_ADAGRAD, Rule.FTRL) else table.dtype)
        and state.shape == (table.shape[:1] if rule is Rule.ROWWISE_ADAGRAD else table.shape)
    )


def apply(updates: Sequence[Update]) -> None:
    """Make the steps. Gradients with repeated rows (accumulated ones) are summed first, in a fixed order."""
    kinds: dict[tuple[Rule, int, torch.dtype], list[Update]] = {}
    for update in updates:
        kinds.setdefault((update.rule, update.table.shape[1], update.table.dtype), []).append(update)
    for (rule, dim, dtype), same in kinds.items():
        kernels = cpu_units.update_kernels(dim, dtype)
        assert kernels is not None
        _apply_same(kernels, rule, same)
    increment_version([t for update in updates for t in (update.table, update.first, update.second) if t is not None])


def _apply_same(kernels: UpdateKernels, rule: Rule, updates: Sequence[Update]) -> None:
    # _indices and _values: autograd hands on coalesced gradients without their flag, and indices() would refuse them
    # (tried on torch 2.13.0)
    parts = [(update.grad._indices()[0], update.grad._values().contiguous()) for update in updates]
    structs = [_fields(update, *part) for update, part in zip(updates, parts, strict=True)]
    done = 0
    while (unsorted := kernels.first_unsorted(structs[done:])) >= 0:
        done += unsorted
        summed = coalesce(*parts[done], updates[done].table.shape)
        parts[done] = summed.indices()[0], summed.values()
        structs[done] = _fields(updates[done], *parts[done])
        done += 1
    kernels.update(rule, structs)


def _fields(update: Update, rows: Tensor, values: Tensor) -> tuple[int, ...]:
    return table_fields(
        update.table,
        update.first,
        update.second,
        history=update.history,
        now=update.now,
        last=update.last,
        rows=rows,
        grad=values,
        horizon=update.horizon,
    )
