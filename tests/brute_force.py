"""An independent planner for small tables: enumerate placements and units by the published equations, keep the best.

Shares no code with the package. For each placement the units of its stages are searched through the times per sample
that any of them can realise, slowest first, so that whole units and limits are exact. Faster pipelines need no fewer
units: a time is passed over if even the units of the last one are too dear there, and the search ends where they no
longer fit.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

FLOOR_TOLERANCE = 1e-9

Table = Mapping[str, Any]
"""The JSON form of a cost table."""
Stage = tuple[str, list[str]]


@dataclass(frozen=True)
class Best:
    cost: float
    placement: tuple[str, ...]


def stages_of(names: list[str], placement: tuple[str, ...]) -> list[Stage]:
    return [
        (kind, [name for name, _ in run])
        for kind, run in itertools.groupby(zip(names, placement, strict=True), key=lambda pair: pair[1])
    ]


def stage_time(table: Table, stage: Stage, units: int) -> float:
    """ET of design section 5: weighted means of alpha and beta, Amdahl, the longer of computing and communicating."""
    kind, names = stage
    parts = []
    for time_name, share_name in (("compute_s", "compute_parallel"), ("communication_s", "communication_parallel")):
        costs = [table["costs"][name][kind] for name in names]
        total = sum(c[time_name] for c in costs)
        share = sum(c[time_name] * c[share_name] for c in costs) / total if total else 1.0
        parts.append(total / table["batch_size"] * (1 - share + share / units))
    return max(parts)


def plan_cost(table: Table, stages: list[Stage], units: list[int]) -> tuple[float, float]:
    """(USD per million samples, samples per second) of stages with given units."""
    price = {r["name"]: r["price_usd_per_h"] for r in table["resources"]}
    throughput = 1 / max(stage_time(table, s, k) for s, k in zip(stages, units, strict=True))
    hourly = sum(price[s[0]] * k for s, k in zip(stages, units, strict=True))
    return hourly / 3600 * 1e6 / throughput, throughput


@dataclass
class StageTimes:
    """For each stage asked for, its time per sample with 1, 2, ... units up to the limit, if at most ``slowest``."""

    table: Table
    slowest: float
    known: dict[tuple[str, tuple[str, ...]], list[float]] = field(default_factory=dict)

    def of(self, stage: Stage) -> list[float]:
        """Descending; ``inf`` where that many units are too slow."""
        key = (stage[0], tuple(stage[1]))
        if key not in self.known:
            limit = next(r["limit"] for r in self.table["resources"] if r["name"] == stage[0])
            times = [stage_time(self.table, stage, k) for k in range(1, limit + 1)]
            self.known[key] = [t if t <= self.slowest else math.inf for t in times]
        return self.known[key]


def best_units(table: Table, stages: list[Stage], times: StageTimes, best: float = math.inf) -> float:
    """The least cost over all whole units within the limits, or ``best`` if that is less."""
    limit = {r["name"]: r["limit"] for r in table["resources"]}
    price = {r["name"]: r["price_usd_per_h"] for r in table["resources"]}
    rows = [times.of(stage) for stage in stages]
    worth = math.inf  # a pipeline must be faster than this to be cheaper, as its units cost no less than the last ones
    for target in sorted({t for row in rows for t in row if t < math.inf}, reverse=True):
        if target >= worth:
            continue
        units = [bisect.bisect_left(row, -target, key=operator.neg) + 1 for row in rows]
        used = {
            kind: sum(k for (other, _), k in zip(stages, units, strict=True) if other == kind) for kind, _ in stages
        }
        if any(k > len(row) for k, row in zip(units, rows, strict=True)) or any(used[t] > limit[t] for t in used):
            break
        hourly = sum(price[kind] * count for kind, count in used.items())
        best = min(best, hourly / 3600 * 1e6 * target)
        worth = best / (hourly / 3600 * 1e6) if hourly else 0.0
    return best


def placements(table: Table) -> Iterator[tuple[str, ...]]:
    names = [layer["name"] for layer in table["layers"]]
    for placement in itertools.product(*(list(table["costs"][name]) for name in names)):
        where = dict(zip(names, placement, strict=True))
        if all(len({where[name] for name in group}) == 1 for group in table.get("bound", ())):
            yield placement


def brute_force(table: Table, floor: float | None) -> Best | None:
    names = [layer["name"] for layer in table["layers"]]
    times = StageTimes(table, 1 / (floor * (1 - FLOOR_TOLERANCE)) if floor else math.inf)
    best: Best | None = None
    for placement in placements(table):
        so_far = best.cost if best else math.inf
        cost = best_units(table, stages_of(names, placement), times, so_far)
        if cost < so_far:
            best = Best(cost, placement)
    return best
