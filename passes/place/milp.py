"""The stages at a fixed time per sample as a mixed-integer programme (HiGHS through scipy, which is optional).

Enters: the units of every possible stage. Leaves: the cheapest stages within the limits, or a proven bound; None
without scipy or when the programme is too large. Variables x[i, j, t]: the layers from cut i to cut j are one stage of
type t.

    minimise    sum price_t units[i,j,t] x[i,j,t]
    subject to  every cut is left as often as it is entered: a path from 0 to L
                sum units[i,j,t] x[i,j,t] <= limit_t
                at no cut does a stage of t end and another of t begin
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass

import numpy as np

from heterps_compile.cost_model import CostModel, Floats, Ints

MAX_VARIABLES = 40_000


@dataclass(frozen=True, slots=True)
class Solved:
    """``price`` USD/h of ``chosen``; ``bound`` is proven; ``infeasible`` says that no stages fit."""

    chosen: Ints | None
    price: float
    bound: float
    infeasible: bool = False
    optimal: bool = False


def milp_within_limits(model: CostModel, units: Floats, deadline: float) -> Solved | None:
    """Solve with the time left until ``deadline``."""
    begin, end, type_index = np.nonzero(np.isfinite(units))
    if not 0 < len(begin) <= MAX_VARIABLES or importlib.util.find_spec("scipy") is None:
        return None
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array, vstack

    count, cuts, types = len(begin), model.num_layers + 1, model.num_types
    amount = units[begin, end, type_index]
    each = np.arange(count)
    ones = np.ones(count)
    flow = coo_array(
        (np.concatenate([ones, -ones]), (np.concatenate([begin, end]), np.tile(each, 2))), shape=(cuts, count)
    )
    touching = coo_array(
        (np.ones(2 * count), (np.concatenate([begin, end]) * types + np.tile(type_index, 2), np.tile(each, 2))),
        shape=(cuts * types, count),
    )
    within = coo_array((amount, (type_index, each)), shape=(types, count))
    through = np.zeros(cuts)
    through[0], through[-1] = 1, -1
    lower = np.concatenate([through, np.zeros(cuts * types), np.zeros(types)])
    upper = np.concatenate([through, np.ones(cuts * types), model.limit])
    left = max(deadline - time.monotonic(), 0.5)
    answer = milp(
        model.price_usd_per_h[type_index] * amount,
        integrality=np.ones(count),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(vstack([flow, touching, within]).tocsr(), lower, upper),
        options={"time_limit": left, "mip_rel_gap": 0.0},
    )
    if answer.status == 2:
        return Solved(None, float("inf"), float("inf"), infeasible=True)
    bound = float(answer.mip_dual_bound) if answer.mip_dual_bound is not None else 0.0
    if answer.x is None:
        return Solved(None, float("inf"), bound)
    chosen = np.zeros(model.num_layers, dtype=np.int64)
    for index in np.flatnonzero(answer.x > 0.5).tolist():
        chosen[begin[index] : end[index]] = type_index[index]
    picked = answer.x > 0.5
    if (np.bincount(type_index[picked], amount[picked], types) > model.limit).any():
        return Solved(None, float("inf"), bound)  # within the solver's tolerance, not within ours
    price = float(model.price_usd_per_h[type_index[picked]] @ amount[picked])
    return Solved(chosen, price, bound, optimal=answer.status == 0)
