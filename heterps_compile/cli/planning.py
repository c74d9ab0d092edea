"""``heterps plan``, ``explain`` and ``profile``: the subcommands that decide and measure, but train nothing."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from heterps_compile.cli.factory import FORM, UsageError, load
from heterps_compile.cli.plan_options import add_options, at_spot_prices, request_of
from heterps_compile.cli.progress import working

if TYPE_CHECKING:
    from heterps_compile.cluster import Cluster
    from heterps_compile.costs import CostTable

STDOUT = "-"


def add_plan(commands: Any) -> None:
    """``heterps plan``: from a model, or from a table of costs."""
    command = commands.add_parser(
        "plan",
        help="which layers where, how many units to rent, what it costs",
        description="Place the layers of a model, or of a table of costs, for the least money at a throughput.",
    )
    add_options(command)
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
    """Answer what is asked and return 0, or 1 when no plan reaches the throughput."""
    if arguments.model and arguments.costs:
        raise UsageError(f"both {arguments.model} and --costs {arguments.costs} are given (allowed: one of them)")
    if not arguments.model and not arguments.costs:
        raise UsageError("nothing to plan", hint="give MODULE:FACTORY, or --costs FILE")
    request = request_of(arguments)
    costs, cluster = _problem(arguments)
    if arguments.spot:
        cluster = at_spot_prices(cluster or costs.cluster())
    from heterps_compile.cli import plan_answers

    if arguments.what_if:
        return plan_answers.what_if(costs, cluster, request, arguments)
    if arguments.frontier:
        return plan_answers.frontier(costs, cluster, request, arguments)
    return plan_answers.plan(costs, cluster, request, arguments)


def _problem(arguments: argparse.Namespace) -> tuple[CostTable, Cluster | None]:
    """The table of costs, read or made from the model, and the cluster; None stands for the types of the table."""
    cluster = _read_cluster(arguments.cluster)
    if arguments.costs:
        table = _read_costs(arguments.costs)
        return table.trained_with(arguments.optimizer) if arguments.optimizer else table, cluster
    model, inputs = load(arguments.model)
    from heterps_compile.planner import model_costs, this_machine

    with working(f"looking at the layers of {arguments.model}"):
        fleet = cluster or this_machine()
        table = model_costs(model, inputs, fleet, arguments.profile)
        return table.trained_with(arguments.optimizer or "adam"), fleet


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

    with working(f"measuring the layers of {arguments.model}"):
        return model_costs(model, inputs, cluster or this_machine(), "measure")


def _read_cluster(path: str | None) -> Cluster | None:
    from heterps_compile.cluster import Cluster

    return Cluster.load(path) if path else None


def _read_costs(path: str) -> CostTable:
    from heterps_compile.costs import CostTable

    return CostTable.from_json(sys.stdin.read(), origin="stdin") if path == STDOUT else CostTable.load(path)
