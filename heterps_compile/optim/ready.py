"""Which tables of an optimizer the kernels step, and which step that is.

Enters: an optimizer about to step. Leaves: an :class:`Update` per table that a recipe covers, its state made and its
step counted as torch would. Lazy tables that no recipe covers get the dense gradient eager would have had, and the
optimizer's owner is told once what to change. Tables that step together share one :class:`Clock`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from heterps_compile.errors import HeterpsWarning
from heterps_compile.kernels.cpu_lookup import pointer
from heterps_compile.kernels.cpu_update import Rule
from heterps_compile.optim import lazy, marks
from heterps_compile.optim.current import watch_optimizer
from heterps_compile.optim.lazy import Clock, Record
from heterps_compile.optim.rules import Group, Recipe, Refusal, dense_recipe, sparse_recipe
from heterps_compile.optim.updates import Update, fits, is_applicable

_told: WeakKeyDictionary[Optimizer, set[str]] = WeakKeyDictionary()  # reasons each optimizer's owner has been given

UNWATCHED = Refusal(
    reason="a row without gradient would be behind, and nothing watches who reads it",
    hint="use heterps_compile.compile_ or @train_step: torch.compile shows a backend no model to watch",
)


class Ready(NamedTuple):
    """A table about to step, with its state made; ``is_first``: that was just now."""

    table: Tensor
    recipe: Recipe
    state: dict[str, Any]
    is_first: bool = False

    def moments(self) -> tuple[Tensor | None, Tensor | None]:
        """State the kernels change, in the places they expect it."""
        first, second = self.recipe.first, self.recipe.second
        return self.state[first] if first else None, self.state[second] if second else None

    def update(self, clock: Clock, record: Record | None) -> Update:
        """The step that ``clock`` has just counted."""
        assert self.table.grad is not None
        first, second = self.moments()
        return Update(
            rule=self.recipe.rule,
            table=self.table,
            grad=self.table.grad,
            first=first,
            second=second,
            history=pointer(clock.steps),
            now=clock.now,
            last=record.last if record else None,
            horizon=clock.reach(self.table.dtype),
        )


@dataclass(frozen=True, slots=True)
class Steps:
    """The updates of one ``optimizer.step()``, and the clocks and records they point into."""

    updates: Sequence[Update]
    clocks: Sequence[Clock]
    records: Sequence[Record]


def steps_of(optimizer: Optimizer) -> Steps:
    """Count a step for every table the kernels can step."""
    updates: list[Update] = []
    clocks: list[Clock] = []
    records: list[Record] = []
    for group in optimizer.param_groups:
        ready = [*_sparse_tables(optimizer, group), *_lazy_tables(optimizer, group)]
        together: dict[tuple[int, int], list[tuple[Ready, Record | None]]] = {}
        new: dict[int, Clock] = {}  # by number of the step
        for item, number in zip(ready, _count(ready), strict=True):
            record = _record_of(optimizer, item, new.setdefault(number, Clock()))
            together.setdefault((id(record.clock) if record else 0, number), []).append((item, record))
        for (_, number), items in together.items():
            clock = _clock_of(optimizer, [record for _, record in items if record])
            clock.add(items[0][0].recipe.rates(group, number))
            clocks.append(clock)
            updates.extend([item.update(clock, record) for item, record in items])
            records.extend([record for _, record in items if record])
    return Steps(updates, clocks, records)


def _count(ready: Sequence[Ready]) -> list[int]:
    """Count a step where torch counts it, and return its number; without a count only "first" and "later" differ."""
    counting = [item.state for item in ready if item.recipe.counts_steps]
    tensors = [state["step"] for state in counting if isinstance(state["step"], Tensor)]
    if tensors:
        torch._foreach_add_(tensors, 1)  # as torch's own optimizers count, in one call (torch 2.13.0)
    for state in counting:
        if not isinstance(state["step"], Tensor):  # SparseAdam's is an int
            state["step"] += 1
    return [int(item.state["step"]) if item.recipe.counts_steps else 2 - item.is_first for item in ready]


def _clock_of(optimizer: Optimizer, stepping: Sequence[Record]) -> Clock:
    """The clock these tables step on: their own, or a copy of it if others on it do not step now."""
    if not stepping:
        return Clock()
    clock, stepping_ids = stepping[0].clock, {id(record) for record in stepping}
    if clock.now >= lazy.MAX_STEPS:
        return lazy.restart(stepping)
    if any(other.clock is clock and id(other) not in stepping_ids for other in lazy.records_of(optimizer)):
        clock = clock.copy()
        for record in stepping:
            record.clock = clock
    return clock


def _record_of(optimizer: Optimizer, item: Ready, clock: Clock) -> Record | None:
    """Where the rows of a lazy table stand, from now on if not before; None where no row ever waits."""
    if not item.recipe.state_decays:
        return None
    record = lazy.record_of(item.table)
    if record is None:
        watch_optimizer(optimizer)
        first, second = item.moments()
        last = torch.zeros(item.table.shape[0], dtype=torch.int32)
        record = Record(item.table, item.recipe, first, second, clock, weakref.ref(optimizer), last)
        lazy.add_record(record)
    return record


# ---------------------------------------------------------------- tables with sparse=True


def _sparse_tables(optimizer: Optimizer, group: Group) -> Iterator[Ready]:
    recipe = sparse_recipe(optimizer, group)
    if recipe is None:
        return
    for table in group["params"]:
        if marks.kind_of(table) != marks.SPARSE or not is_applicable(table):
            continue
        state = _state_of(optimizer, recipe, table)
        if _state_fits(recipe, state, table):
            yield _make_ready(recipe, group, state, table)


def _state_of(optimizer: Optimizer, recipe: Recipe, table: Tensor) -> dict[str, Any]:
    """The state of a table; a rule without state leaves no empty entry behind for a checkpoint to show."""
    state: dict[str, Any] = optimizer.state[table] if recipe.first or recipe.second else {}
    return state


def _state_fits(recipe: Recipe, state: dict[str, Any], table: Tensor) -> bool:
    """Whether the kernels can keep the state where it is, or make it: Adagrad's is made by its constructor only."""
    for key in (recipe.first, recipe.second):
        if key is not None:
            tensor = state.get(key)
            if not (recipe.rule is not Rule.ADAGRAD if tensor is None else fits(tensor, table, recipe.rule)):
                return False
    return True


