"""An independent planner for small tables: enumerate placements and units by the published equations, keep the best.

Shares no code with the package. For each placement the units of a stage are searched through the times per sample that
any stage can realise, so that whole units and limits are exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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


def best_units(table: Table, stages: list[Stage], floor: float | None) -> float:
    """The least cost over all whole units within the limits: for each realisable slowest time the fewest units."""
    limit = {r["name"]: r["limit"] for r in table["resources"]}
    times = [[stage_time(table, stage, k) for k in range(1, limit[stage[0]] + 1)] for stage in stages]
    slowest = sorted({t for row in times for t in row if floor is None or 1 / t >= floor * (1 - FLOOR_TOLERANCE)})
    best = math.inf
    for target in slowest:
        units = [next((k for k, t in enumerate(row, 1) if t <= target), 0) for row in times]
        used: dict[str, int] = {}
        for stage, k in zip(stages, units, strict=True):
            used[stage[0]] = used.get(stage[0], 0) + k
        if all(units) and all(used[kind] <= limit[kind] for kind in used):
            best = min(best, plan_cost(table, stages, units)[0])
    return best


def placements(table: Table) -> Iterator[tuple[str, ...]]:
    names = [layer["name"] for layer in table["layers"]]
    for placement in itertools.product(*(list(table["costs"][name]) for name in names)):
        where = dict(zip(names, placement, strict=True))
        if all(len({where[name] for name in group}) == 1 for group in table.get("bound", ())):
            yield placement


def brute_force(table: Table, floor: float | None) -> Best | None:
    names = [layer["name"] for layer in table["layers"]]
    found = [Best(best_units(table, stages_of(names, p), floor), p) for p in placements(table)]
    best = min(found, key=lambda b: b.cost)
    return best if math.isfinite(best.cost) else None
