"""``heterps plan``, ``explain`` and ``profile``: the subcommands that decide and measure, but train nothing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heterps_compile.cli.factory import FORM, UsageError, load
from heterps_compile.options import POLICIES

if TYPE_CHECKING:
    from heterps_compile.cluster import Cluster
    from heterps_compile.costs import CostTable
    from heterps_compile.plans import Plan

STDOUT = "-"


def add_plan(commands: Any) -> None:
    """``heterps plan``: from a model, or from a table of costs."""
    command = commands.add_parser(
        "plan",
        help="which layers where, how many units to rent, what it costs",
        description="Place the layers of a model, or of a table of costs, for the least money at a throughput.",
    )
    command.add_argument("model", nargs="?", metavar="MODULE:FACTORY", help=FORM)
    command.add_argument("--costs", metavar="FILE", help="plan from this table of costs (- for stdin); no model needed")
    command.add_argument(
        "--cluster",
        metavar="FILE",
        help="resource types with prices and limits; default: this machine, or those in COSTS",
    )
    command.add_argument(
        "--min-throughput", type=_positive, required=True, metavar="R", help="samples per second to reach"
    )
    command.add_argument("--policy", choices=POLICIES, help="default: rl, or exact where it is cheaper")
    command.add_argument("--seed", type=int, default=0, metavar="N")
    command.add_argument(
        "--pin",
        action="append",
        default=[],
        type=_pin,
        metavar="GLOB=TYPE",
        help="force layers onto a type; repeatable",
    )
    command.add_argument("--compare", action="store_true", help="run every policy on the table of costs")
    command.add_argument("--json", metavar="OUT", help="write the plan as JSON; - prints it instead of the text")
    command.set_defaults(run=plan)


def add_explain(commands: Any) -> None:
    """``heterps explain``."""
    command = commands.add_parser("explain", help="a saved plan in words")
    command.add_argument("plan", metavar="PLAN.json")
    command.set_defaults(run=explain)


def add_profile(commands: Any) -> None:
    """``heterps profile``: measure, or merge what was measured elsewhere."""
    command = commands.add_parser(
        "profile",
        help="measure the layers of a model here, or merge tables measured elsewhere",
        description="Measure each layer on the types present here and estimate it on the others of the cluster.",
    )
    command.add_argument("model", nargs="?", metavar="MODULE:FACTORY", help=FORM)
    command.add_argument("--cluster", metavar="FILE", help="resource types to profile for; default: this machine")
    command.add_argument("--merge", nargs="+", metavar="FILE", help="tables of costs to merge instead")
    command.add_argument("--out", default=STDOUT, metavar="FILE", help="where the table goes; default: stdout")
    command.set_defaults(run=profile)


def plan(arguments: argparse.Namespace) -> int:
    """Print the plan and return 0, or 1 when no plan reaches the throughput."""
    found = _plan_costs(arguments) if arguments.costs else _plan_model(arguments)
    text = json.dumps(found.to_dict(), indent=1) + "\n"
    if arguments.json and arguments.json != STDOUT:
        Path(arguments.json).write_text(text, encoding="utf-8")
        print(f"heterps: wrote {arguments.json}", file=sys.stderr)
    print(text if arguments.json == STDOUT else f"{found.explain()}\n", end="")
    if found.feasible:
        return 0
    reason = "; ".join(found.binds) or "the limits of the cluster are too low"
    print(
        f"heterps: no plan reaches {arguments.min_throughput:,.0f} samples/s; the best reaches "
        f"{found.throughput_samples_per_s:,.0f}: {reason}",
        file=sys.stderr,
    )
    return 1


def _plan_costs(arguments: argparse.Namespace) -> Plan:
    if arguments.model:
        raise UsageError(f"both {arguments.model} and --costs {arguments.costs} are given (allowed: one of them)")
    costs, cluster, pin = _read_costs(arguments.costs), _read_cluster(arguments.cluster), _pins(arguments.pin)
    from heterps_compile.planning import Request, plan_costs

    request = Request(
        min_throughput=arguments.min_throughput,
        policy=arguments.policy,
        seed=arguments.seed,
        pin=pin,
        compare=arguments.compare,
    )
    return plan_costs(costs, cluster, request)


def _plan_model(arguments: argparse.Namespace) -> Plan:
    if not arguments.model:
        raise UsageError("nothing to plan", hint="give MODULE:FACTORY, or --costs FILE")
    if arguments.compare:
        raise UsageError(
            "--compare works on a table of costs",
            hint=f"heterps profile {arguments.model} --out costs.json, then heterps plan --costs costs.json --compare",
        )
    cluster, pin = _read_cluster(arguments.cluster), _pins(arguments.pin)
    model, inputs = load(arguments.model)
    from heterps_compile.planner import plan as plan_model

    return plan_model(
        model,
        inputs,
        cluster=cluster,
        min_throughput=arguments.min_throughput,
        policy=arguments.policy,
        seed=arguments.seed,
        pin=pin,
    )


def explain(arguments: argparse.Namespace) -> int:
    """Print a saved plan in words."""
    from heterps_compile.plans import Plan

    print(Plan.load(arguments.plan).explain())
    return 0


def profile(arguments: argparse.Namespace) -> int:
    """Write a table of costs: measured here, or merged."""
    if bool(arguments.model) == bool(arguments.merge):
        raise UsageError("profile takes MODULE:FACTORY or --merge FILE..., one of the two")
    table = _merged(arguments.merge) if arguments.merge else _profiled(arguments)
    if arguments.out == STDOUT:
        print(json.dumps(table.to_dict(), indent=1))
        return 0
    table.save(arguments.out)
    print(f"heterps: wrote {arguments.out}: {len(table)} layers", file=sys.stderr)
    return 0


def _merged(paths: list[str]) -> CostTable:
    first, *others = [_read_costs(path) for path in paths]
    return first.merge(*others)


def _profiled(arguments: argparse.Namespace) -> CostTable:
    cluster = _read_cluster(arguments.cluster)
    model, inputs = load(arguments.model)
    from heterps_compile.planner import model_costs, this_machine

    return model_costs(model, inputs, cluster or this_machine(), "measure")


def _read_cluster(path: str | None) -> Cluster | None:
    from heterps_compile.cluster import Cluster

    return Cluster.load(path) if path else None


def _read_costs(path: str) -> CostTable:
    from heterps_compile.costs import CostTable

    return CostTable.from_json(sys.stdin.read(), origin="stdin") if path == STDOUT else CostTable.load(path)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} (allowed: a number > 0, such as 5e5)")
    return value


def _pin(text: str) -> tuple[str, str]:
    glob, _, kind = text.partition("=")
    if not glob or not kind:
        raise argparse.ArgumentTypeError(f"{text!r} (allowed: GLOB=TYPE, such as 'emb*=cpu')")
    return glob, kind


def _pins(pairs: list[tuple[str, str]]) -> dict[str, str]:
    pins = dict(pairs)
    if len(pins) != len(pairs):
        globs = [glob for glob, _ in pairs]
        twice = next(glob for glob in globs if globs.count(glob) > 1)
        raise UsageError(f"--pin {twice}=... is given more than once (allowed: once per glob)")
    return pins
