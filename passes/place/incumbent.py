"""The best placement an exact search knows, and what a placement costs at a time per sample.

Enters: placements. Leaves: the cheapest of them, with its cost over all times.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from heterps_compile.cost_model import CostModel, Floats, Ints
from heterps_compile.provision import EQUAL, Stages, provision

NEAR = 1.02
"""A placement whose cost at one time is within this factor of the best is provisioned over all times."""


@dataclass(slots=True)
class Incumbent:
    """The best placement so far, shared by all branches."""

    chosen: Ints | None = None
    cost: float = float("inf")
    first: bool = False
    notes: set[str] = field(default_factory=set)
    seen: set[bytes] = field(default_factory=set)
    points: int = 0
    """Runs of the dynamic programme so far, over all branches."""

    @property
    def enough(self) -> bool:
        """Whether any placement was asked for and one is there."""
        return self.first and self.chosen is not None

    def offer(self, model: CostModel, chosen: Ints) -> None:
        """Provision ``chosen`` exactly and keep it if it is cheaper."""
        if self.first:
            self.offer_at(model, chosen, model.slowest_s)
            return
        made = provision(model, chosen)
        if made is not None and made.cost_usd_per_million_samples < self.cost * EQUAL:
            self.chosen, self.cost = chosen, made.cost_usd_per_million_samples

    def offer_at(self, model: CostModel, chosen: Ints, time_s: float) -> None:
        """Look at ``chosen`` where it is at most ``time_s`` slow; elsewhere only if it promises to be cheaper there."""
        if not self._together(model, chosen):
            return
        here = provision_at(model, chosen, time_s)
        if here is None:
            return
        cost = float(model.bill(usage_at(model, chosen, time_s), here[0]))
        if self.first:  # at the floor is enough; without limits, ever larger fleets may cost ever so little less
            if self.chosen is None:
                self.chosen, self.cost = chosen, cost
            return
        if cost < self.cost * EQUAL:
            self.chosen, self.cost = chosen, cost
        key = chosen.tobytes()
        if cost < self.cost * NEAR and key not in self.seen:
            self.seen.add(key)
            self.offer(model, chosen)

    def _together(self, model: CostModel, chosen: Ints) -> bool:
        return all(len(set(chosen[list(group)].tolist())) == 1 for group in model.bound)


def provision_at(model: CostModel, chosen: Ints, time_s: float) -> tuple[float, float] | None:
    """(realised time, price per hour) of the fewest units that make ``chosen`` at most ``time_s`` slow, if they fit."""
    stages = Stages.of(model, chosen[None])
    units = stages.fewest(time_s)
    if not np.isfinite(units).all() or (np.bincount(stages.kind, units, model.num_types) > model.limit).any():
        return None
    return float(stages.pipeline_s(units)[0]), float(model.price_usd_per_h[stages.kind] @ units)


def usage_at(model: CostModel, chosen: Ints, time_s: float) -> Floats:
    """Whole units of each type that ``chosen`` needs to be at most ``time_s`` slow."""
    stages = Stages.of(model, chosen[None])
    usage: Floats = np.bincount(stages.kind, stages.fewest(time_s), model.num_types).astype(float)
    return usage
