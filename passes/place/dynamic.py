"""The dynamic programme over (end layer, type): the cheapest stages that are all at most ``time_s`` slow.

Enters: a cost model, a time per sample, a weight per unit of each type. Leaves: the least weighted sum of units, exact
for a chain without joint limits, and the placement that reaches it. At a fixed time the cost is a sum over stages,
which is what makes the programme exact; neighbours of equal type are one stage, so a stage enters from another type
only.

    best[j, t]  = min over i < j of  enter[i, t] + weight_t * units(layers i..j-1 on t)
    enter[i, t] = min over s != t of best[i, s]

Most starts i can be left out: one that no type enters cheaper than a later start never wins, as the later start's
stages are shorter; and a stage that is too long for the time, or for the limit of its type, stays so. Units are
computed for ``BLOCK`` ends at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from heterps_compile.cost_model import Bools, CostModel, Floats, Ints, fewest_units, units_needed
from heterps_compile.spans import earliest

Units = Callable[[Floats, float], Floats]

BLOCK = 24
"""Ends per block: larger ones call numpy less often and drop starts later (of 12, 24, 48 and 96 the fastest)."""


@dataclass(frozen=True, slots=True)
class Cheapest:
    """The least weighted units (inf when no stages are fast enough) and the placement (L,) that has it."""

    value: float
    chosen: Ints | None
    fractional: float
    """The same least value for units that need not be whole nor reach one: a lower bound (0 if it was not asked)."""


def cheapest(model: CostModel, prefix: Floats, time_s: float, weight: Floats, bound_weight: Floats | None) -> Cheapest:
    """One pass for whole units with ``weight``, one for fractional units with ``bound_weight``, both (T,) per unit."""
    best, source = _chain(model, prefix, time_s, weight, fewest_units)
    value = float(best[-1].min())
    if not np.isfinite(value):
        return Cheapest(np.inf, None, np.inf)
    fractional = 0.0
    if bound_weight is not None:
        fractional = float(_chain(model, prefix, time_s, bound_weight, units_needed)[0][-1].min())
    return Cheapest(value, _backtrack(best, source), fractional)


def _chain(model: CostModel, prefix: Floats, time_s: float, weight: Floats, units_of: Units) -> tuple[Floats, Ints]:
    """``best`` and the start of the stage that reaches it, both (L + 1, T)."""
    length, types = model.num_layers, model.num_types
    best = np.full((length + 1, types), np.inf)
    enter = np.full((types, length + 1), np.inf)
    enter[:, 0] = 0.0
    source = np.zeros((length + 1, types), dtype=np.int64)
    columns = np.ascontiguousarray(prefix.transpose(2, 1, 0))
    blocked, rows = earliest(model.allowed).T, np.arange(types)
    starts = np.zeros(1, dtype=np.int64)
    for begin in range(0, length, BLOCK):
        ends = np.arange(begin + 1, min(begin + BLOCK, length) + 1)
        known = len(starts)
        starts = np.concatenate([starts, ends])
        terms = (columns[:, :, ends, None] - columns[:, :, None, starts]).transpose(1, 2, 3, 0)
        units = units_of(terms, time_s)
        units[(units > model.limit[:, None, None]) | (blocked[:, ends, None] > starts)] = np.inf
        total = weight[:, None, None] * units
        for turn, end in enumerate(range(begin + 1, begin + 1 + len(ends))):
            reached = enter[:, starts[: known + turn]] + total[:, turn, : known + turn]
            index = reached.argmin(axis=1)
            best[end], source[end] = reached[rows, index], starts[index]
            _enter(best[end], enter[:, end])
        starts = starts[_useful(enter[:, starts], np.isfinite(units[:, -1]))]
        if not len(starts):
            break
    return best, source


def _useful(enter: Floats, alive: Bools) -> Bools:
    """Which starts a later end may still want: for some type not too long, and entered cheaper than all later ones."""
    later = np.full_like(enter, np.inf)
    later[:, :-1] = np.minimum.accumulate(enter[:, :0:-1], axis=1)[:, ::-1]
    useful: Bools = np.any(alive & np.isfinite(enter) & (enter < later), axis=0)
    return useful


def _enter(best: Floats, enter: Floats) -> None:
    """Fill ``enter`` with the least of the other types' values: the least, and for its own type the second."""
    index = int(best.argmin())
    enter[:] = best[index]
    enter[index] = min(best[:index].min(initial=np.inf), best[index + 1 :].min(initial=np.inf))


def other_minimum(values: Floats) -> Floats:
    """For each type the least of the other types' values, along the last axis (..., T); inf when there is one type."""
    if values.shape[-1] == 1:
        return np.full_like(values, np.inf)
    two = np.partition(values, 1, axis=-1)
    least = np.argmin(values, axis=-1)
    return np.where(np.arange(values.shape[-1]) == least[..., None], two[..., 1:2], two[..., 0:1])


def _backtrack(best: Floats, source: Ints) -> Ints:
    end = len(best) - 1
    chosen = np.zeros(end, dtype=np.int64)
    last = -1
    while end > 0:
        values = best[end].copy()
        if last >= 0:
            values[last] = np.inf
        last = int(np.argmin(values))
        start = int(source[end, last])
        chosen[start:end] = last
        end = start
    return chosen
