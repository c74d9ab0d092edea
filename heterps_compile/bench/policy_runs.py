"""Run placement policies on a problem and keep what each found, what it cost and how long it took.

Enters: cases. Leaves: frozen results with the proven optimum (or bound) beside them. Times are CPU seconds of this
process, which on a shared machine say more than wall-clock seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from heterps_compile.bench.paper_cases import Case
from heterps_compile.bench.rl_plain import rl_plain
from heterps_compile.cost_model import CostModel
from heterps_compile.passes.place import POLICIES, num_placements

ORDER = (
    "rl", "rl-rnn", "rl-plain", "exact", "brute-force", "greedy", "genetic", "bayesian", "cpu-only", "gpu-only",
    "heuristic",
)  # fmt: skip
ALL = {**POLICIES, "rl-plain": rl_plain}
SEEDED = ("rl", "rl-rnn", "rl-plain", "genetic", "bayesian")
"""Policies that draw random numbers: run once per seed."""
MAX_BRUTE_FORCE = 2_000_000
"""Brute force is left out above this many placements."""
TIME_LIMIT_S = 300.0
"""Wall-clock seconds after which a policy stops; so many that a busy machine changes no result."""
PROVEN = 1e-9
NEEDS = {"bayesian": "sklearn"}
"""Policies that need an optional package; without it they are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One policy with one seed; the cost is infinite where it found nothing that reaches the floor."""

    seed: int
    cost_usd_per_million_samples: float
    cpu_s: float
    placement: tuple[str, ...] = ()
    lower_bound_usd_per_million_samples: float = 0.0

    @property
    def feasible(self) -> bool:
        """Whether there is a placement."""
        return bool(self.placement)


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyResult:
    """All runs of one policy on one case."""

    policy: str
    runs: tuple[Run, ...]

    @property
    def costs(self) -> tuple[float, ...]:
        """USD per million samples of the runs that found something."""
        return tuple(run.cost_usd_per_million_samples for run in self.runs if run.feasible)

    @property
    def mean_cost(self) -> float:
        """Mean over those runs; infinite where there is none."""
        return statistics.fmean(self.costs) if self.costs else float("inf")

    @property
    def mean_cpu_s(self) -> float:
        """Mean over all runs."""
        return statistics.fmean(run.cpu_s for run in self.runs)

    @property
    def best(self) -> Run:
        """The cheapest run."""
        return min(self.runs, key=lambda run: run.cost_usd_per_million_samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """What every policy made of one case."""

    case: Case
    policies: tuple[PolicyResult, ...]

    def __getitem__(self, policy: str) -> PolicyResult:
        return next(result for result in self.policies if result.policy == policy)

    def __contains__(self, policy: object) -> bool:
        return any(result.policy == policy for result in self.policies)

    @property
    def cheapest(self) -> float:
        """The least cost any policy found."""
        return min(result.best.cost_usd_per_million_samples for result in self.policies)

    @property
    def bound(self) -> float:
        """The largest proven lower bound, never above the least cost found."""
        bounds = [run.lower_bound_usd_per_million_samples for result in self.policies for run in result.runs]
        return min(self.cheapest, max(bounds))

    @property
    def proven(self) -> bool:
        """Whether the least cost found is the optimum."""
        return self.bound >= self.cheapest * (1 - PROVEN)

    def ratio(self, cost: float) -> float:
        """A cost over the optimum, or over the bound where no optimum is proven."""
        return cost / self.bound if self.bound else float("inf")


def policies_for(problem: CostModel) -> tuple[str, ...]:
    """The policies that exist, have what they need, and can run on a problem of this size."""
    there = (name for name in ORDER if name in ALL and (name not in NEEDS or find_spec(NEEDS[name])))
    small = num_placements(problem) <= MAX_BRUTE_FORCE
    return tuple(name for name in there if small or name != "brute-force")


def run_case(case: Case, num_seeds: int, policies: Sequence[str] | None = None) -> Iterator[PolicyResult]:
    """One policy after the other, those that draw random numbers with seeds 0 to ``num_seeds - 1``."""
    for policy in policies or policies_for(case.problem):
        seeds = range(num_seeds if policy in SEEDED else 1)
        yield PolicyResult(policy=policy, runs=tuple(run_policy(case.problem, policy, seed) for seed in seeds))


def run_policy(problem: CostModel, policy: str, seed: int) -> Run:
    """Run and time one policy."""
    started = time.process_time()
    found = ALL[policy](problem, seed, TIME_LIMIT_S)
    cpu_s = time.process_time() - started
    feasible = found.chosen is not None and bool(np.isfinite(found.cost))
    return Run(
        seed=seed,
        cost_usd_per_million_samples=found.cost if feasible else float("inf"),
        cpu_s=cpu_s,
        placement=tuple(problem.named(found.chosen).values()) if feasible and found.chosen is not None else (),
        lower_bound_usd_per_million_samples=found.lower_bound if np.isfinite(found.lower_bound) else 0.0,
    )
