"""Which placement is taken: run the policies, compare them, and keep what the others would have cost.

Enters: a cost model and a request. Leaves: a :class:`Decision`. Refused: rules that have no placement here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from heterps_compile.cost_model import CostModel
from heterps_compile.errors import InfeasibleError
from heterps_compile.passes.place import POLICIES, Found, num_placements
from heterps_compile.passes.place.bayesian import INSTALL, available
from heterps_compile.passes.place.rules import RULES, candidates
from heterps_compile.planning.request import Request
from heterps_compile.provision import Provision, provision

CHEAP_POLICIES = ("cpu-only", "gpu-only", "heuristic", "greedy")
MAX_COMPARED_PLACEMENTS = 2_000_000
"""Brute force is left out of a comparison above this."""
SAME = 1e-9
"""Relative difference below which two costs are the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What was decided: the placement taken, its policy, the optimum or its bound, and the alternatives."""

    policy: str
    found: Found
    optimum: float
    proven: bool
    alternatives: Mapping[str, Found]
    notes: tuple[str, ...] = ()


def decide(model: CostModel, request: Request) -> Decision:
    """Run what the request asks for and take the cheapest, or the policy it names. Raises :class:`InfeasibleError`."""
    policy, quick = request.policy, request.quick
    if policy in RULES and not candidates(policy, model):
        raise InfeasibleError(
            f"policy {policy} has no placement: a type it needs is missing, or a layer cannot run there",
            hint=f"the cluster has {', '.join(model.types)}",
        )
    if num_placements(model) == 1:
        return _only_choice(model, policy)
    runs: dict[str, Found] = {"exact": POLICIES["exact"](model, request.seed, request.time_limit_s)}
    names = [name for name in CHEAP_POLICIES if not (quick and name == "greedy")]
    if request.compare:
        small = num_placements(model) <= MAX_COMPARED_PLACEMENTS
        left_out = {"brute-force": not small, "bayesian": not available()}
        names = [name for name in POLICIES if not left_out.get(name)]
    wants_rl = policy is None and not (quick and runs["exact"].lower_bound >= runs["exact"].cost)
    for name in dict.fromkeys([*names, *([policy] if policy else []), *(["rl"] if wants_rl else [])]):
        if name not in runs and np.isfinite(runs["exact"].lower_bound):
            runs[name] = POLICIES[name](model, request.seed, request.time_limit_s)
    least = min(runs.values(), key=lambda found: found.cost)
    proven = runs["exact"].lower_bound >= least.cost * (1 - SAME)
    optimum = least.cost if proven else runs["exact"].lower_bound
    taken, notes = _take(policy, runs, quick, proven)
    if policy is None and taken == "rl" and np.isfinite(runs["rl"].cost):
        taken = _fastest_of_equals(model, runs, taken)
    return Decision(
        policy=taken,
        found=runs.get(taken, runs["exact"]) if np.isfinite(runs["exact"].lower_bound) else runs["exact"],
        optimum=optimum,
        proven=proven,
        alternatives={name: found for name, found in runs.items() if name != taken},
        notes=(*notes, *runs["exact"].notes, *_left_out(request)),
    )


def _fastest_of_equals(model: CostModel, runs: Mapping[str, Found], taken: str) -> str:
    """The policy whose plan is the fastest of those that cost the same: what is rented anyway may as well be used."""
    equals = [name for name, found in runs.items() if found.cost <= runs[taken].cost * (1 + SAME)]
    times = {name: made.slowest_s for name in equals if (made := _provisioned(model, runs[name])) is not None}
    fastest = min(times, key=lambda name: times[name])
    return fastest if times[fastest] < times[taken] * (1 - SAME) else taken


def _provisioned(model: CostModel, found: Found) -> Provision | None:
    return None if found.chosen is None else provision(model, found.chosen)


def _left_out(request: Request) -> tuple[str, ...]:
    if not request.compare or available():
        return ()
    return (f"policy bayesian is left out: {INSTALL}",)


def _only_choice(model: CostModel, policy: str | None) -> Decision:
    chosen = model.allowed.argmax(axis=1)
    made = provision(model, chosen)
    cost = made.cost_usd_per_million_samples if made else float("inf")
    found = Found(chosen=chosen if made else None, cost=cost, lower_bound=cost)
    return Decision(policy=policy or "exact", found=found, optimum=cost, proven=True, alternatives={})


def _take(policy: str | None, runs: Mapping[str, Found], quick: bool, proven: bool) -> tuple[str, tuple[str, ...]]:
    """The name of the policy whose placement is taken, and what there is to say about that."""
    cheapest = min(runs, key=lambda name: runs[name].cost)
    if policy is not None:
        mine = runs.get(policy)
        if mine is None or mine.cost <= runs[cheapest].cost * (1 + SAME) or not np.isfinite(mine.cost):
            return policy, ()
        excess = mine.cost / runs[cheapest].cost - 1
        return policy, (f"{policy} costs {excess:.2%} more than {cheapest}; taken because it was asked for",)
    rl = runs.get("rl")
    if rl is None:
        return "exact", ("exact proved the optimum, so rl was not run",) if quick and proven else ()
    if rl.cost <= runs[cheapest].cost * (1 + SAME):
        return "rl", ()
    if not np.isfinite(rl.cost):
        return cheapest, (f"rl found no placement that reaches the floor; {cheapest} did and is taken",)
    return cheapest, (f"rl costs {rl.cost / runs[cheapest].cost - 1:.2%} more than {cheapest}, which is taken",)
