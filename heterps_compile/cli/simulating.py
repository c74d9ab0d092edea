"""``heterps simulate``: run a saved plan event by event, to see whether the formula's throughput is reached."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heterps_compile.cli.factory import UsageError

if TYPE_CHECKING:
    from heterps_compile.cluster import Cluster
    from heterps_compile.costs import CostTable
    from heterps_compile.plans import Plan
    from heterps_compile.runtime.simulate import Load, Simulation

STDIN = STDOUT = "-"
DEFAULT_MICROBATCHES = 1000
"""Enough for filling and draining to hardly count, as paper mode has it."""


def add_simulate(commands: Any) -> None:
    """``heterps simulate``."""
    command = commands.add_parser(
        "simulate",
        help="run a plan event by event and compare with its prediction",
        description="Let microbatches flow through the stages, replicas and links of a plan; nothing is trained.",
    )
    command.add_argument("plan", metavar="PLAN.json")
    command.add_argument("--costs", required=True, metavar="FILE", help="the costs it was planned with (- for stdin)")
    command.add_argument("--cluster", metavar="FILE", help="resource types and links; default: those in COSTS")
    command.add_argument(
        "--microbatches", type=int, metavar="N", help="how many flow; default: those of the plan, or 1000 in paper mode"
    )
    command.add_argument(
        "--jitter", type=float, default=0.0, metavar="X", help="standard deviation of every time over its mean"
    )
    command.add_argument("--seed", type=int, default=0, metavar="N")
    command.add_argument(
        "--dispatch",
        choices=("split", "whole"),
        default="split",
        help="cut a microbatch over the replicas of a stage, or give it whole to one; default: split",
    )
    command.add_argument("--json", metavar="OUT", help="write the figures as JSON; - prints them instead of the text")
    command.set_defaults(run=simulate)


def simulate(arguments: argparse.Namespace) -> int:
    """Print prediction and simulation; 0 whatever they are."""
    from heterps_compile.cluster import Cluster
    from heterps_compile.costs import CostTable
    from heterps_compile.plans import Plan
    from heterps_compile.runtime.simulate import Load, simulate_plan

    if arguments.seed < 0:
        raise UsageError(f"--seed is {arguments.seed} (allowed: a whole number >= 0)")
    plan = Plan.load(arguments.plan)
    load = Load(
        microbatches=_microbatches(arguments, plan),
        jitter=arguments.jitter,
        seed=arguments.seed,
        dispatch=arguments.dispatch,
    )
    from_stdin = arguments.costs == STDIN
    costs = CostTable.from_json(sys.stdin.read(), origin="stdin") if from_stdin else CostTable.load(arguments.costs)
    cluster = Cluster.load(arguments.cluster) if arguments.cluster else None
    run = simulate_plan(plan, costs, cluster, load)
    figures = {**asdict(run), "error": run.error, "plan_samples_per_s": plan.throughput_samples_per_s}
    if arguments.json and arguments.json != STDOUT:
        Path(arguments.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        print(f"heterps: wrote {arguments.json}", file=sys.stderr)
    samples = costs.batch_size / plan.microbatches
    print(json.dumps(figures, indent=1) if arguments.json == STDOUT else text(plan, run, load, samples))
    return 0


def _microbatches(arguments: argparse.Namespace, plan: Plan) -> int:
    """As asked; else those the plan cuts a batch into, which fill and drain between two updates."""
    if arguments.microbatches is not None:
        return int(arguments.microbatches)
    return plan.microbatches if plan.microbatches > 1 else DEFAULT_MICROBATCHES


def text(plan: Plan, run: Simulation, load: Load, samples: float) -> str:
    """Predicted beside simulated, how long filling and draining take, and how busy each stage is."""
    from heterps_compile.report.columns import align

    rows = [
        ("samples/s", "predicted", "simulated", "difference"),
        _compared("pipeline full", run.predicted_samples_per_s, run.throughput_samples_per_s),
        _compared("filled and drained", run.predicted_overall_samples_per_s, run.overall_samples_per_s),
    ]
    workers = sum(stage.replicas for stage in plan.stages)
    head = (
        f"{load.microbatches:,} microbatches of {samples:,.0f} samples on {workers:,} replicas ({load.dispatch} "
        f"dispatch, jitter {load.jitter:.0%}) take {run.makespan_s:.4g} s:\n"
        f"{run.fill_share:.1%} passes before the last stage starts, {run.drain_share:.1%} after the first has ended"
    )
    stages = [("stage", "type", "replicas", "busy")]
    stages += [
        (str(index), stage.resource, f"{stage.replicas:,}", f"{busy:.1%}")
        for index, (stage, busy) in enumerate(zip(plan.stages, run.busy, strict=True))
    ]
    return "\n".join([*align(rows, right=(1, 2, 3)), "", head, "", *align(stages, right=(2, 3))])


def in_short(plan: Plan, costs: CostTable, cluster: Cluster | None) -> str:
    """One line that sets a simulated run of the plan beside what the plan predicts."""
    from heterps_compile.runtime.simulate import Load, simulate_plan

    run = simulate_plan(plan, costs, cluster, Load(microbatches=max(plan.microbatches, 2)))
    off = run.throughput_samples_per_s / run.predicted_samples_per_s - 1
    line = (
        f"simulated event by event: {run.throughput_samples_per_s:,.0f} ({off:+.1%}) samples/s with the pipeline full"
    )
    if plan.microbatches < 2 or len(plan.stages) < 2:
        return line
    off = run.overall_samples_per_s / run.predicted_overall_samples_per_s - 1
    line += f", {run.overall_samples_per_s:,.0f} ({off:+.1%}) filled and drained"
    missed = plan.feasible and plan.min_throughput and run.overall_samples_per_s < plan.min_throughput
    return f"{line};\nthat is below the floor: ask for {-off:.0%} more, or more microbatches" if missed else line


def _compared(what: str, predicted: float, simulated: float) -> tuple[str, str, str, str]:
    return what, f"{predicted:,.0f}", f"{simulated:,.0f}", f"{simulated / predicted - 1:+.1%}"
