"""The plan as text a person reads in a minute: what to rent, why each layer is where it is, what else there was.

Enters: a plan. Leaves: fewer than 60 lines of at most 110 columns, however many layers it has; what is left out is
counted.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from heterps_compile.report.amounts import against, rate, short, units, usd
from heterps_compile.report.columns import align

if TYPE_CHECKING:
    from heterps_compile.plan_facts import Alternative, PlanFacts, Reason, Stage

MAX_TYPES = 8
MAX_STAGES = 12
MAX_REASONS = 14
MAX_NOTES = 4
COLUMNS = 110


def explain(plan: PlanFacts, alternatives: bool = True) -> str:
    """What to rent and why; without ``alternatives`` the other policies are left out."""
    if not plan.stages:
        return "Nothing to place: the graph has no layers."
    parts = [_rent(plan), _stages(plan), _why(plan), _alternatives(plan) if alternatives else [], _notes(plan)]
    wrapped = [line for text in _headline(plan) for line in textwrap.wrap(text, COLUMNS)]
    return "\n\n".join("\n".join(part) for part in (wrapped, *parts) if part)


def _headline(plan: PlanFacts) -> list[str]:
    rented, hourly = units(plan.provision), usd(plan.price_usd_per_h)
    reach = f"{rate(plan.throughput_samples_per_s)} samples/s"
    cost = f"{usd(plan.cost_usd_per_million_samples)} per million samples"
    if not plan.feasible:
        return [
            f"No plan reaches {rate(plan.min_throughput or 0)} samples/s. In the way: {'; '.join(plan.binds)}.",
            f"The fastest reachable: rent {rented} for {hourly}/h: {reach}, {cost}.",
            "Ask for that or less, or change what is in the way.",
        ]
    asked = f" (asked: {rate(plan.min_throughput)})" if plan.min_throughput is not None else ""
    made = f"Found by policy {plan.policy} (seed {plan.seed}, {plan.mode} cost model) in {plan.planning_s:.2f} s."
    return [f"Rent {rented} for {hourly}/h: {reach}{asked}, {cost}.", f"{_gap(plan)} {made}"]


def _gap(plan: PlanFacts) -> str:
    if plan.optimum_proven:
        near = plan.gap_to_optimum <= 0
        return (
            "No plan is cheaper: this is the proven optimum."
            if near
            else f"{plan.gap_to_optimum:.2%} above the proven optimum."
        )
    if plan.optimum_usd_per_million_samples > 0:
        bound = usd(plan.optimum_usd_per_million_samples)
        return f"At most {plan.gap_to_optimum:.2%} above the optimum, which is at least {bound} per million samples."
    return "How far this is from the optimum is not known."


def _rent(plan: PlanFacts) -> list[str]:
    """One line per type in use; the unused ones are named together."""
    used = [r for r in plan.resources if plan.provision.get(r.name)]
    rows = [("rent", "units", "of", "unused", "$/unit/h", "$/h", "times are")]
    for resource in used[:MAX_TYPES]:
        count = plan.provision[resource.name]
        price = resource.price_usd_per_h
        rows.append(
            (
                resource.name,
                f"{count:,}",
                f"{resource.limit:,}",
                f"{resource.limit - count:,}",
                f"{price:.4g}",
                f"{price * count:,.4g}",
                plan.sources.get(resource.name, "given"),
            )
        )
    lines = align(rows, right=(1, 2, 3, 4, 5)) if used else []
    idle = [f"{r.name} ({r.limit:,})" for r in plan.resources if not plan.provision.get(r.name)]
    if idle:
        shown = ", ".join(idle[:6]) + (f" and {len(idle) - 6} more" if len(idle) > 6 else "")
        lines += textwrap.wrap(f"not used at all: {shown}", COLUMNS)
    return lines


def _stages(plan: PlanFacts) -> list[str]:
    """Which layers run where, in order; a stage that could be faster than the pipeline is idle for the rest."""
    reached = min(stage.throughput_samples_per_s for stage in plan.stages)
    rows = [("stage", "runs on", "layers, in order", "could do/s", "busy", "")]
    for entry in _head_and_tail(list(enumerate(plan.stages)), MAX_STAGES):
        if isinstance(entry, int):
            rows.append(("", "", f"... {entry} stages left out ...", "", "", ""))
            continue
        index, stage = entry
        alone = stage.throughput_samples_per_s
        mark = "<- sets the pace" if alone <= reached * (1 + 1e-9) else ""
        busy = f"{reached / alone:.0%}" if alone > 0 else ""
        rows.append((f"{index + 1}", f"{stage.replicas:,} x {stage.resource}", _span(stage), rate(alone), busy, mark))
    return align(rows, right=(3, 4))


def _span(stage: Stage) -> str:
    first, last = short(stage.layers[0]), short(stage.layers[-1])
    if len(stage.layers) == 1:
        return first
    return f"{first} {'to' if len(stage.layers) > 2 else 'and'} {last} ({len(stage.layers)})"


def _why(plan: PlanFacts) -> list[str]:
    """The closest calls: layers for which another type would cost least more."""
    movable = [reason for reason in plan.reasons if not reason.pinned]
    if not plan.reasons or len(plan.resources) < 2:
        return []
    ranked = sorted(range(len(movable)), key=lambda i: min(movable[i].elsewhere.values(), default=float("inf")))
    kept = sorted(ranked[:MAX_REASONS])
    rows = [("why", "is on", "bound by", "if it moved (with what shares its table), the whole plan would cost")]
    lines = align([*rows, *(_reason(plan, movable[index]) for index in kept)]) if kept else []
    pinned = [reason.layer for reason in plan.reasons if reason.pinned]
    if pinned:
        names = ", ".join(short(name) for name in pinned[:3]) + (" ..." if len(pinned) > 3 else "")
        lines.append(f"no choice (pinned, or one type only): {len(pinned)} layers: {names}")
    left = len(plan.placement) - len(kept) - len(pinned)
    if left > 0:
        lines.append(f"{left} more layers, for which moving would cost more than for those shown")
    return lines


def _reason(plan: PlanFacts, reason: Reason) -> tuple[str, ...]:
    here = plan.placement[reason.layer]
    bound_by = "moving data" if reason.transfer_bound else "computing"
    cheapest = sorted(reason.elsewhere.items(), key=lambda move: move[1])[:3]
    moves = [f"{name} {against(other, plan.cost_usd_per_million_samples)}" for name, other in cheapest]
    ruled_out = [r.name for r in plan.resources if r.name not in reason.elsewhere and r.name != here]
    if ruled_out and len(moves) < 3:
        moves.append(f"{', '.join(ruled_out[: 3 - len(moves)])}: cannot, or too slow")
    return (short(reason.layer), here, bound_by, "; ".join(moves))


def _alternatives(plan: PlanFacts) -> list[str]:
    if not plan.alternatives:
        return []
    order = sorted(plan.alternatives.items(), key=lambda item: _cost(item[1]))
    rows = [("instead", "$/million", "against this", "samples/s", "$/h")]
    for name, other in order:
        if not other.feasible:
            rows.append((name, "-", "cannot reach the floor", "-", "-"))
            continue
        rows.append(
            (
                name,
                f"{_cost(other):.4g}",
                against(_cost(other), plan.cost_usd_per_million_samples),
                rate(other.throughput_samples_per_s or 0),
                f"{other.price_usd_per_h or 0:.4g}",
            )
        )
    return align(rows, right=(1, 3, 4))


def _notes(plan: PlanFacts) -> list[str]:
    return [line for note in plan.notes[:MAX_NOTES] for line in textwrap.wrap(f"note: {note}", COLUMNS)]


def _cost(other: Alternative) -> float:
    return float("inf") if other.cost_usd_per_million_samples is None else other.cost_usd_per_million_samples


def _head_and_tail(items: list[tuple[int, Stage]], most: int) -> list[tuple[int, Stage] | int]:
    """The first and last of too many items, with the number left out between them."""
    if len(items) <= most:
        return list(items)
    head = most // 2
    return [*items[:head], len(items) - 2 * head, *items[-head:]]
