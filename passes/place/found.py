"""What every placement policy is: a function of the cost model, a seed and a time limit, to a :class:`Found`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from heterps_compile.cost_model import CostModel, Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A placement as type indices (L,), or None when the policy has none that reaches the floor.

    ``lower_bound`` (USD per million samples) is proven for every placement, 0 when the policy proves nothing, inf when
    it proves that no placement reaches the floor. ``points`` counts the runs of the dynamic programme.
    """

    chosen: Ints | None
    cost: float = float("inf")
    lower_bound: float = 0.0
    notes: tuple[str, ...] = ()
    points: int = 0


PolicyFunction = Callable[[CostModel, int, float], Found]
