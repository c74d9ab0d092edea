"""The plan as text a person reads in a minute: what to rent, why each layer is where it is, what else there was.

Enters: a plan. Leaves: fewer than 60 lines of at most 110 columns, however many layers it has; what is left out is
counted.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from heterps_compile.report.columns import align

if TYPE_CHECKING:
    from heterps_compile.plan_facts import Alternative, PlanFacts, Reason, Stage

MAX_TYPES = 8
MAX_STAGES = 12
MAX_REASONS = 14
MAX_NOTES = 4
NAME_COLUMNS = 34
COLUMNS = 110


def explain(plan: PlanFacts) -> str:
    """What to rent and why."""
    if not plan.stages:
        return "Nothing to place: the graph has no layers."
    parts = [_headline(plan), _rent(plan), _stages(plan), _why(plan), _alternatives(plan), _notes(plan)]
    wrapped = [line for text in parts[0] for line in textwrap.wrap(text, COLUMNS)]
    return "\n\n".join("\n".join(part) for part in (wrapped, *parts[1:]) if part)


def _headline(plan: PlanFacts) -> list[str]:
    rented = " and ".join(f"{count} {name}" for name, count in plan.provision.items())
    hourly, reach = _usd(plan.price_usd_per_h), f"{plan.throughput_samples_per_s:,.0f} samples/s"
    cost = f"{_usd(plan.cost_usd_per_million_samples)} per million samples"
    if not plan.feasible:
        return [
            f"No plan reaches {plan.min_throughput or 0:,.0f} samples/s. In the way: {'; '.join(plan.binds)}.",
            f"The fastest reachable: rent {rented} for {hourly}/h: {reach}, {cost}.",
        ]
    asked = f" (asked: {plan.min_throughput:,.0f})" if plan.min_throughput is not None else ""
    made = f"Policy {plan.policy}, seed {plan.seed}, {plan.mode} cost model, {plan.planning_s:.2f} s."
    return [f"Rent {rented} for {hourly}/h: {reach}{asked}, {cost}.", f"{_gap(plan)} {made}"]


def _gap(plan: PlanFacts) -> str:
    if plan.optimum_proven:
        near = plan.gap_to_optimum <= 0
        return "This is the proven optimum." if near else f"{plan.gap_to_optimum:.2%} above the proven optimum."
    if plan.optimum_usd_per_million_samples > 0:
        bound = _usd(plan.optimum_usd_per_million_samples)
        return f"At most {plan.gap_to_optimum:.2%} above the optimum, which is at least {bound} per million samples."
    return "How far this is from the optimum is not known."


def _rent(plan: PlanFacts) -> list[str]:
    """One line per type in use; the unused ones are named together."""
    used = [r for r in plan.resources if plan.provision.get(r.name)]
    rows = [("rent", "units", "limit", "unused", "$/unit/h", "$/h", "times are")]
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
                f"{price * count:.4g}",
                plan.sources.get(resource.name, "given"),
            )
        )
    lines = align(rows, right=(1, 2, 3, 4, 5)) if used else []
    idle = [r.name for r in plan.resources if not plan.provision.get(r.name)]
    if idle:
        shown = ", ".join(idle[:6]) + (f" and {len(idle) - 6} more" if len(idle) > 6 else "")
        lines.append(f"not used: {shown}")
    return lines


def _stages(plan: PlanFacts) -> list[str]:
    slowest = min(stage.throughput_samples_per_s for stage in plan.stages)
    rows = [("stage", "runs on", "layers", "samples/s", "")]
    shown = _head_and_tail(list(enumerate(plan.stages)), MAX_STAGES)
    for entry in shown:
        if isinstance(entry, int):
            rows.append(("", "", f"... {entry} stages left out ...", "", ""))
            continue
        index, stage = entry
        mark = "slowest" if stage.throughput_samples_per_s <= slowest * (1 + 1e-9) else ""
        runs_on = f"{stage.replicas:,} x {stage.resource}"
        rows.append((f"{index + 1}", runs_on, _span(stage), f"{stage.throughput_samples_per_s:,.0f}", mark))
    return align(rows, right=(3,))


def _span(stage: Stage) -> str:
    first, last = _short(stage.layers[0]), _short(stage.layers[-1])
    return first if len(stage.layers) == 1 else f"{first} .. {last} ({len(stage.layers)})"


def _why(plan: PlanFacts) -> list[str]:
    """The closest calls: layers for which another type would cost least more."""
    movable = [reason for reason in plan.reasons if not reason.pinned]
    if not plan.reasons or len(plan.resources) < 2:
        return []
    lines = ["why: cost of the whole plan if that layer alone (and what shares its table) were moved"]
    ranked = sorted(range(len(movable)), key=lambda i: min(movable[i].elsewhere.values(), default=float("inf")))
    kept = sorted(ranked[:MAX_REASONS])
    lines += align([_reason(plan, movable[index]) for index in kept], indent="  ")
    pinned = [reason.layer for reason in plan.reasons if reason.pinned]
    if pinned:
        names = ", ".join(_short(name) for name in pinned[:3]) + (" ..." if len(pinned) > 3 else "")
        lines.append(f"  no choice (pinned, or one type only): {len(pinned)} layers: {names}")
    left = len(plan.placement) - len(kept) - len(pinned)
    if left > 0:
        lines.append(f"  {left} more layers, for which moving would cost more than for those shown")
    return lines


def _reason(plan: PlanFacts, reason: Reason) -> tuple[str, ...]:
    here = plan.placement[reason.layer]
    kind = "transfer-bound" if reason.transfer_bound else "compute-bound"
    cheapest = sorted(reason.elsewhere.items(), key=lambda move: move[1])[:3]
    moves = [f"{name} {_more(other, plan.cost_usd_per_million_samples)}" for name, other in cheapest]
    ruled_out = [r.name for r in plan.resources if r.name not in reason.elsewhere and r.name != here]
    if ruled_out and len(moves) < 3:
        moves.append(f"{', '.join(ruled_out[: 3 - len(moves)])}: cannot, or below the floor")
    shares = ", shares a table" if reason.bound else ""
    return (_short(reason.layer), here, kind + shares, "; ".join(moves))


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
                _more(_cost(other), plan.cost_usd_per_million_samples),
                f"{other.throughput_samples_per_s or 0:,.0f}",
                f"{other.price_usd_per_h or 0:.4g}",
            )
        )
    return align(rows, right=(1, 3, 4))


def _notes(plan: PlanFacts) -> list[str]:
    return [line for note in plan.notes[:MAX_NOTES] for line in textwrap.wrap(f"note: {note}", COLUMNS)]


def _cost(other: Alternative) -> float:
    return float("inf") if other.cost_usd_per_million_samples is None else other.cost_usd_per_million_samples


def _more(other: float, cost: float) -> str:
    if cost <= 0:
        return _usd(other)
    ratio = other / cost
    if abs(ratio - 1) < 5e-5:
        return "same cost"
    return f"{ratio:.1f} x" if ratio >= 2 else f"{ratio - 1:+.1%}"


def _usd(amount: float) -> str:
    return f"${amount:,.2f}" if amount >= 10 else f"${amount:.4g}"


def _short(name: str) -> str:
    return name if len(name) <= NAME_COLUMNS else f"{name[: NAME_COLUMNS // 2 - 1]}..{name[-NAME_COLUMNS // 2 + 1 :]}"


def _head_and_tail(items: list[tuple[int, Stage]], most: int) -> list[tuple[int, Stage] | int]:
    """The first and last of too many items, with the number left out between them."""
    if len(items) <= most:
        return list(items)
    head = most // 2
    return [*items[:head], len(items) - 2 * head, *items[-head:]]
