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


@dataclass(frozen=True, slots=True)
class Ready:
    """A table about to make step ``number``; ``record`` says where its rows stand, or is None where no row ever
    waits.
    """

    table: Tensor
    group: Group
    recipe: Recipe
    state: dict[str, Tensor]
    number: int
    record: Record | None = None

    def update(self, clock: Clock) -> Update:
        """The step that ``clock`` has just counted."""
        assert self.table.grad is not None
        return Update(
            rule=self.recipe.rule,
            table=self.table,
            grad=self.table.grad,
            first=self.state[self.recipe.first] if self.recipe.first else None,
            second=self.state[self.recipe.second] if self.recipe.second else None,
            history=pointer(clock.steps),
            now=clock.now,
            last=self.record.last if self.record else None,
            horizon=clock.horizon,
        )


@dataclass(frozen=True, slots=True)
class Steps:
    """The updates of one ``optimizer.step()``, and the clocks and records they point into."""

    updates: Sequence[Update]
    clocks: Sequence[Clock]
    records: Sequence[Record]


def steps_of(optimizer: Optimizer) -> Steps:
    """Count a step for every table the kernels can step."""
    together: dict[tuple[int, int, int], list[Ready]] = {}
    for group in optimizer.param_groups:
        for item in (*_sparse_tables(optimizer, group), *_lazy_tables(optimizer, group)):
            clock = item.record.clock if item.record else None
            together.setdefault((id(clock), id(group), item.number), []).append(item)
    updates: list[Update] = []
    clocks: list[Clock] = []
    records: list[Record] = []
    for items in together.values():
        clock = _clock_of(optimizer, items)
        clock.add(items[0].recipe.rates(items[0].group, items[0].number))
        clocks.append(clock)
        updates.extend(item.update(clock) for item in items)
        records.extend(item.record for item in items if item.record)
    return Steps(updates, clocks, records)


def _clock_of(optimizer: Optimizer, items: Sequence[Ready]) -> Clock:
    """The clock these tables step on: their own, or a copy of it if others on it do not step now."""
    stepping = [item.record for item in items if item.record]
    if not stepping:
        return Clock()
    clock = stepping[0].clock
    if clock.now >= lazy.MAX_STEPS:
        return lazy.restart(stepping)
    if any(record.clock is clock and record not in stepping for record in lazy.records_of(optimizer)):
        clock = clock.copy()
        for record in stepping:
            record.clock = clock
    return clock


# ---------------------------------------------------------------- tables with sparse=True


def _sparse_tables(optimizer: Optimizer, group: Group) -> Iterator[Ready]:
    recipe = sparse_recipe(optimizer, group)
    if recipe is None:
        return
    for table in group["params"]:
        if marks.kind_of(table) != marks.SPARSE or not is_applicable(table):
            continue
        if _state_fits(optimizer, recipe, table):
            state = _state_of(optimizer, recipe, table)
            yield Ready(table, group, recipe, state, _count(recipe, state))


def _state_of(optimizer: Optimizer, recipe: Recipe, table: Tensor) -> dict[str, Tensor]:
    """The state of a table; a rule without state leaves no empty entry behind for a checkpoint to show."""
    state: dict[str, Tensor] = optimizer.state[table] if recipe.first or recipe.second else {}
    return state


def _state_fits(optimizer: Optimizer, recipe: Recipe | Refusal, table: Tensor) -> bool:
    """Whether the kernels can keep the state where it is, or make it: Adagrad's is made by its constructor only."""
    if isinstance(recipe, Refusal):
        return False
    state = _state_of(optimizer, recipe, table)
    made_at_first_step = recipe.rule is not Rule.ADAGRAD
    keys = [key for key in (recipe.first, recipe.second) if key is not None]
    return all(fits(state[key], table) if state.get(key) is not None else made_at_first_step for key in keys)


def _count(recipe: Recipe, state: dict[str, Tensor]) -> int:
    """Count the step where torch counts it, and return its number."""
    if not recipe.counts_steps:
        return 2  # what a step does no longer depends on its number
    state["step"] += 1
    return int(state["step"])


# ---------------------------------------------------------------- lazy tables


def _lazy_tables(optimizer: Optimizer, group: Group) -> Iterator[Ready]:
    tables = [table for table in group["params"] if marks.kind_of(table) == marks.LAZY]
    if not tables:
        return
    recipe = dense_recipe(optimizer, group)
    new: dict[int, Clock] = {}  # by number of the step
    for table in tables:
        record = lazy.record_of(table)
        if record is not None and not _still_holds(record, optimizer, recipe):
            lazy.drop([record])
        if table.grad is None or table.grad.layout is torch.strided:
            if table.grad is not None:
                lazy.drop(filter(None, [lazy.record_of(table)]))  # torch steps all its rows, from where they should be
            continue
        refusal = _refusal(recipe, table)
        if refusal is not None or not (is_applicable(table) and _state_fits(optimizer, recipe, table)):
            lazy.drop(filter(None, [lazy.record_of(table)]))
            if refusal is not None:
                _tell(optimizer, group, refusal)
            table.grad = table.grad.to_dense()
            continue
        assert isinstance(recipe, Recipe)
        yield _ready(optimizer, group, recipe, table, new)


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


def _ready(optimizer: Optimizer, group: Group, recipe: Recipe, table: Tensor, new: dict[int, Clock]) -> Ready:
    state = _state_of(optimizer, recipe, table)
    is_first = recipe.first is not None and state.get(recipe.first) is None
    _make_state(recipe, state, table)
    number = _count(recipe, state)
    if not recipe.counts_steps and is_first:
        number = 1
    record = lazy.record_of(table)
    if record is None and recipe.state_decays:
        watch_optimizer(optimizer)
        record = Record(
            table=table,
            recipe=recipe,
            first=state[recipe.first] if recipe.first else None,
            second=state[recipe.second] if recipe.second else None,
            clock=new.setdefault(number, Clock()),
            owner=weakref.ref(optimizer),
            last=torch.zeros(table.shape[0], dtype=torch.int32),
        )
        lazy.add_record(record)
    return Ready(table, group, recipe, state, number, record)


def _make_state(recipe: Recipe, state: dict[str, Tensor], table: Tensor) -> None:
    """What torch makes at a table's first step, as it makes it."""
    if recipe.counts_steps and "step" not in state:
        dtype = torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32
        state["step"] = torch.tensor(0.0, dtype=dtype)
    for key in (recipe.first, recipe.second):
        if key is not None and state.get(key) is None:
            state[key] = torch.zeros_like(table, memory_format=torch.preserve_format)


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
