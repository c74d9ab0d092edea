"""What the results say about the paper's claims, in sentences computed from them.

HeterPS (arXiv 2111.10635) says that its RL finds what brute force finds where that can run, and plans that cost less
than those of all other methods, up to 312.3 %: read as (other - RL) / RL, since a cost cannot shrink by more than all.
"""

from __future__ import annotations

from collections.abc import Sequence

from heterps_compile.bench.paper_text import gap
from heterps_compile.bench.policy_runs import CaseResult, PolicyResult

SAME = 1e-6
"""Relative difference below which two costs count as equal."""
PLAIN = "rl-plain"
BASELINES = (PLAIN, "greedy", "genetic", "bayesian", "heuristic", "cpu-only", "gpu-only")


def claims(results: Sequence[CaseResult]) -> tuple[str, ...]:
    """Three sentences: rl against brute force, against the other methods, and against exact."""
    return against_brute_force(results), against_baselines(results), against_exact(results)


def against_brute_force(results: Sequence[CaseResult]) -> str:
    """Whether rl matches brute force wherever that ran, and whether it would without what we added to it."""
    ran = [result for result in results if "brute-force" in result and result["brute-force"].costs]
    if not ran:
        return "Brute force ran on no case, so whether rl matches it is not known."
    where = f"of the {len(ran)} cases where brute force ran"
    both = [f"{name} matches brute force with every seed in {matches(ran, name)} {where}" for name in ("rl", PLAIN)]
    return f"{both[0]}; without our additions to the paper's learner, {both[1]}."


def matches(ran: Sequence[CaseResult], name: str) -> str:
    """``3``, or ``2 (at worst 10.0 % above, 2emb, 2 types)``."""
    matched = [result for result in ran if always_within(result[name], result["brute-force"].mean_cost)]
    if len(matched) == len(ran):
        return str(len(matched))
    worst = max(ran, key=lambda result: worst_ratio(result, name))
    return f"{len(matched)} (at worst {gap(worst_ratio(worst, name))} above, {worst.case.name})"


def against_baselines(results: Sequence[CaseResult]) -> str:
    """How often rl costs less than each other method, and the largest difference, both ways of stating it."""
    parts = [counted(results, name) for name in BASELINES if any(name in result for result in results)]
    start = f"rl (mean over seeds) costs less than {'; '.join(parts)}"
    differences = [
        (result[name].mean_cost / result["rl"].mean_cost - 1, f"{name} on {result.case.name}")
        for result in results
        for name in BASELINES
        if name in result and result[name].costs and result["rl"].costs
    ]
    if not differences:
        return f"{start}."
    excess, where = max(differences)
    return (
        f"{start}; the largest difference is to {where}, which costs {excess:.1%} more than rl "
        f"(rl is {excess / (1 + excess):.1%} cheaper), where the paper says 312.3%."
    )


def counted(results: Sequence[CaseResult], name: str) -> str:
    """``greedy in 12 of 21 cases (equal in 8, dearer in 1)``; a method that finds nothing has lost."""
    ran = [result for result in results if name in result]
    less = sum(result["rl"].mean_cost < result[name].mean_cost * (1 - SAME) for result in ran)
    more = sum(result["rl"].mean_cost > result[name].mean_cost * (1 + SAME) for result in ran)
    nothing = sum(not result[name].costs for result in ran)
    found_none = f", {name} finds nothing in {nothing}" if nothing else ""
    return f"{name} in {less} of {len(ran)} cases (equal in {len(ran) - less - more}, dearer in {more}{found_none})"


def against_exact(results: Sequence[CaseResult]) -> str:
    """Where exact costs less than rl, and the CPU time of both."""
    ran = [result for result in results if "exact" in result and result["exact"].costs]
    better = [result for result in ran if not always_within(result["rl"], result["exact"].mean_cost)]
    seconds = [sum(result[name].mean_cpu_s for result in ran) for name in ("exact", "rl")]
    proofs = f"exact proves the optimum in {sum(result.proven for result in ran)} of {len(ran)} cases"
    times = f"it takes {seconds[0]:.1f} CPU s for all of them, rl {seconds[1]:.1f} per seed"
    if not better:
        return f"{proofs}, {times}, and in none does it cost less than rl's worst seed."
    listed = ", ".join(f"{result.case.name} ({gap(worst_ratio(result, 'rl'))})" for result in better)
    return f"{proofs}, {times}, and in {len(better)} it costs less than rl's worst seed: {listed}."


def always_within(policy: PolicyResult, cost: float) -> bool:
    """Whether every run found a placement that costs no more."""
    return len(policy.costs) == len(policy.runs) and max(policy.costs) <= cost * (1 + SAME)


def worst_ratio(result: CaseResult, name: str) -> float:
    """The cost of a policy's worst seed over the optimum."""
    return result.ratio(max(run.cost_usd_per_million_samples for run in result[name].runs))
