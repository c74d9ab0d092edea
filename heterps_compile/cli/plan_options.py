"""The options of ``heterps plan``, and the request that they make.

Enters: words on the command line. Leaves: a :class:`Request`. Refused: values of the wrong form, by argparse, and
options that contradict each other (:class:`UsageError`).
"""

from __future__ import annotations

import argparse
import math
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from heterps_compile.cli.factory import FORM, UsageError
from heterps_compile.costs import OPTIMIZER_SLOTS
from heterps_compile.errors import HeterpsWarning
from heterps_compile.options import POLICIES

if TYPE_CHECKING:
    from heterps_compile.cluster import Cluster, ResourceType
    from heterps_compile.planning import Mode, Request

NUM_POINTS = 14


def add_options(command: argparse.ArgumentParser) -> None:
    """What to plan, for what, how, what else to ask, and where the answer goes."""
    _add_problem(command)
    _add_method(command.add_argument_group("how to plan"))
    _add_questions(command.add_argument_group("what else to ask"))
    output = command.add_argument_group("where the answer goes")
    output.add_argument("--json", metavar="OUT", help="write the answer as JSON; - prints it instead of the text")
    output.add_argument("--svg", metavar="OUT", help="with --frontier: write the picture")
    output.add_argument("--html", metavar="OUT", help="with --frontier: write a page with picture and table")


def _add_problem(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", nargs="?", metavar="MODULE:FACTORY", help=FORM)
    command.add_argument("--costs", metavar="FILE", help="plan from this table of costs (- for stdin); no model needed")
    command.add_argument(
        "--cluster",
        metavar="FILE",
        help="resource types with prices and limits; default: this machine, or those in COSTS",
    )
    command.add_argument("--spot", action="store_true", help="every type at its spot price")
    command.add_argument(
        "--optimizer",
        choices=tuple(OPTIMIZER_SLOTS),
        help="full mode: whose state takes memory; default: adam for a model, what the table says for --costs",
    )
    command.add_argument(
        "--min-throughput",
        type=positive,
        metavar="R",
        help="samples per second to reach (the floor); needed, or --data-rate is",
    )
    command.add_argument(
        "--pin",
        action="append",
        default=[],
        type=pin,
        metavar="GLOB=TYPE",
        help="force layers onto a type; repeatable",
    )
    command.add_argument(
        "--replicas",
        action="append",
        default=[],
        type=replicas,
        metavar="TYPE=N",
        help="force the units of a type; repeatable",
    )


def _add_method(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--policy", choices=POLICIES, help="default: rl, or exact where it is cheaper")
    group.add_argument(
        "--profile",
        choices=("auto", "measure", "estimate"),
        default="auto",
        help="times of a model's layers: estimated from rates, or measured where the type is here (default if there is "
        "a choice to make)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N")
    group.add_argument(
        "--mode",
        choices=("paper", "full"),
        help="cost model: as published (default with --costs), or with memory, transfers and filling (with a model)",
    )
    group.add_argument("--microbatches", type=count, metavar="N", help="full mode: pieces of a batch; default: 8")
    group.add_argument("--samples", type=positive, metavar="N", help="samples of the whole training, to price it")
    group.add_argument(
        "--data-rate",
        type=positive,
        metavar="R",
        help="full mode: samples per second that arrive; to be faster saves nothing",
    )
    group.add_argument(
        "--time-limit",
        type=positive,
        default=60.0,
        metavar="S",
        help="seconds that each policy may search; default: 60",
    )


def _add_questions(group: argparse._ArgumentGroup) -> None:
    asked = group.add_mutually_exclusive_group()
    asked.add_argument("--compare", action="store_true", help="run every policy and set them side by side")
    asked.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="plan again with limit.TYPE, price.TYPE, memory.TYPE or floor changed; repeatable",
    )
    asked.add_argument("--frontier", action="store_true", help="cost against throughput: a table and a picture")


def request_of(arguments: argparse.Namespace) -> Request:
    """What the planner is asked for. Raises :class:`UsageError` for options that need each other."""
    from heterps_compile.planning import Request

    if arguments.min_throughput is None and arguments.data_rate is None and not arguments.frontier:
        raise UsageError("how fast the plan must be is not said", hint="give --min-throughput R or --data-rate R")
    if arguments.frontier and arguments.policy not in (None, "exact"):
        raise UsageError(f"--frontier plans by exact, not by {arguments.policy}", hint="leave --policy out")
    if arguments.frontier and arguments.data_rate:
        raise UsageError("--frontier goes through all throughputs, --data-rate names one", hint="leave one of them out")
    if arguments.costs and arguments.profile != "auto":
        raise UsageError(f"--profile {arguments.profile} looks at a model, and --costs is a table", hint="leave it out")
    for name in ("svg", "html"):
        if getattr(arguments, name) and not arguments.frontier:
            raise UsageError(f"--{name} draws cost against throughput", hint="give --frontier as well")
    mode: Mode = arguments.mode or ("paper" if arguments.costs else "full")
    if arguments.microbatches and mode != "full":
        raise UsageError("--microbatches has no part in the cost model as published", hint="give --mode full as well")
    return Request(
        min_throughput=arguments.min_throughput,
        policy=arguments.policy,
        seed=arguments.seed,
        pin=_once("--pin", arguments.pin),
        replicas=_once("--replicas", arguments.replicas),
        mode=mode,
        microbatches=arguments.microbatches or Request().microbatches,
        samples=arguments.samples,
        data_rate=arguments.data_rate,
        compare=arguments.compare,
        time_limit_s=arguments.time_limit,
    )


def at_spot_prices(cluster: Cluster) -> Cluster:
    """The same types at their spot prices; one warning names those that keep theirs, as no spot price is known.

    Raises :class:`UsageError` where none is known.
    """
    unknown = [resource.name for resource in cluster if not resource.spot_price_usd_per_h]
    hint = "give spot_price_usd_per_h in the cluster file"
    if len(unknown) == len(cluster):
        raise UsageError(f"--spot: no spot price is known of {', '.join(unknown)}", hint=hint)
    if unknown:
        warnings.warn(
            f"--spot: no spot price is known of {', '.join(unknown)}; the price on demand is taken ({hint})",
            HeterpsWarning,
            stacklevel=2,
        )
    return replace(cluster, resources=tuple(map(_spot, cluster)))


def _spot(resource: ResourceType) -> ResourceType:
    price = resource.spot_price_usd_per_h
    return replace(resource, price_usd_per_h=price, spot=True) if price else resource


def positive(text: str) -> float:
    """A finite number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} (allowed: a number > 0, such as 5e5)")
    return value


def count(text: str) -> int:
    """A whole number above zero."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} (allowed: a whole number >= 1)")
    return int(text)


def pin(text: str) -> tuple[str, str]:
    """``GLOB=TYPE``."""
    glob, _, kind = text.partition("=")
    if not glob or not kind:
        raise argparse.ArgumentTypeError(f"{text!r} (allowed: GLOB=TYPE, such as 'emb*=cpu')")
    return glob, kind


def replicas(text: str) -> tuple[str, int]:
    """``TYPE=N`` with at least one unit."""
    kind, _, units = text.partition("=")
    if not kind or not units.isdecimal() or int(units) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} (allowed: TYPE=N with N >= 1, such as v100=2)")
    return kind, int(units)


def _once(option: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{option} {twice}=... is given more than once (allowed: once)")
    return found
