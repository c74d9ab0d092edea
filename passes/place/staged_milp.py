"""Full mode's stages within the limits as a mixed-integer programme, one for each number of stages (see ``milp.py``).

Enters: a cost model and a time per sample of the pipeline. Leaves: the cheapest stages within the limits, or a proven
bound; None without scipy or when the programme is too large. Variables x[span]: a stage with what is before and after.

    minimise    sum price units x        subject to   states are left as often as they are entered, from first to last
                                                      sum units x <= limit of each type,  sum x = number of stages
"""

from __future__ import annotations

import importlib.util
import time

import numpy as np

from heterps_compile.cost_model import CostModel, Floats, Ints, fewest_units
from heterps_compile.passes.place import dynamic
from heterps_compile.passes.place.milp import MAX_VARIABLES, Solved
from heterps_compile.passes.place.staged import least_through

PATIENCE_S = 5.0
"""For one programme: the search then looks at other times per sample, which may be easier."""


def milp_staged(
    model: CostModel, prefix: Floats, time_s: float, below: float, multipliers: Floats, deadline: float
) -> Solved | None:
    """Solve for one number of stages after the other, while one more could still cost less than ``below`` USD/h.

    ``multipliers`` (T,) of the limits rule out stages that nothing cheap enough contains.
    """
    if not model.few_spans or importlib.util.find_spec("scipy") is None:
        return None
    chosen, price, bound = None, below, np.inf
    weight = model.price_usd_per_h + multipliers
    relief = model.relief(multipliers)
    for num_stages in range(1, model.num_layers + 1):
        stage_limit_s = time_s / float(model.stretch(num_stages))
        rest = dynamic.cheapest(model, prefix, stage_limit_s, weight, None).value - relief
        if rest >= price:
            break
        if time.monotonic() > deadline:
            bound = min(bound, rest)
            break
        found = _exactly(model, num_stages, stage_limit_s, (weight, price + relief), deadline)
        bound = min(bound, max(rest, found.price if found.optimal else found.bound))
        if found.chosen is not None and found.price < price:
            chosen, price = found.chosen, found.price
    return Solved(chosen, price if chosen is not None else np.inf, min(bound, price))


def _exactly(
    model: CostModel, num_stages: int, stage_limit_s: float, worth: tuple[Floats, float], deadline: float
) -> Solved:
    """The programme for ``num_stages``; ``worth`` is a weight per unit and the weighted sum that is too much."""
    spans = model.spans
    units = fewest_units(spans.terms, stage_limit_s)
    units = np.where(units <= model.limit[spans.types], units, np.inf)
    kept = np.flatnonzero(least_through(spans, worth[0][spans.types] * units, num_stages) < worth[1])
    if not len(kept):
        return Solved(None, np.inf, np.inf, infeasible=True)
    if len(kept) > MAX_VARIABLES:
        return Solved(None, np.inf, 0.0)
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array, vstack

    amount, types, each = units[kept], spans.types[kept], np.arange(len(kept))
    ones = np.ones(len(kept))
    states, number = np.unique(np.concatenate([spans.enter[kept], spans.leave[kept]]), return_inverse=True)
    flow = coo_array((np.concatenate([ones, -ones]), (number, np.tile(each, 2))), shape=(len(states), len(kept)))
    within = coo_array((amount, (types, each)), shape=(model.num_types, len(kept)))
    count = coo_array((ones, (np.zeros(len(kept), np.int64), each)), shape=(1, len(kept)))
    lower, upper = np.zeros(len(states)), np.zeros(len(states))
    upper[np.isin(states, spans.starts)] = 1
    lower[np.isin(states, spans.ends)] = -1
    answer = milp(
        model.price_usd_per_h[types] * amount,
        integrality=ones,
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(
            vstack([flow, within, count]).tocsr(),
            np.concatenate([lower, np.zeros(model.num_types), [num_stages]]),
            np.concatenate([upper, model.limit, [num_stages]]),
        ),
        options={"time_limit": min(max(deadline - time.monotonic(), 0.5), PATIENCE_S), "mip_rel_gap": 0.0},
    )
    if answer.status == 2:
        return Solved(None, np.inf, np.inf, infeasible=True)
    bound = float(answer.mip_dual_bound) if answer.mip_dual_bound is not None else 0.0
    if answer.x is None:
        return Solved(None, np.inf, bound)
    picked = np.flatnonzero(answer.x > 0.5)
    if (np.bincount(types[picked], amount[picked], model.num_types) > model.limit).any():
        return Solved(None, np.inf, bound)  # within the solver's tolerance, not within ours
    price = float(model.price_usd_per_h[types[picked]] @ amount[picked])
    return Solved(_placement(model.num_layers, kept[picked], model), price, bound, optimal=answer.status == 0)


def _placement(length: int, picked: Ints, model: CostModel) -> Ints:
    chosen = np.zeros(length, dtype=np.int64)
    for span in picked.tolist():
        chosen[model.spans.begin[span] : model.spans.end[span]] = model.spans.types[span]
    return chosen