# ---------------------------------------------------------------- lazy tables


def _lazy_tables(optimizer: Optimizer, group: Group) -> Iterator[Ready]:
    tables = [table for table in group["params"] if marks.kind_of(table) == marks.LAZY]
    if not tables:
        return
    recipe = dense_recipe(optimizer, group)
    for table in tables:
        record = lazy.record_of(table)
        if record is not None and not _still_holds(record, optimizer, recipe):
            lazy.drop([record])
        if table.grad is None:
            continue
        refusal = _refusal(recipe, table)
        if refusal is None and isinstance(recipe, Recipe) and is_applicable(table):
            state = _state_of(optimizer, recipe, table)
            if _state_fits(recipe, state, table):
                yield _make_ready(recipe, group, state, table)
                continue
        lazy.drop(filter(None, [lazy.record_of(table)]))  # torch steps all rows, from where they should be
        if table.grad.layout is torch.sparse_coo:
            if refusal is not None:
                _tell(optimizer, group, refusal)
            table.grad = table.grad.to_dense()


def _refusal(recipe: Recipe | Refusal, table: Tensor) -> Refusal | None:
    if isinstance(recipe, Refusal):
        return recipe
    return UNWATCHED if recipe.rows_move and not marks.is_watched(table) else None


def _still_holds(record: Record, optimizer: Optimizer, recipe: Recipe | Refusal) -> bool:
    """Whether a record is of this optimizer, rule and state; loading a checkpoint puts other tensors into the state."""
    if record.owner() is not optimizer or record.recipe is not recipe or not record.table.is_contiguous():
        return False
    state = optimizer.state.get(record.table, {})
    kept = ((record.first, record.recipe.first), (record.second, record.recipe.second))
    return all(key is None or state.get(key) is tensor for tensor, key in kept)


def _make_ready(recipe: Recipe, group: Group, state: dict[str, Any], table: Tensor) -> Ready:
    """Make what the optimizer makes at a table's first step, as it makes it."""
    if recipe.counts_steps and "step" not in state:
        dtype = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
        state["step"] = 0 if recipe.rule is Rule.SPARSE_ADAM else torch.tensor(0.0, dtype=dtype)
    missing = [key for key in (recipe.first, recipe.second) if key is not None and state.get(key) is None]
    if missing and recipe.make is not None:
        state.update(recipe.make(group, table))
    elif missing:
        state.update({key: torch.zeros_like(table, memory_format=torch.preserve_format) for key in missing})
    return Ready(table, recipe, state, is_first=bool(missing))


def _tell(optimizer: Optimizer, group: Group, refusal: Refusal) -> None:
    told = _told.setdefault(optimizer, set())
    if refusal.reason in told:
        return
    told.add(refusal.reason)
    tables = [table for table in group["params"] if marks.kind_of(table) == marks.LAZY]
    touched = sum(t.grad._nnz() for t in tables if t.grad is not None and t.grad.layout is torch.sparse_coo)
    rows = sum(table.shape[0] for table in tables)
    warnings.warn(
        f"lazy tables stay dense under {type(optimizer).__name__}: {refusal.reason}. Every step updates all {rows:,} "
        f"rows instead of the {touched:,} that have a gradient now.\nhint: {refusal.hint}",
        HeterpsWarning,
        stacklevel=2,
    )
