"""Results of ``heterps bench paper`` as text: a table per case, and one of planning times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from heterps_compile.bench.policy_runs import CaseResult, PolicyResult, Run
from heterps_compile.passes.place import num_placements
from heterps_compile.report.columns import align

TIMED = ("brute-force", "exact", "rl")
MAX_STAGES = 7
SMALLEST_GAP = 5e-7
"""Below this a gap is printed as 0."""


def case_text(result: CaseResult) -> str:
    """What the case is, and a row per policy: cost, ratio to the optimum, gap with its spread, CPU time, placement."""
    heads = ("policy", "USD/M samples", "x optimum", "gap", "min - max over seeds", "CPU s", "placement")
    rows = [heads, *(policy_row(result, policy) for policy in result.policies)]
    return "\n".join([case_heading(result), *align(rows, right=(1, 2, 3, 4, 5), indent="  ")])


def case_heading(result: CaseResult) -> str:
    """Model, types, sizes, floor, and what is proven."""
    case, problem = result.case, result.case.problem
    proof = "the proven optimum is" if result.proven else "no optimum is proven; the bound is"
    return (
        f"{case.name} ({', '.join(problem.types)}): {problem.num_layers} layers, "
        f"{num_placements(problem):,} placements\n"
        f"  at least {case.min_throughput:,.0f} samples/s ({case.floor_multiple:g} x one v100); "
        f"{proof} {result.bound:.6f} USD per million samples"
    )


def policy_row(result: CaseResult, policy: PolicyResult) -> tuple[str, ...]:
    """Cells of one policy; means over the seeds that found something."""
    seconds = f"{policy.mean_cpu_s:.2f}"
    if not policy.costs:
        return policy.policy, "infeasible", "", "", "", seconds, ""
    ratio = result.ratio(policy.mean_cost)
    spread = f"{gap(result.ratio(min(policy.costs)))} - {gap(result.ratio(max(policy.costs)))}"
    if missed := len(policy.runs) - len(policy.costs):
        spread += f", {missed} of {len(policy.runs)} infeasible"
    return (
        policy.policy,
        f"{policy.mean_cost:.6f}",
        f"{ratio:.4f}",
        gap(ratio),
        spread if len(policy.runs) > 1 else "",
        seconds,
        placement_text(policy.best),
    )


def gap(ratio: float) -> str:
    """A cost over the optimum as a percentage above it."""
    above = ratio - 1
    return "0" if abs(above) < SMALLEST_GAP else f"{100 * above:.4f} %" if above < 0.01 else f"{100 * above:.1f} %"


def placement_text(run: Run) -> str:
    """Stages in order with the layers of each: ``7 cpu, 1 v100, 8 cpu``; of many stages only their number."""
    stages = [f"{len(list(layers))} {kind}" for kind, layers in groupby(run.placement)]
    return ", ".join(stages) if len(stages) <= MAX_STAGES else f"{len(stages)} stages"


def planning_time_text(results: Sequence[CaseResult]) -> str:
    """CPU seconds of planning CTRDNN, against the number of layers and types; empty without a CTRDNN."""
    chosen = [result for result in results if result.case.model.startswith("ctrdnn")]
    if not chosen:
        return ""
    rows: list[tuple[str, ...]] = [("layers", "types", "placements", *(f"{name} s" for name in TIMED))]
    for result in chosen:
        problem = result.case.problem
        cells = (f"{result[name].mean_cpu_s:.2f}" if name in result else "-" for name in TIMED)
        rows.append((str(problem.num_layers), str(problem.num_types), f"{num_placements(problem):.1e}", *cells))
    head = "CPU seconds to plan CTRDNN (-: more placements than brute force is run on)"
    return "\n".join([head, *align(rows, right=range(6), indent="  ")])
