"""Cost against throughput: the cheapest plan at each of several floors, up to the fastest that can be reached.

Enters: a cost table, a cluster and a request. Leaves: plans with rising throughput, and the infeasible plan that says
what stands in the way of more. The slowest point is the cheapest plan at any speed: below it nothing is cheaper per
sample. A plan that is faster than its floor is the cheapest for every floor up to its own throughput, so only the gap
above it is open; each further floor halves, on a logarithmic scale, the gap that would show most in a picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from heterps_compile.cluster import Cluster
from heterps_compile.costs import CostTable
from heterps_compile.planning import Request, plan_costs
from heterps_compile.plans import Plan

OUT_OF_REACH_SAMPLES_PER_S = 1e14
"""A floor that no fleet reaches, to be told what can be reached instead."""
BEYOND = 1.01
"""The end of the frontier is asked for this much more than can be reached: what binds there binds next."""
SAME = 1 - 1e-6
"""Throughputs within this ratio are the same point; the best reachable one is known to one part in a million."""
NARROW = 0.02
"""A gap below this part of the picture is not worth a plan."""

Progress = Callable[[], object]
"""Called once per plan made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frontier:
    """``plans`` have rising throughput; ``end`` is infeasible and says what binds, or None where nothing does."""

    plans: tuple[Plan, ...]
    end: Plan | None

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON: one entry per point, not whole plans."""
        return {
            "version": 1,
            "points": [_point(plan) for plan in self.plans],
            "end": _end(self.end) if self.end else None,
        }


def frontier(
    costs: CostTable,
    cluster: Cluster | None,
    request: Request,
    num_points: int = 14,
    progress: Progress = lambda: None,
) -> Frontier:
    """Plan about ``num_points`` floors; the floor of ``request``, if it has one, is among them.

    Raises what :func:`plan_costs` raises where nothing fits the limits at any throughput.
    """
    quick = replace(request, quick=True, compare=False)

    def planned(floor: float | None) -> Plan:
        plan = plan_costs(costs, cluster, replace(quick, min_throughput=floor))
        progress()
        return plan

    first, fastest = planned(None), planned(OUT_OF_REACH_SAMPLES_PER_S)
    if fastest.feasible:  # layers that take no time
        return Frontier(plans=(first,), end=None)
    top = fastest.throughput_samples_per_s
    plans = _with(_with([], first), planned(top * SAME))
    asked = request.min_throughput
    if asked is not None and first.throughput_samples_per_s < asked < top * SAME:
        plans = _with(plans, planned(asked))
    for _ in range(num_points - len(plans)):
        floor = _widest_gap(plans)
        if floor is None:
            break
        plans = _with(plans, planned(floor))
    end = planned(top * BEYOND)
    if end.feasible:  # time ran out before the best reachable throughput was known
        return Frontier(plans=_undominated(_with(plans, end)), end=None)
    return Frontier(plans=_undominated(plans), end=end)


def _with(plans: list[Plan], plan: Plan) -> list[Plan]:
    """Add a plan in order of throughput; one that is there already is kept with the lower floor it serves."""
    if not plan.feasible:
        return plans
    reached = plan.throughput_samples_per_s
    same = [p for p in plans if SAME < p.throughput_samples_per_s / reached < 1 / SAME]
    lowest = min([plan, *same], key=lambda p: p.min_throughput or 0.0)
    return sorted([*(p for p in plans if p not in same), lowest], key=lambda p: p.throughput_samples_per_s)


def _widest_gap(plans: list[Plan]) -> float | None:
    """The floor in the middle of the widest gap between neighbours; None when no gap is worth a plan.

    A gap reaches from the throughput of one plan to the lowest floor that the next is known to serve. It is as wide as
    the steps in throughput and in cost across it, each as a part of the whole range.
    """
    if len(plans) < 2:
        return None
    first, last = plans[0], plans[-1]
    gaps = []
    for slow, fast in pairwise(plans):
        low, high = slow.throughput_samples_per_s, fast.min_throughput or 0.0
        step = _part(low, high, first.throughput_samples_per_s, last.throughput_samples_per_s)
        rise = _part(*(p.cost_usd_per_million_samples for p in (slow, fast, first, last)))
        if high * SAME > low:
            gaps.append((step + rise, math.sqrt(low * high)))
    width, middle = max(gaps, default=(0.0, 0.0))
    return middle if width >= NARROW else None


def _part(low: float, high: float, first: float, last: float) -> float:
    """The ratio of two numbers as a part of the ratio of two others, on a logarithmic scale."""
    if not 0 < first < last or not 0 < low < high:
        return 0.0
    return math.log(high / low) / math.log(last / first)


def _undominated(plans: list[Plan]) -> tuple[Plan, ...]:
    """Without plans that a faster one undercuts, which a search cut short can leave."""
    kept: list[Plan] = []
    for plan in reversed(plans):
        least = kept[-1].cost_usd_per_million_samples if kept else math.inf
        if plan.cost_usd_per_million_samples <= least * (2 - SAME):
            kept.append(plan)
    return tuple(reversed(kept))


def _point(plan: Plan) -> dict[str, Any]:
    return {
        "floor_samples_per_s": plan.min_throughput,
        "throughput_samples_per_s": plan.throughput_samples_per_s,
        "price_usd_per_h": plan.price_usd_per_h,
        "cost_usd_per_million_samples": plan.cost_usd_per_million_samples,
        "gap_to_optimum": plan.gap_to_optimum,
        "optimum_proven": plan.optimum_proven,
        "provision": dict(plan.provision),
        "num_stages": len(plan.stages),
    }


def _end(plan: Plan) -> dict[str, Any]:
    reached = plan.throughput_samples_per_s
    return {"floor_samples_per_s": plan.min_throughput, "reachable_samples_per_s": reached, "binds": list(plan.binds)}
