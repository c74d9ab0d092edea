"""The plan as text a person reads in a minute: what to rent, why each layer is where it is, what else there was.

Enters: a plan. Leaves: fewer than 60 lines of at most 110 columns, however many layers it has; what is left out is
counted. The stages and then the reasons get the lines that the rest leaves.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from heterps_compile.report.amounts import against, dollars, duration, in_the_way, rate, short, units, usd
from heterps_compile.report.columns import align
from heterps_compile.report.compare_text import compare_text
from heterps_compile.report.graph_table import human

if TYPE_CHECKING:
    from heterps_compile.plan_facts import Alternative, PlanFacts, Reason, Stage

MAX_LINES = 59
COLUMNS = 110
MAX_TYPES = 8
MAX_STAGES = 10
MAX_REASONS = 14
MAX_NOTE_LINES = 6
SPAN_COLUMNS = 20
BOUND_BY = {"compute": "computing", "communication": "moving data", "memory": "memory"}


def explain(plan: PlanFacts, side_by_side: bool = False) -> str:
    """What to rent and why; ``side_by_side`` lists the other policies with their gap to the optimum."""
    if not plan.stages:
        return "Nothing to place: the graph has no layers."
    first = [*_wrapped(_headline(plan)), *_training(plan)]
    last = [compare_text(plan) if side_by_side else _alternatives(plan), _notes(plan)]
    before = [first, _rent(plan), _stages(plan)]
    taken = sum(len(part) + 1 for part in (*before, *last) if part)
    parts = [*before, _why(plan, MAX_LINES - taken), *last]
    return "\n\n".join("\n".join(_clipped(part)) for part in parts if part)


def _headline(plan: PlanFacts) -> list[str]:
    rented, hourly = units(plan.provision), usd(plan.price_usd_per_h)
    reach = f"{rate(plan.throughput_samples_per_s)} samples/s"
    cost = f"{usd(plan.cost_usd_per_million_samples)} per million samples"
    if not plan.feasible:
        return [
            f"No plan reaches {rate(plan.min_throughput or 0)} samples/s. In the way: {in_the_way(plan.binds)}.",
            f"The fastest reachable: rent {rented} for {hourly}/h: {reach}, {cost}.",
            "Ask for that or less, or change what is in the way.",
        ]
    asked = f" (asked: {rate(plan.min_throughput)})" if plan.min_throughput is not None else ""
    made = f"Found by policy {plan.policy} (seed {plan.seed}, {plan.mode} cost model) in {plan.planning_s:.2f} s."
    return [f"Rent {rented} for {hourly}/h: {reach}{asked}, {cost}.", f"{_gap(plan)} {made}"]


def _gap(plan: PlanFacts) -> str:
    if plan.optimum_proven:
        near = plan.gap_to_optimum <= 0
        proven = "the proven optimum."
        return f"No plan is cheaper: this is {proven}" if near else f"{plan.gap_to_optimum:.2%} above {proven}"
    if plan.optimum_usd_per_million_samples > 0:
        bound = usd(plan.optimum_usd_per_million_samples)
        return f"At most {plan.gap_to_optimum:.2%} above the optimum, which is at least {bound} per million samples."
    return "How far this is from the optimum is not known."


def _training(plan: PlanFacts) -> list[str]:
    """The whole training, where its samples are known."""
    if not plan.samples or plan.throughput_samples_per_s <= 0:
        return []
    cost = usd(plan.cost_usd_per_million_samples * plan.samples / 1e6)
    takes = duration(plan.samples / min(plan.throughput_samples_per_s, plan.data_rate or float("inf")))
    return [f"The whole training of {plan.samples:,.0f} samples: {cost} in {takes}."]


def _rent(plan: PlanFacts) -> list[str]:
    """One line per type in use; the unused ones are named together."""
    used = [r for r in plan.resources if plan.provision.get(r.name)]
    rows = [("rent", "units", "limit", "unused", "$/unit/h", "$/h", "times are")]
    for resource in used[:MAX_TYPES]:
        count, price = plan.provision[resource.name], resource.price_usd_per_h
        amounts = (f"{count:,}", f"{resource.limit:,}", f"{resource.limit - count:,}")
        rows.append(
            (
                f"{resource.name} (spot)" if resource.spot else resource.name,
                *amounts,
                dollars(price),
                dollars(price * count),
                plan.sources.get(resource.name, "given"),
            )
        )
    lines = align(rows, right=(1, 2, 3, 4, 5)) if used else []
    idle = [f"{r.name} ({r.limit:,})" for r in plan.resources if not plan.provision.get(r.name)]
    if len(used) > MAX_TYPES:
        lines.append(f"and {len(used) - MAX_TYPES} more types")
    if idle:
        lines.append("not used at all: " + ", ".join(idle[:6]) + (f" and {len(idle) - 6} more" if idle[6:] else ""))
    return lines


def _stages(plan: PlanFacts) -> list[str]:
    """Which layers run where, in order; a unit is busy for the part of the time that its stage needs."""
    known = any(stage.memory_bytes for stage in plan.stages)
    rows: list[tuple[str, ...]] = [
        ("stage", "runs on", "could do/s", "busy", "memory/unit", "limited by", "layers, in order")
    ]
    for entry in _head_and_tail(list(enumerate(plan.stages)), MAX_STAGES):
        if isinstance(entry, int):
            rows.append(("...", f"{entry} more stages", "", "", "", "", ""))
        else:
            rows.append(_stage(plan, *entry))
    kept = [column for column in zip(*rows, strict=True) if known or column[0] != "memory/unit"]
    return [*align(list(zip(*kept, strict=True)), right=(2, 3, 4) if known else (2, 3)), *_filling(plan)]


def _filling(plan: PlanFacts) -> list[str]:
    """Why the pipeline is slower than its slowest stage, where the cost model counts that."""
    slowest = min(stage.throughput_samples_per_s for stage in plan.stages)
    if slowest <= 0 or plan.throughput_samples_per_s > slowest * (1 - 1e-6):
        return []
    lost = 1 - plan.throughput_samples_per_s / slowest
    cut = f"{plan.microbatches:,} microbatches a batch"
    return [f"filling and draining the pipeline ({cut}) costs {lost:.0%} of the slowest stage's speed"]


def _stage(plan: PlanFacts, index: int, stage: Stage) -> tuple[str, ...]:
    pace, reached = stage.throughput_samples_per_s, plan.throughput_samples_per_s
    slowest = pace <= min(other.throughput_samples_per_s for other in plan.stages) * (1 + 1e-9)
    return (
        f"{index + 1}",
        f"{stage.replicas:,} x {stage.resource}",
        rate(pace),
        f"{min(reached / pace, 1.0):.0%}" if pace > 0 else "",
        human(stage.memory_bytes, "B") if stage.memory_bytes else "",
        BOUND_BY.get(stage.bound_by, stage.bound_by) + (" (slowest)" if slowest else ""),
        _span(stage),
    )


def _span(stage: Stage) -> str:
    if len(stage.layers) == 1:
        return short(stage.layers[0])
    first, last = (short(name, SPAN_COLUMNS) for name in (stage.layers[0], stage.layers[-1]))
    return f"{len(stage.layers)}: {first} {'to' if len(stage.layers) > 2 else 'and'} {last}"


def _why(plan: PlanFacts, room: int) -> list[str]:
    """The closest calls, in at most ``room`` lines: layers for which another type would cost least more."""
    movable = [reason for reason in plan.reasons if not reason.pinned]
    if not plan.reasons or len(plan.resources) < 2:
        return []
    ranked = sorted(range(len(movable)), key=lambda i: min(movable[i].elsewhere.values(), default=float("inf")))
    kept = sorted(ranked[: min(MAX_REASONS, max(room - 3, 1))])
    rows = [("why", "is on", "bound by", "if it moved to another type, the whole plan would cost")]
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
    bound_by = BOUND_BY["communication" if reason.transfer_bound else "compute"]
    cheapest = sorted(reason.elsewhere.items(), key=lambda move: move[1])[:3]
    moves = [f"{name} {against(other, plan.cost_usd_per_million_samples)}" for name, other in cheapest]
    ruled_out = [r.name for r in plan.resources if r.name not in reason.elsewhere and r.name != here]
    if ruled_out and len(moves) < 3:
        moves.append(f"{', '.join(ruled_out[: 3 - len(moves)])}: cannot, or too slow")
    together = "with what shares its table: " if reason.bound else ""
    return (short(reason.layer), here, bound_by, together + "; ".join(moves))


def _alternatives(plan: PlanFacts) -> list[str]:
    if not plan.alternatives:
        return []
    rows = [("instead", "$/million", "against this", "samples/s", "$/h")]
    for name, other in sorted(plan.alternatives.items(), key=lambda item: _cost(item[1])):
        if not other.feasible:
            rows.append((name, "-", "cannot reach the floor", "-", "-"))
            continue
        compared = against(_cost(other), plan.cost_usd_per_million_samples)
        reached, price = other.throughput_samples_per_s or 0.0, other.price_usd_per_h or 0.0
        rows.append((name, dollars(_cost(other)), compared, rate(reached), dollars(price)))
    return align(rows, right=(1, 3, 4))


def _notes(plan: PlanFacts) -> list[str]:
    lines = _wrapped([f"note: {note}" for note in plan.notes])
    if len(lines) <= MAX_NOTE_LINES:
        return lines
    return [*lines[: MAX_NOTE_LINES - 1], f"and {len(lines) - MAX_NOTE_LINES + 1} more lines of notes in the plan"]


def _cost(other: Alternative) -> float:
    return float("inf") if other.cost_usd_per_million_samples is None else other.cost_usd_per_million_samples


def _wrapped(texts: Sequence[str]) -> list[str]:
    return [line for text in texts for line in textwrap.wrap(text, COLUMNS, break_on_hyphens=False)]


def _clipped(lines: Sequence[str]) -> list[str]:
    """Long names of layers and types end in dots rather than in a second line."""
    return [line if len(line) <= COLUMNS else f"{line[: COLUMNS - 3]}..." for line in lines]


def _head_and_tail(items: list[tuple[int, Stage]], most: int) -> list[tuple[int, Stage] | int]:
    """The first and last of too many items, with the number left out between them."""
    if len(items) <= most:
        return list(items)
    head = most // 2
    return [*items[:head], len(items) - 2 * head, *items[-head:]]
