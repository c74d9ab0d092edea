"""Long chains in full mode, by groups of neighbours: a placement to start from where the exact programme is too large.

Enters: a cost model whose possible stages are too many. Leaves: a placement that keeps each group on one type, the best
of those within the time given. Chains are cut where the speeds of the types change most, as for the learned policies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from heterps_compile.cost_model import CostModel, Ints
from heterps_compile.cost_terms import Boundaries, joined_groups
from heterps_compile.passes.place.found import Found
from heterps_compile.passes.place.groups import neighbour_groups
from heterps_compile.spans import num_spans

FEW_SPANS = 150_000
"""A pass of the exact programme over so many takes about a tenth of a second."""


def coarse_start(model: CostModel, solve: Callable[[CostModel], Found]) -> Ints | None:
    """The placement (L,) that ``solve`` finds for the groups; None where neighbours can run on no type together."""
    groups = neighbour_groups(model, _most_groups(model), strict=True)
    smaller = coarsened(model, groups)
    if not smaller.allowed.any(axis=1).all():
        return None
    found = solve(smaller)
    return None if found.chosen is None else found.chosen[groups]


def coarsened(model: CostModel, groups: Ints) -> CostModel:
    """The same problem with each of ``groups`` (L,), ascending from 0, as one layer."""
    first = np.flatnonzero(np.diff(groups, prepend=-1))
    between = model.between
    names = tuple(model.layers[index] for index in first.tolist())
    return replace(
        model,
        layers=names,
        terms=np.add.reduceat(model.terms, first, axis=0),
        allowed=np.logical_and.reduceat(model.allowed, first, axis=0),
        bound=joined_groups(({names[groups[i]] for i in group} for group in model.bound), names),
        features=None,
        between=between
        and Boundaries(
            cut_bytes=np.append(between.cut_bytes[first], 0.0),
            link_s_per_byte=between.link_s_per_byte,
            latency_s_per_sample=between.latency_s_per_sample,
        ),
    )


def _most_groups(model: CostModel) -> int:
    count = model.num_layers
    while count > 2 and num_spans(count, model.num_types) > FEW_SPANS:
        count -= 1
    return count
