"""``heterps bench paper``: every policy on every case, what is printed at the end, and the results as JSON.

The paper's experiments on scheduling: cost per policy for its models, and planning time against the number of layers
and of resource types.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tqdm import tqdm

from heterps_compile.bench.paper_cases import Case
from heterps_compile.bench.paper_claims import claims
from heterps_compile.bench.paper_text import planning_time_text
from heterps_compile.bench.policy_runs import CaseResult, PolicyResult, Run, policies_for, run_case
from heterps_compile.comparison import machine


def run(cases: Iterable[Case], num_seeds: int, num_cases: int | None = None) -> Iterator[CaseResult]:
    """Run every policy on each case; progress goes to stderr where that is a terminal."""
    with tqdm(cases, total=num_cases, unit="case", disable=not sys.stderr.isatty(), leave=False) as bar:
        for case in bar:
            found: list[PolicyResult] = []
            for result in run_case(case, num_seeds, policies_for(case.problem)):
                found.append(result)
                bar.set_postfix_str(f"{case.name}: {result.policy}")
            yield CaseResult(case=case, policies=tuple(found))


def closing_text(results: Sequence[CaseResult]) -> str:
    """Planning times, the claims one a line, and the machine."""
    parts = [planning_time_text(results), "\n".join(f"- {sentence}" for sentence in claims(results)), machine()]
    return "\n\n".join(part for part in parts if part) + "\n"


def to_dict(results: Sequence[CaseResult]) -> dict[str, Any]:
    """Ready for JSON: every run of every policy, the claims and the machine."""
    return {
        "version": 1,
        "machine": machine(),
        "claims": list(claims(results)),
        "cases": [_case_dict(result) for result in results],
    }


def _case_dict(result: CaseResult) -> dict[str, Any]:
    problem = result.case.problem
    return {
        "model": result.case.model,
        "resources": list(problem.types),
        "layers": list(problem.layers),
        "min_throughput": result.case.min_throughput,
        "floor_multiple": result.case.floor_multiple,
        "lower_bound_usd_per_million_samples": result.bound,
        "optimum_proven": result.proven,
        "policies": {policy.policy: [_run_dict(run) for run in policy.runs] for policy in result.policies},
    }


def _run_dict(run: Run) -> dict[str, Any]:
    cost = run.cost_usd_per_million_samples
    return {
        "seed": run.seed,
        "feasible": run.feasible,
        "cost_usd_per_million_samples": cost if math.isfinite(cost) else None,
        "cpu_s": run.cpu_s,
        "placement": list(run.placement),
    }
