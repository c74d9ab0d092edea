"""``heterps bench``: experiments that print tables. A new one is a function added to ``EXPERIMENTS``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heterps_compile.cli.bench_truth import add_truth
from heterps_compile.cli.factory import models_named
from heterps_compile.cli.plan_options import count

if TYPE_CHECKING:
    from heterps_compile.bench.policy_runs import CaseResult

STDOUT = "-"


def add_bench(commands: Any) -> None:
    """``heterps bench`` with a sub-command per experiment."""
    command = commands.add_parser("bench", help="repeat the paper's experiments")
    experiments = command.add_subparsers(title="experiments", metavar="EXPERIMENT", required=True)
    for add in EXPERIMENTS:
        add(experiments)


def add_paper(experiments: Any) -> None:
    """``heterps bench paper``."""
    command = experiments.add_parser(
        "paper",
        help="the paper's models on 2, 4 and 8 resource types, planned by every policy",
        description="Plan the paper's models with every policy: cost, gap to the proven optimum, planning time.",
    )
    command.add_argument("--models", nargs="+", metavar="MODEL", help="ctrdnn-8, -12, -16, -20, matchnet, 2emb, nce")
    command.add_argument("--types", nargs="+", type=int, choices=(2, 4, 8), metavar="N", help="2, 4, 8")
    command.add_argument("--seeds", type=count, default=5, metavar="N", help="runs of policies that draw; default: 5")
    command.add_argument("--json", metavar="OUT", help="write the results as JSON; - prints it instead of the text")
    command.set_defaults(run=paper)


EXPERIMENTS = (add_paper, add_truth)


def paper(arguments: argparse.Namespace) -> int:
    """Print a table per case as it is done, then planning times and what the results say about the paper's claims."""
    from heterps_compile.bench.paper import closing_text, run, to_dict
    from heterps_compile.bench.paper_cases import NUM_TYPES, cases
    from heterps_compile.bench.paper_text import case_text
    from heterps_compile.models import PAPER_MODELS

    models = models_named(arguments.models, PAPER_MODELS)
    num_types = tuple(dict.fromkeys(arguments.types or NUM_TYPES))
    results: list[CaseResult] = []
    for result in run(cases(models, num_types), arguments.seeds, len(models) * len(num_types)):
        results.append(result)
        if arguments.json != STDOUT:
            print(case_text(result), end="\n\n", flush=True)
    text = json.dumps(to_dict(results), indent=1) + "\n"
    print(text if arguments.json == STDOUT else closing_text(results), end="")
    if arguments.json and arguments.json != STDOUT:
        Path(arguments.json).write_text(text, encoding="utf-8")
        print(f"heterps: wrote {arguments.json}", file=sys.stderr)
    return 0
