"""The exact policy: the dynamic programme swept over realised throughputs, branch and bound over what couples stages.

Enters: a cost model. Leaves: the cheapest placement and a proven lower bound; the two are equal unless time ran out or
``limits.py`` had to give up. The sweep starts at the floor and jumps to the next time per sample at which something
cheaper could exist; it ends when even fractional units there cost more than the best plan known. Groups of layers that
share a table are branched on, best bound first.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field

import numpy as np

from heterps_compile.cost_model import (
    Bools,
    CostModel,
    Floats,
    Ints,
    cost_usd_per_million_samples,
)
from heterps_compile.passes.place.dynamic import Cheapest, cheapest
from heterps_compile.passes.place.found import Found
from heterps_compile.passes.place.limits import Limited, cheapest_within_limits
from heterps_compile.provision import EQUAL, Stages, next_time_s, provision

SCOUTS = 12
LONG_CHAIN, LONG_SLACK = 300, 0.015
"""Chains above this many layers are proven to this fraction only: each point of the sweep then skips as much time."""


@dataclass(slots=True)
class Incumbent:
    """The best placement so far, shared by all branches."""

    chosen: Ints | None = None
    cost: float = float("inf")
    first: bool = False
    notes: set[str] = field(default_factory=set)

    @property
    def enough(self) -> bool:
        """Whether any placement was asked for and one is there."""
        return self.first and self.chosen is not None

    def offer(self, model: CostModel, chosen: Ints) -> None:
        """Provision ``chosen`` exactly and keep it if it is cheaper."""
        if self.first:  # at the floor is enough; without limits, ever larger fleets may cost ever so little less
            here = provision_at(model, chosen, model.slowest_s)
            if here is not None and self.chosen is None:
                self.chosen, self.cost = chosen, float(cost_usd_per_million_samples(here[1], here[0]))
            return
        made = provision(model, chosen)
        if made is not None and made.cost_usd_per_million_samples < self.cost * EQUAL:
            self.chosen, self.cost = chosen, made.cost_usd_per_million_samples


def exact(
    model: CostModel, seed: int = 0, time_limit_s: float = 20.0, start: Ints | None = None, first: bool = False
) -> Found:
    """The optimum, or the best found in ``time_limit_s`` with a bound; ``start`` is a placement to improve on.

    ``first`` asks only whether the floor can be reached: the search ends with the first placement that does.
    """
    del seed  # nothing here is random
    deadline = time.monotonic() + time_limit_s
    known = Incumbent(first=first)
    if start is not None:
        known.offer(model, start)
    _scout(model, known, deadline)
    groups = [group for group in model.bound if model.allowed[group[0]].sum() > 1]
    bound = _branch(model, groups, known, deadline)
    bound = known.cost if bound >= known.cost * EQUAL else bound
    return Found(chosen=known.chosen, cost=known.cost, lower_bound=bound, notes=tuple(sorted(known.notes)))


def _scout(model: CostModel, known: Incumbent, deadline: float) -> None:
    """A good placement early on, from times halved again and again, lets the sweep skip most of its points."""
    time_s, prefix = model.slowest_s, model.prefix
    for _ in range(SCOUTS):
        result = cheapest(model, prefix, time_s, model.price_usd_per_h, model.price_usd_per_h)
        fractional = float(cost_usd_per_million_samples(result.fractional, time_s))
        if known.enough or result.chosen is None or fractional >= known.cost or time.monotonic() > deadline:
            return
        if all(len(set(result.chosen[list(group)].tolist())) == 1 for group in model.bound):
            known.offer(model, result.chosen)
        time_s /= 2


def _branch(model: CostModel, groups: list[tuple[int, ...]], known: Incumbent, deadline: float) -> float:
    """Best-first over the types of bound groups; returns a bound for all placements that keep the groups together."""
    root = _root_bound(model, model.allowed)
    heap: list[tuple[float, int, Bools]] = [(root, 0, model.allowed)]
    proven, count = float("inf"), 0
    while heap:
        bound, _, allowed = heapq.heappop(heap)
        if bound >= known.cost * EQUAL:
            return min(proven, bound)
        if known.enough:
            return min(proven, bound)
        if time.monotonic() > deadline:
            known.notes.add("the time limit ended the search before the optimum was proven")
            return min(proven, bound)
        split = _apart(model, allowed, groups)
        if split is None:
            proven = min(proven, sweep(model.restricted(allowed), known, deadline, bound))
            continue
        for kind in np.flatnonzero(allowed[split[0]]).tolist():
            narrowed = allowed.copy()
            narrowed[list(split)] = np.arange(model.num_types) == kind
            count += 1
            child = max(bound, _root_bound(model, narrowed))
            if np.isfinite(child):
                heapq.heappush(heap, (child, count, narrowed))
    return proven


def _apart(model: CostModel, allowed: Bools, groups: list[tuple[int, ...]]) -> tuple[int, ...] | None:
    """A group still to be decided whose layers the relaxed optimum puts apart, else any undecided group."""
    undecided = [group for group in groups if allowed[group[0]].sum() > 1]
    if not undecided:
        return None
    relaxed = cheapest(
        model.restricted(allowed), model.prefix, model.slowest_s, model.price_usd_per_h, model.price_usd_per_h
    )
    if relaxed.chosen is None:
        return undecided[0]
    chosen = relaxed.chosen
    return next((group for group in undecided if len(set(chosen[list(group)].tolist())) > 1), undecided[0])


def _root_bound(model: CostModel, allowed: Bools) -> float:
    """Cost that no placement within ``allowed`` can undercut, from fractional units at the slowest time."""
    narrowed = model.restricted(allowed)
    time_s = model.slowest_s
    result = cheapest(narrowed, model.prefix, time_s, model.price_usd_per_h, model.price_usd_per_h)
    return float(cost_usd_per_million_samples(result.fractional, time_s)) if np.isfinite(result.value) else float("inf")


def sweep(model: CostModel, known: Incumbent, deadline: float, bound: float = 0.0) -> float:
    """Sweep the time per sample downwards; returns a bound on every placement (inf: none reaches the floor)."""
    prefix, price = model.prefix, model.price_usd_per_h
    time_s = model.slowest_s
    slack = LONG_SLACK if model.num_layers > LONG_CHAIN else 0.0
    lagrange = np.zeros(model.num_types)
    while True:
        result = cheapest(model, prefix, time_s, price, price + lagrange)
        rest = _fractional_cost(model, result, lagrange, time_s)
        bound = max(bound, min(rest, known.cost * (1 - slack)))
        if not np.isfinite(result.value) or rest >= known.cost * EQUAL:
            return max(bound, known.cost * (1 - slack)) if np.isfinite(known.cost) else float("inf")
        if known.enough:
            return bound
        if time.monotonic() > deadline:
            known.notes.add("the time limit ended the search before the optimum was proven")
            return bound
        assert result.chosen is not None
        known.offer(model, result.chosen)
        here = provision_at(model, result.chosen, time_s)
        if here is not None:
            time_s = next_time_s(here[0], result.value, known.cost) * (1 - slack)
            continue
        limited = cheapest_within_limits(model, prefix, time_s, deadline)
        if limited.chosen is not None:
            known.offer(model, limited.chosen)
        if not np.isfinite(limited.bound):
            return max(bound, known.cost * (1 - slack)) if np.isfinite(known.cost) else float("inf")
        next_s = _after_limits(model, limited, time_s, known.cost)
        if next_s >= time_s:
            known.notes.add("limits couple the stages too much for a proof in the time given")
            lagrange = limited.multipliers
            tight = cheapest(model, prefix, time_s, price, price + lagrange)
            return max(bound, min(known.cost, _fractional_cost(model, tight, lagrange, time_s)))
        time_s = next_s


def provision_at(model: CostModel, chosen: Ints, time_s: float) -> tuple[float, float] | None:
    """(realised time, price per hour) of the fewest units that make ``chosen`` at most ``time_s`` slow, if they fit."""
    stages = Stages.of(model, chosen[None])
    units = stages.fewest(time_s)
    if (np.bincount(stages.kind, units, model.num_types) > model.limit).any():
        return None
    return float(stages.pipeline_s(units)[0]), float(model.price_usd_per_h[stages.kind] @ units)


def _after_limits(model: CostModel, limited: Limited, time_s: float, best_cost: float) -> float:
    if limited.exact and limited.chosen is not None:
        here = provision_at(model, limited.chosen, time_s)
        assert here is not None, "a placement within the limits does not fit them"
        return next_time_s(here[0], limited.bound, best_cost)
    return next_time_s(time_s / EQUAL, limited.bound, best_cost)


def _fractional_cost(model: CostModel, result: Cheapest, lagrange: Floats, time_s: float) -> float:
    """Bound on the cost at ``time_s`` and every shorter time: fractional units only grow as the time shrinks.

    ``(price + lagrange) . units - lagrange . limit`` is at most ``price . units`` wherever the limits hold.
    """
    relief = float(lagrange[lagrange > 0] @ model.limit[lagrange > 0])
    return float(cost_usd_per_million_samples(result.fractional - relief, time_s))
