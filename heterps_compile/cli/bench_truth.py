"""``heterps bench truth``: what is predicted for this machine beside what it does."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heterps_compile.cli.factory import UsageError, models_named

if TYPE_CHECKING:
    from heterps_compile.bench.truth import Outcome

STDOUT = "-"
CORES = (1, 2)


def add_truth(experiments: Any) -> None:
    """``heterps bench truth``."""
    command = experiments.add_parser(
        "truth",
        help="predicted beside measured training throughput on this machine",
        description="Train four models here, on cpu and on cpu + simulated accelerator, and compare with predictions.",
    )
    command.add_argument("--models", nargs="+", metavar="MODEL", help="dlrm, deepfm, dcn, widedeep; default: all")
    command.add_argument("--cores", nargs="+", type=int, metavar="N", help="numbers of cores; default: 1 2")
    command.add_argument("--json", metavar="OUT", help="write the results as JSON; - prints it instead of the text")
    command.set_defaults(run=truth)


def truth(arguments: argparse.Namespace) -> int:
    """Print the table; 0 whatever it shows."""
    from heterps_compile.models import MODELS

    models, cores = models_named(arguments.models, MODELS), _cores(arguments.cores)
    from heterps_compile.bench.truth import Sizes, cases, run
    from heterps_compile.bench.truth_text import closing_text, table, to_dict
    from heterps_compile.comparison import machine

    outcomes: list[Outcome] = []
    wanted = cases(models, cores)
    for outcome in run(wanted, Sizes()):
        outcomes.append(outcome)
        case = outcome.case
        print(f"heterps: {len(outcomes)}/{len(wanted)} {case.model}, {case.cores} cores, {case.types}", file=sys.stderr)
    text = json.dumps(to_dict(outcomes), indent=1) + "\n"
    if arguments.json and arguments.json != STDOUT:
        Path(arguments.json).write_text(text, encoding="utf-8")
        print(f"heterps: wrote {arguments.json}", file=sys.stderr)
    report = f"{table(outcomes)}\n\n{closing_text(outcomes, os.getloadavg()[0])}\n{machine()}\n"
    print(text if arguments.json == STDOUT else report, end="")
    return 0


def _cores(given: list[int] | None) -> tuple[int, ...]:
    from heterps_compile.cluster import num_cores

    for count in given or ():
        if not 1 <= count <= num_cores():
            raise UsageError(f"--cores names {count} (allowed: 1 to {num_cores()}, the cores of this machine)")
    return tuple(dict.fromkeys(given or [count for count in CORES if count <= num_cores()]))
