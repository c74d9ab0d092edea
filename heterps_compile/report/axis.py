"""One axis of a picture: where a value stands between the ends, and which round values are marked.

Enters: positive values. Leaves: positions from 0 to 1 and ticks, the same for the text chart and the SVG file. The
scale is logarithmic where the values span a factor of three or more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

LOG_FROM = 3.0
MARGIN = 0.04
"""Part of the axis left empty beyond the least and the greatest value."""
ROUND = (1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """From ``low`` to ``high``, both positive."""

    low: float
    high: float
    log: bool

    @classmethod
    def of(cls, values: Iterable[float]) -> Axis:
        """An axis that holds every value with a margin."""
        kept = [value for value in values if value > 0] or [1.0]
        low, high = min(kept), max(kept)
        if high / low >= LOG_FROM:
            room = (high / low) ** MARGIN
            return cls(low=low / room, high=high * room, log=True)
        half = max((high - low) * MARGIN, high * 0.02)
        return cls(low=low - half, high=high + half, log=False)

    def position(self, value: float) -> float:
        """0 at ``low``, 1 at ``high``; values beyond are put on the end."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 6) -> tuple[float, ...]:
        """At most ``most`` round values within the axis, at least one."""
        found = self._log_ticks(most) if self.log else ()
        return found if len(found) > 2 else self._linear_ticks(most)

    def _log_ticks(self, most: int) -> tuple[float, ...]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            found = tuple(d * 10.0**e for e in decades for d in digits if self.low <= d * 10.0**e <= self.high)
            if len(found) <= most:
                return found
        return found[:: -(-len(found) // most)]

    def _linear_ticks(self, most: int) -> tuple[float, ...]:
        rough = (self.high - self.low) / most
        magnitude = 10.0 ** math.floor(math.log10(rough))
        step = next(digit * magnitude for digit in ROUND if digit * magnitude >= rough * (1 - 1e-12))
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return tuple(index * step for index in range(first, last + 1))
