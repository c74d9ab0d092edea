"""place: cost table -> placement, by one of the policies of HeterPS and of those it is compared with.

Enters: a cost table, a cluster, a throughput floor and pins. Leaves: a :class:`Placement`. Refused: unknown policies,
pins that match nothing, floors that no placement of the policy reaches (:class:`InfeasibleError`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from heterps_compile.cluster import Cluster
from heterps_compile.cost_model import CostModel
from heterps_compile.costs import CostTable
from heterps_compile.errors import InfeasibleError, OptionError
from heterps_compile.passes.place.bayesian import bayesian
from heterps_compile.passes.place.exact import exact
from heterps_compile.passes.place.found import Found, PolicyFunction
from heterps_compile.passes.place.reach import fastest
from heterps_compile.passes.place.rl import rl, rl_rnn
from heterps_compile.passes.place.rules import cpu_only, gpu_only, heuristic
from heterps_compile.passes.place.search import brute_force, genetic, greedy, num_placements
from heterps_compile.plans import Placement

__all__ = ["POLICIES", "Found", "Place", "PolicyFunction", "fastest", "num_placements", "policy_named"]

POLICIES: Mapping[str, PolicyFunction] = {
    "rl": rl,
    "rl-rnn": rl_rnn,
    "exact": exact,
    "brute-force": brute_force,
    "greedy": greedy,
    "genetic": genetic,
    "bayesian": bayesian,
    "cpu-only": cpu_only,
    "gpu-only": gpu_only,
    "heuristic": heuristic,
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """The pass; its fields are its options.

    ``time_limit_s`` stops the policies that search; equal inputs and seed give an equal placement as long as it is not
    reached.
    """

    policy: str = "rl"
    seed: int = 0
    time_limit_s: float = 60.0

    def __call__(
        self,
        costs: CostTable,
        cluster: Cluster | None = None,
        min_throughput: float | None = None,
        pin: Mapping[str, str] | None = None,
    ) -> Placement:
        """Place every layer. Raises :class:`InfeasibleError` when this policy finds nothing that reaches the floor."""
        model = CostModel.of(costs, cluster, min_throughput, pin)
        found = policy_named(self.policy)(model, self.seed, self.time_limit_s)
        if found.chosen is None:
            raise InfeasibleError(
                f"policy {self.policy} finds no placement that reaches {min_throughput} samples/s within the limits",
                hint="policy exact says what is reachable and what binds",
            )
        return Placement.of(
            model.named(found.chosen),
            policy=self.policy,
            lower_bound_usd_per_million_samples=found.lower_bound,
            notes=found.notes,
        )


def policy_named(name: str) -> PolicyFunction:
    """The policy function. Raises :class:`OptionError` naming the close ones."""
    if name not in POLICIES:
        close = difflib.get_close_matches(name, POLICIES, n=2)
        raise OptionError(
            f"policy is {name!r} (allowed: {', '.join(POLICIES)})",
            hint=f"did you mean {' or '.join(close)}?" if close else "",
        )
    return POLICIES[name]
