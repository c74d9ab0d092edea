"""What ``heterps plan`` answers: a plan, two plans side by side, all policies side by side, or cost against throughput.

Enters: a cost table, a cluster, a request, and where the answer goes. Leaves: text or JSON on stdout, files, and an
exit code: 0, or 1 when no plan reaches the throughput that was asked for.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heterps_compile.cli.plan_options import NUM_POINTS
from heterps_compile.cli.progress import steps, working

if TYPE_CHECKING:
    from heterps_compile.cluster import Cluster
    from heterps_compile.costs import CostTable
    from heterps_compile.planning import Request
    from heterps_compile.plans import Plan

STDOUT = "-"
REACHED, NOT_REACHED = 0, 1
FIXED_PLANS = 4
"""Plans that every frontier makes besides its points: both ends, the one beyond, and the floor asked for."""


def plan(costs: CostTable, cluster: Cluster | None, request: Request, arguments: argparse.Namespace) -> int:
    """One plan in words, or with ``--compare`` beside what every other policy gives."""
    from heterps_compile.cli.simulating import in_short
    from heterps_compile.planning import plan_costs
    from heterps_compile.report.plan_text import explain

    with working("comparing all policies" if request.compare else "planning"):
        found = plan_costs(costs, cluster, request)
    text = explain(found, side_by_side=request.compare)
    if found.stages:
        text = f"{text.rstrip()}\n\n{in_short(found, costs, cluster)}"
    _give(found.to_dict(), text, arguments.json)
    return _verdict(found)


def what_if(costs: CostTable, cluster: Cluster | None, request: Request, arguments: argparse.Namespace) -> int:
    """Both plans side by side; the exit code is about the changed one."""
    from dataclasses import replace

    from heterps_compile.planning.what_if import what_if as ask
    from heterps_compile.report.what_if_text import what_if_text

    with working("planning twice"):
        answer = ask(costs, cluster, replace(request, quick=request.policy is None), arguments.what_if)
    changes = [str(change) for change in answer.changes]
    _give(answer.to_dict(), what_if_text(changes, answer.base, answer.changed, answer.refusal), arguments.json)
    return _verdict(answer.changed) if answer.changed else _say(f"no plan with {', '.join(changes)}: {answer.refusal}")


def frontier(costs: CostTable, cluster: Cluster | None, request: Request, arguments: argparse.Namespace) -> int:
    """A table, a picture of text, and with ``--svg`` or ``--html`` a picture in a file."""
    from heterps_compile.planning.frontier import frontier as sweep
    from heterps_compile.report.frontier_svg import frontier_html, frontier_svg
    from heterps_compile.report.frontier_text import frontier_text

    with steps("cost against throughput", NUM_POINTS + FIXED_PLANS) as step:
        found = sweep(costs, cluster, request, NUM_POINTS, step)
    asked = request.min_throughput
    if arguments.svg:
        _write(arguments.svg, frontier_svg(found.plans, found.end, asked))
    if arguments.html:
        _write(arguments.html, frontier_html(found.plans, found.end, asked))
    _give(found.to_dict(), frontier_text(found.plans, found.end, asked), arguments.json)
    fastest = found.plans[-1].throughput_samples_per_s
    if asked is None or found.end is None or asked <= fastest:
        return REACHED
    return _say(
        f"no plan reaches {asked:,.0f} samples/s; the best reaches {fastest:,.0f}: {'; '.join(found.end.binds)}"
    )


def _verdict(found: Plan) -> int:
    if found.feasible:
        return REACHED
    return _say(
        f"no plan reaches {found.min_throughput or 0:,.0f} samples/s; the best reaches "
        f"{found.throughput_samples_per_s:,.0f}: {'; '.join(found.binds) or 'the limits of the cluster are too low'}"
    )


def _say(reason: str) -> int:
    print(f"heterps: {reason}", file=sys.stderr)
    return NOT_REACHED


def _give(values: dict[str, Any], text: str, out: str | None) -> None:
    """Data to stdout: the JSON when that is asked for there, else the text."""
    data = json.dumps(values, indent=1)
    if out and out != STDOUT:
        _write(out, f"{data}\n")
    print(data if out == STDOUT else text)


def _write(path: str, text: str) -> None:
    Path(path).write_text(text, encoding="utf-8")
    print(f"heterps: wrote {path}", file=sys.stderr)
