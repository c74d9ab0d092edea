"""All policies side by side, cheapest first.

Enters: a plan with its alternatives. Leaves: one line per policy of at most 110 columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from heterps_compile.report.amounts import dollars, rate
from heterps_compile.report.columns import align

if TYPE_CHECKING:
    from heterps_compile.plan_facts import Alternative, PlanFacts

HEADS = ("policy", "reaches it", "$/million", "above optimum", "$/h", "samples/s", "")


def compare_text(plan: PlanFacts) -> list[str]:
    """The table; the gap is to the optimum where that is proven, else to its proven lower bound."""
    rows = [(plan.cost_usd_per_million_samples, _own(plan))]
    for name, other in plan.alternatives.items():
        cost = other.cost_usd_per_million_samples
        rows.append((float("inf") if cost is None else cost, _row(name, other, plan)))
    ordered = [row for _, row in sorted(rows, key=lambda pair: pair[0])]
    lines = align([HEADS, *ordered], right=(2, 3, 4, 5))
    if not plan.optimum_proven and plan.optimum_usd_per_million_samples > 0:
        lines.append("the optimum is not proven: the figures above it are at most what is shown")
    return lines


def _own(plan: PlanFacts) -> tuple[str, ...]:
    cost = plan.cost_usd_per_million_samples
    reached = rate(plan.throughput_samples_per_s)
    cells = (f"{cost:.4g}", _gap(cost, plan), dollars(plan.price_usd_per_h), reached)
    return (plan.policy, "yes" if plan.feasible else "no", *cells, "<- this plan")


def _row(name: str, other: Alternative, plan: PlanFacts) -> tuple[str, ...]:
    cost = other.cost_usd_per_million_samples
    if not other.feasible or cost is None:
        return (name, "no", "-", "-", "-", "-", "")
    price, reached = other.price_usd_per_h or 0.0, other.throughput_samples_per_s or 0.0
    return (name, "yes", f"{cost:.4g}", _gap(cost, plan), dollars(price), rate(reached), "")


def _gap(cost: float, plan: PlanFacts) -> str:
    optimum = plan.optimum_usd_per_million_samples
    if optimum <= 0:
        return "?"
    return f"{max(cost / optimum - 1, 0.0):.2%}"
