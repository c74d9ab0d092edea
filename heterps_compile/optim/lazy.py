"""Tables whose rows may be behind: what steps they missed, and how they catch up.

Enters: steps, one at a time, through :class:`Clock`. Leaves: rows exactly where torch's dense step would have put
them, when they are read (:func:`catch_up`), before they get a gradient (the update kernel), or all at once
(:func:`flush`). A write to a table that has rows behind cannot be put in order with the steps they missed: it raises
:class:`StaleTableError`.
"""

from __future__ import annotations

import math
import threading
import weakref
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field

import torch
from torch import Tensor
from torch.optim import Optimizer

from heterps_compile.errors import StaleTableError
from heterps_compile.kernels import cpu_units
from heterps_compile.kernels.cpu_lookup import pointer
from heterps_compile.kernels.cpu_update import Rule, table_fields
from heterps_compile.kernels.cpu_update_source import STEP_FIELDS
from heterps_compile.optim.rules import Recipe, StepRates, horizon

MAX_STEPS = 2**16  # then all rows catch up and the history starts anew: 6 MB of it at most

_records: dict[int, Record] = {}  # by id of the table, which the record keeps alive; emptied when its optimizer goes
_lock = threading.RLock()  # a reader must not see a row that another thread is still moving


@dataclass(slots=True)
class Clock:
    """The steps of tables that have made all of them together, since all their rows were last known to be current."""

    steps: array[float] = field(default_factory=lambda: array("d", bytes(8 * len(STEP_FIELDS))))
    now: int = 0
    horizon: int = 1
    beta1: float = 0.0  # the largest so far

    def add(self, rates: StepRates) -> None:
        """Append a step. Sums of logarithms let a factor over many steps be taken at once."""
        sums = self.steps[-3:]
        factors = (rates.beta1, rates.beta2, rates.decay)
        self.steps.extend(astuple(rates))
        # a factor of 0 leaves nothing: e**-1e4 is 0
        self.steps.extend(s + (math.log(f) if f > 0 else -1e4) for s, f in zip(sums, factors, strict=True))
        self.now += 1
        self.horizon, self.beta1 = max(self.horizon, horizon(rates)), max(self.beta1, rates.beta1)

    def reach(self, dtype: torch.dtype) -> int:
        """Steps without a gradient after which momentum kept in ``dtype`` moves no row any more.

        Rounding holds momentum up: float16 ends at multiples of 2**-24 that round back to themselves, and bfloat16,
        of 8 bits, loses at least one in its last place while 1 - beta1 > 2**-8, at worst half as fast as exact
        numbers.
        """
        if dtype.itemsize > 2:
            return self.horizon
        fades = dtype is torch.bfloat16 and 1 - self.beta1 > 2**-8
        return min(2 * self.horizon, 2**31) if fades else 2**31

    def copy(self) -> Clock:
        """The same steps, to go on apart."""
        return Clock(self.steps[:], self.now, self.horizon, self.beta1)


def _memory(table: Tensor) -> tuple[object, ...]:
    """Where a table lies and how it is to be read."""
    return table.data_ptr(), table.dtype, table.shape, table.stride()


@dataclass(slots=True, eq=False)
class Record:
    """One table with rows that may be behind; ``last`` is the step each row stands at, on ``clock``."""

    table: Tensor
    recipe: Recipe
    first: Tensor | None
    second: Tensor | None
    clock: Clock
    owner: weakref.ref[Optimizer]
    last: Tensor
    version: int = 0
    memory: tuple[object, ...] = ()
    behind: bool = False

    def was_written(self) -> bool:
        """Whether someone else has written to the table, or put other memory under it, while rows were behind."""
        # _version: what autograd itself compares; there is no public name for it (torch 2.13.0)
        return self.behind and (self.table._version, _memory(self.table)) != (self.version, self.memory)

    def check(self) -> None:
        """Raises :class:`StaleTableError` if :meth:`was_written`: no kernel may run over memory it does not know."""
        if self.was_written():
            raise StaleTableError(
                f"a table of {tuple(self.table.shape)} was changed in place, cast or replaced while rows of it were "
                "behind",
                hint="call heterps_compile.flush(model) before writing to its weights",
            )

    def stepped(self) -> None:
        """A step was made: rows without gradient are behind now."""
        self.behind, self.version, self.memory = True, self.table._version, _memory(self.table)

    def fields(self, rows: Tensor | None = None) -> tuple[int, ...]:
        """The struct that asks for ``rows`` (None: all) to be brought to now."""
        return table_fields(
            self.table,
            self.first,
            self.second,
            history=pointer(self.clock.steps),
            now=self.clock.now,
            last=self.last,
            rows=rows,
            horizon=self.clock.reach(self.table.dtype),
        )


def record_of(table: Tensor) -> Record | None:
    """The record of a table, if it has one."""
    record = _records.get(id(table))
    return record if record is not None and record.table is table else None


def records_of(optimizer: Optimizer | None) -> list[Record]:
    """The records an optimizer steps; for None, those whose optimizer is gone."""
    return [record for record in list(_records.values()) if record.owner() is optimizer]


def add_record(record: Record) -> None:
    """Keep a record until :func:`drop`."""
    _records[id(record.table)] = record


def drop(records: Iterable[Record]) -> None:
    """Bring tables up to date and forget that they could be behind."""
    for record in list(records):
        _flush([record])
        _records.pop(id(record.table), None)


def drop_ownerless() -> None:
    """Let the tables of optimizers that are gone make the steps they missed; there will be no others."""
    for record in records_of(None):
        if record.was_written():
            record.behind = False  # those steps can no longer be made: the error said so to who read the table
        drop([record])


def catch_up(tables: Sequence[Tensor], ids: Sequence[Tensor]) -> None:
    """Bring the rows that ``ids[k]`` names in ``tables[k]`` up to date; to be called before they are read.

    Nothing is written if an id is out of range: the look-up that follows says so.
    """
    if not _records:
        return
    kinds: dict[tuple[Rule, int, torch.dtype], list[tuple[Record, Tensor]]] = {}
    for table, rows in zip(tables, ids, strict=True):
        record = record_of(table)
        if record is None or not (record.behind and record.recipe.rows_move):
            continue
        if rows.is_cpu and rows.dtype in (torch.int64, torch.int32):
            kind = (record.recipe.rule, table.shape[1], table.dtype)
            kinds.setdefault(kind, []).append((record, rows.reshape(-1)))
    with _lock:
        for (rule, dim, dtype), pairs in kinds.items():
            for record, _ in pairs:
                record.check()
            kernels = cpu_units.update_kernels(dim, dtype)
            assert kernels is not None
            kernels.catch_up(rule, [record.fields(rows) for record, rows in pairs])


def flush(tables: Iterable[Tensor] | None = None) -> None:
    """Bring all rows of these tables (None: of all tables) and their optimizer state up to date."""
    if _records:
        found = list(_records.values()) if tables is None else [record_of(table) for table in tables]
        _flush([record for record in found if record is not None])


def _flush(records: Sequence[Record]) -> None:
    with _lock:
        for record in records:
            if record.behind:
                record.check()
                kernels = cpu_units.update_kernels(record.table.shape[1], record.table.dtype)
                assert kernels is not None
                kernels.catch_up(record.recipe.rule, [record.fields()])
                record.behind = False


def restart(records: Sequence[Record]) -> Clock:
    """Bring tables up to date and let them count from 0 again, on one new clock."""
    _flush(records)
    clock = Clock()
    for record in records:
        record.clock = clock
        record.last.zero_()
    return clock
