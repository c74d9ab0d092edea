"""Two plans side by side: as asked, and with some numbers changed.

Enters: both plans and what was changed, in words. Leaves: fewer than 60 lines of at most 110 columns: the answer in a
sentence, what differs, and which layers moved.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from heterps_compile.report.amounts import against, in_the_way, rate, short, units, usd
from heterps_compile.report.columns import align

if TYPE_CHECKING:
    from heterps_compile.plan_facts import PlanFacts

COLUMNS = 110
MAX_MOVES = 8
MAX_TYPES = 16


def what_if_text(changes: Sequence[str], base: PlanFacts, changed: PlanFacts | None, refusal: str = "") -> str:
    """The comparison; where ``changed`` is None no plan is left at any throughput, and ``refusal`` says why."""
    named = ", ".join(changes)
    if changed is None:
        lines = [f"With {named} there is no plan at all: {refusal}."]
        lines.append(f"As asked: rent {units(base.provision)} for {usd(base.price_usd_per_h)}/h.")
        return "\n".join(line for text in lines for line in textwrap.wrap(text, COLUMNS))
    parts = [textwrap.wrap(_headline(named, base, changed), COLUMNS), _table(base, changed), _moves(base, changed)]
    parts += [_in_the_way("as asked", base), _in_the_way(f"with {named}", changed)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _headline(named: str, base: PlanFacts, changed: PlanFacts) -> str:
    before, after = base.cost_usd_per_million_samples, changed.cost_usd_per_million_samples
    if not changed.feasible:
        reached = rate(changed.throughput_samples_per_s)
        return (
            f"With {named} no plan reaches {rate(changed.min_throughput or 0.0)} samples/s; the best reaches {reached}."
        )
    rent = f"rent {units(changed.provision)} for {usd(changed.price_usd_per_h)}/h"
    if not base.feasible:
        return f"With {named} the floor is reached: {rent}, {usd(after)} per million samples."
    if abs(after - before) <= 5e-5 * before:
        same = "the same plan is cheapest" if dict(base.provision) == dict(changed.provision) else rent
        return f"With {named} a million samples cost the same, {usd(after)}: {same}."
    return (
        f"With {named} a million samples cost {usd(after)} instead of {usd(before)} ({against(after, before)}): {rent}."
    )


def _table(base: PlanFacts, changed: PlanFacts) -> list[str]:
    rows = [("", "as asked", "changed", "difference")]
    for name, before, after, written in (
        ("$ per million samples", base.cost_usd_per_million_samples, changed.cost_usd_per_million_samples, usd),
        ("$/h", base.price_usd_per_h, changed.price_usd_per_h, usd),
        ("samples/s", base.throughput_samples_per_s, changed.throughput_samples_per_s, rate),
    ):
        rows.append((name, written(before), written(after), _difference(before, after)))
    if base.samples and changed.samples:
        rows.append(_training(base, changed))
    rows.append(("reaches the floor", _yes(base.feasible), _yes(changed.feasible), ""))
    types = [r.name for r in changed.resources if base.provision.get(r.name) or changed.provision.get(r.name)]
    rows += [
        _counts(f"units of {name}", base.provision.get(name, 0), changed.provision.get(name, 0))
        for name in types[:MAX_TYPES]
    ]
    rows.append(_counts("stages", len(base.stages), len(changed.stages)))
    return align(rows, right=(1, 2, 3))


def _training(base: PlanFacts, changed: PlanFacts) -> tuple[str, str, str, str]:
    before, after = (plan.cost_usd_per_million_samples * (plan.samples or 0.0) / 1e6 for plan in (base, changed))
    return "whole training", usd(before), usd(after), _difference(before, after)


def _counts(name: str, before: int, after: int) -> tuple[str, str, str, str]:
    return name, f"{before:,}", f"{after:,}", f"{after - before:+,}" if after != before else ""


def _difference(before: float, after: float) -> str:
    return "" if after == before else against(after, before).removeprefix("same cost")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _moves(base: PlanFacts, changed: PlanFacts) -> list[str]:
    moved = [name for name, kind in base.placement.items() if changed.placement.get(name, kind) != kind]
    if not moved:
        return ["No layer moves to another type."]
    rows = [(short(name), base.placement[name], "->", changed.placement[name]) for name in moved[:MAX_MOVES]]
    lines = [f"{len(moved)} of {len(base.placement)} layers move:", *align(rows, indent="  ")]
    return lines + ([f"  and {len(moved) - MAX_MOVES} more"] if len(moved) > MAX_MOVES else [])


def _in_the_way(case: str, plan: PlanFacts) -> list[str]:
    if plan.feasible:
        return []
    floor = rate(plan.min_throughput or 0.0)
    return textwrap.wrap(f"In the way of {floor} samples/s {case}: {in_the_way(plan.binds)}.", COLUMNS)
