"""The exact search: best first over intervals of time per sample, each with a proven bound.

Enters: a cost model and the best placement known. Leaves: a proven lower bound, and a better placement if there is one.
The least price per hour of stages that are at most ``t`` slow, times ``s``, is a lower bound on every plan whose time
per sample is between ``s`` and ``t``, as a faster plan needs no fewer units. So the interval with the lowest bound is
cut in two again and again: the price at the cut, found by the dynamic programme, raises the bound of the part below,
and that of the part above follows from the cut itself. An interval whose bound is not below the best cost known is
done. Below the shortest time tried, fractional units bound the cost: they cost the more, the shorter the time.

    time     0 ........ low ======== cut ======== high          price(high) <= price(cut) <= price(low)
    bound      fractional    low * price(cut)   cut * price(high)

The cost of a plan is at least time times price, in any mode of the cost model. If time runs out, the least bound is
what is proven. A long search is content with ``ENOUGH_GAP``.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field, replace

import numpy as np

from heterps_compile.cost_model import CostModel, Floats, cost_usd_per_million_samples, time_worth_s
from heterps_compile.passes.place.incumbent import Incumbent, provision_at
from heterps_compile.passes.place.limits import Limited, Wanted, cheapest_within_limits
from heterps_compile.passes.place.staged import cheapest
from heterps_compile.provision import EQUAL, STEP

PATIENT_WORK = 1_500_000
"""Layers times types times runs of the dynamic programme after which ``ENOUGH_GAP`` is enough."""
ENOUGH_GAP = 0.005
NARROW = 1.02
"""Ratio of an interval's ends below which limits are met exactly, at any price; above, multipliers must do."""
TIGHTEST = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class Interval:
    """Times in (low_s, high_s], in seconds per sample; ``price`` USD/h is the least of any plan at most that slow.

    ``stuck`` says that more cannot be proven about the price at ``high_s``.
    """

    low_s: float
    high_s: float
    price: float
    multipliers: Floats
    stuck: bool = False

    @property
    def narrow(self) -> bool:
        """Whether to look at the high end, where prices jump, and no longer at the middle."""
        return self.high_s <= self.low_s * NARROW

    @property
    def cut_s(self) -> float:
        """Where to look next."""
        if self.narrow and not self.stuck:
            return self.high_s
        return (self.low_s * self.high_s) ** 0.5 if self.low_s else self.high_s / 2


@dataclass(slots=True)
class IntervalSearch:
    """The intervals that are not done, lowest bound first."""

    model: CostModel
    known: Incumbent
    deadline: float
    prefix: Floats = field(init=False)
    heap: list[tuple[float, int, Interval]] = field(default_factory=list)
    pushed: int = 0

    def __post_init__(self) -> None:
        self.prefix = self.model.prefix

    def run(self, bound: float = 0.0) -> float:
        """A bound on every placement (inf: none reaches the floor), not below ``bound``."""
        start = Interval(0.0, self.model.slowest_s, 0.0, np.zeros(self.model.num_types))
        self._cut(start, start.high_s, bound)
        while self.heap:
            bound, _, interval = heapq.heappop(self.heap)
            if self.known.enough or bound >= self.known.cost * (1 - self._slack()):
                return min(bound, self.known.cost)
            if time.monotonic() > self.deadline:
                self.known.notes.add("the time limit ended the search before the optimum was proven")
                return bound
            if interval.high_s <= interval.low_s * TIGHTEST:
                self.known.notes.add("limits couple the stages too much for a proof in the time given")
                return bound
            self._cut(interval, interval.cut_s, bound)
        return self.known.cost

    def _slack(self) -> float:
        spent = self.known.points * self.model.num_layers * self.model.num_types
        return ENOUGH_GAP if spent > PATIENT_WORK else 1 - EQUAL

    def _cut(self, interval: Interval, cut_s: float, bound: float) -> None:
        """Replace an interval by its parts above and below ``cut_s``."""
        limited = self._limited(interval, cut_s)
        below_s = cut_s
        for chosen in limited.fitting:
            self.known.offer_at(self.model, chosen, cut_s)
        if limited.exact and limited.chosen is not None:
            here = provision_at(self.model, limited.chosen, cut_s)
            assert here is not None, "a placement within the limits does not fit them"
            below_s = here[0]
        self._push(replace(interval, low_s=cut_s), bound)
        if np.isfinite(limited.bound):
            price = max(limited.bound, interval.price)
            stuck = interval.narrow and not limited.exact
            below = Interval(interval.low_s, below_s * STEP, price, limited.multipliers, stuck)
            self._push(below, bound if below.low_s else max(bound, self._rest(limited.multipliers, cut_s)))

    def _limited(self, interval: Interval, cut_s: float) -> Limited:
        low_s = interval.low_s or cut_s / 2
        wanted = Wanted(
            price=float(time_worth_s(self.known.cost, self.model.paid_s(low_s))),
            thorough=interval.price == 0 or interval.narrow,
            multipliers=interval.multipliers,
            deadline=self.deadline,
        )
        limited = cheapest_within_limits(self.model, self.prefix, cut_s, wanted)
        self.known.points += limited.rounds
        return limited

    def _push(self, interval: Interval, bound: float) -> None:
        """Keep what of an interval can still hold something cheaper."""
        high_s, stuck = interval.high_s, interval.stuck
        if interval.price > 0:
            high_s = min(high_s, float(time_worth_s(self.known.cost, interval.price)))  # cost / price is a time
            stuck &= high_s == interval.high_s
        bound = max(bound, float(cost_usd_per_million_samples(interval.price, self.model.paid_s(interval.low_s))))
        if interval.low_s < high_s and bound < self.known.cost * EQUAL:
            heapq.heappush(self.heap, (bound, self.pushed, replace(interval, high_s=high_s, stuck=stuck)))
            self.pushed += 1

    def _rest(self, multipliers: Floats, time_s: float) -> float:
        """Bound on the cost at ``time_s`` and every shorter time: fractional units only grow as the time shrinks.

        ``(price + multipliers) . units - multipliers . limit`` is at most ``price . units`` wherever the limits hold.
        """
        weight = self.model.price_usd_per_h + multipliers
        relief = self.model.relief(multipliers)
        fractional = cheapest(self.model, self.prefix, time_s, weight, weight).fractional
        return float(cost_usd_per_million_samples(fractional - relief, self.model.paid_s(time_s)))
