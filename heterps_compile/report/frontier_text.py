"""Cost against throughput as a sentence, a table and a picture of text.

Enters: plans of rising throughput, and the infeasible plan that ends them. Leaves: lines of at most 110 columns.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from heterps_compile.report.amounts import against, dollars, in_the_way, rate, units, usd
from heterps_compile.report.chart import Mark, chart
from heterps_compile.report.columns import align
from heterps_compile.report.graph_table import human

if TYPE_CHECKING:
    from heterps_compile.plan_facts import PlanFacts

COLUMNS = 110
UNIT_COLUMNS = 44
X_LABEL, Y_LABEL = "throughput reached, samples/s", "USD per million samples"
ASKED, POINT = "@", "*"


def frontier_text(plans: Sequence[PlanFacts], end: PlanFacts | None, asked: float | None = None) -> str:
    """What speed costs; ``asked`` is the floor (samples per second) whose plan is marked."""
    parts = [_headline(plans), _table(plans, asked), _picture(plans, asked), _end(end)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def serves(plan: PlanFacts, asked: float | None) -> bool:
    """Whether this is the plan of the frontier that the floor ``asked`` calls for."""
    return asked is not None and (plan.min_throughput or 0.0) <= asked <= plan.throughput_samples_per_s * (1 + 1e-9)


def ending(end: PlanFacts) -> str:
    """What stands in the way of more than the fastest plan."""
    return (
        f"No plan is faster than {rate(end.throughput_samples_per_s)} samples/s. In the way: {in_the_way(end.binds)}."
    )


def _headline(plans: Sequence[PlanFacts]) -> list[str]:
    slow, fast = plans[0], plans[-1]
    text = f"Cheapest per sample: {_in_words(slow)}."
    if len(plans) > 1:
        speed = fast.throughput_samples_per_s / slow.throughput_samples_per_s
        dearer = against(fast.cost_usd_per_million_samples, slow.cost_usd_per_million_samples)
        text += f" Fastest: {_in_words(fast)}. That is {speed:.3g} x the speed; per sample {dearer}."
    return textwrap.wrap(text, COLUMNS)


def _in_words(plan: PlanFacts) -> str:
    return (
        f"{units(plan.provision)} for {usd(plan.price_usd_per_h)}/h, {rate(plan.throughput_samples_per_s)} samples/s, "
        f"{usd(plan.cost_usd_per_million_samples)} per million"
    )


def _table(plans: Sequence[PlanFacts], asked: float | None) -> list[str]:
    rows = [("", "floor", "samples/s", "$/h", "$/million", "stages", "rent")]
    for plan in plans:
        floor = "any" if plan.min_throughput is None else rate(plan.min_throughput)
        rows.append(
            (
                ASKED if serves(plan, asked) else "",
                floor,
                rate(plan.throughput_samples_per_s),
                dollars(plan.price_usd_per_h),
                dollars(plan.cost_usd_per_million_samples),
                f"{len(plan.stages)}",
                textwrap.shorten(units(plan.provision, ", "), UNIT_COLUMNS, placeholder=" ..."),
            )
        )
    lines = align(rows, right=(1, 2, 3, 4, 5))
    unproven = sum(not plan.optimum_proven for plan in plans)
    if unproven:
        lines.append(f"{unproven} of {len(plans)} points are not proven to be the cheapest at their throughput")
    if asked is not None and any(serves(plan, asked) for plan in plans):
        lines.append(f"{ASKED} serves the {rate(asked)} samples/s asked for")
    return lines


def _picture(plans: Sequence[PlanFacts], asked: float | None) -> list[str]:
    if len(plans) < 2:
        return []
    marks = [
        Mark(
            x=plan.throughput_samples_per_s,
            y=plan.cost_usd_per_million_samples,
            letter=ASKED if serves(plan, asked) else POINT,
        )
        for plan in plans
    ]
    return chart(marks, X_LABEL, Y_LABEL, human, usd)


def _end(end: PlanFacts | None) -> list[str]:
    return textwrap.wrap(ending(end), COLUMNS) if end else []
