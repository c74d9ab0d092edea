"""The dynamic programme over (end layer, type): the cheapest stages that are all at most ``time_s`` slow.

Enters: a cost model, a time per sample, a weight per unit of each type. Leaves: the least weighted sum of units, exact
for a chain without joint limits, and the placement that reaches it. At a fixed time the cost is a sum over stages,
which is what makes the programme exact; neighbours of equal type are one stage, so a stage enters from another type
only.

    best[j, t]  = min over i < j of  enter[i, t] + weight_t * units(layers i..j-1 on t)
    enter[i, t] = min over s != t of best[i, s]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from heterps_compile.cost_model import CostModel, Floats, Ints, units_needed, whole_units


@dataclass(frozen=True, slots=True)
class Cheapest:
    """The least weighted units (inf when no stages are fast enough) and the placement (L,) that has it."""

    value: float
    chosen: Ints | None
    fractional: float
    """The same least value for units that need not be whole nor reach one: a lower bound."""


def cheapest(model: CostModel, prefix: Floats, time_s: float, weight: Floats, bound_weight: Floats) -> Cheapest:
    """One pass for whole units with ``weight`` and for fractional units with ``bound_weight``, both (T,) per unit."""
    length, types = model.num_layers, model.num_types
    best = np.full((length + 1, types), np.inf)
    fractional = np.full((length + 1, types), np.inf)
    enter, enter_fractional = np.full((2, length + 1, types), np.inf)
    enter[0] = enter_fractional[0] = 0.0
    source = np.zeros((length + 1, types), dtype=np.int64)
    columns = np.arange(types)
    blocked = blocked_before(model)
    earliest = 0
    for end in range(1, length + 1):
        needed = units_needed(prefix[end] - prefix[earliest:end], time_s)
        needed[blocked[end] > np.arange(earliest, end)[:, None]] = np.inf
        whole = enter[earliest:end] + weight * whole_units(needed)
        source[end] = np.argmin(whole, axis=0)
        best[end] = whole[source[end], columns]
        source[end] += earliest
        fractional[end] = np.min(enter_fractional[earliest:end] + bound_weight * needed, axis=0)
        enter[end], enter_fractional[end] = other_minimum(best[end]), other_minimum(fractional[end])
        reachable = np.isfinite(needed).any(axis=1)
        if not reachable.any():
            return Cheapest(np.inf, None, np.inf)
        earliest += int(np.argmax(reachable))  # a stage that is too long stays too long
    value = float(best[length].min())
    chosen = _backtrack(best, source) if np.isfinite(value) else None
    return Cheapest(value, chosen, float(fractional[length].min()))


def blocked_before(model: CostModel) -> Ints:
    """(L + 1, T): a stage on t that ends at cut j may start at ``blocked[j, t]`` or later."""
    positions = np.where(model.allowed, 0, np.arange(1, model.num_layers + 1)[:, None])
    return np.concatenate([np.zeros((1, model.num_types), dtype=np.int64), np.maximum.accumulate(positions, axis=0)])


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
