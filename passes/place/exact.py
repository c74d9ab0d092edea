"""The exact policy: intervals of time per sample, best first, and branch and bound over layers that share a table.

Enters: a cost model. Leaves: the cheapest placement and a proven lower bound; the two are equal unless time ran out,
``limits.py`` had to give up or the search was long enough (``intervals.py``). Groups of layers that share a table are
branched on, best bound first.
"""

from __future__ import annotations

import heapq
import time

import numpy as np

from heterps_compile.cost_model import Bools, CostModel, Ints, cost_usd_per_million_samples
from heterps_compile.passes.place.coarse import coarse_start
from heterps_compile.passes.place.found import Found
from heterps_compile.passes.place.incumbent import Incumbent
from heterps_compile.passes.place.intervals import IntervalSearch
from heterps_compile.passes.place.staged import cheapest
from heterps_compile.provision import EQUAL

PATIENCE_S = 5.0
"""For the bound of a long chain in full mode, which the search cannot close."""


def exact(
    model: CostModel, seed: int = 0, time_limit_s: float = 20.0, start: Ints | None = None, first: bool = False
) -> Found:
    """The optimum, or the best found in ``time_limit_s`` with a bound; ``start`` is a placement to improve on.

    ``first`` asks only whether the floor can be reached: the search ends with the first placement that does.
    """
    del seed  # nothing here is random
    deadline = time.monotonic() + time_limit_s
    known = Incumbent(first=first)
    if model.between is not None and not model.few_spans:
        middle = deadline - time_limit_s / 2
        coarse = coarse_start(model, lambda smaller: exact(smaller, 0, middle - time.monotonic(), first=first))
        known.notes.add("a long chain: the plan is the best of groups of neighbours, its bound that of no boundaries")
        start = coarse if start is None else start
        deadline = min(deadline, time.monotonic() + PATIENCE_S)
    if start is not None:
        known.offer(model, start)
    for index in np.flatnonzero(model.allowed.all(axis=0)).tolist():  # something is known before time can run out
        known.offer(model, np.full(model.num_layers, index))
    groups = [group for group in model.bound if model.allowed[group[0]].sum() > 1]
    bound = _branch(model, groups, known, deadline)
    bound = known.cost if bound >= known.cost * EQUAL else bound
    return Found(
        chosen=known.chosen, cost=known.cost, lower_bound=bound, notes=tuple(sorted(known.notes)), points=known.points
    )


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
        split = _apart(model, allowed, groups)
        if split is None:  # looks at the floor even if no time is left
            proven = min(proven, IntervalSearch(model.restricted(allowed), known, deadline).run(bound))
            continue
        if time.monotonic() > deadline:
            known.notes.add("the time limit ended the search before the optimum was proven")
            return min(proven, bound)
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
    if not np.isfinite(result.value):
        return float("inf")
    return float(cost_usd_per_million_samples(result.fractional, model.paid_s(time_s)))
