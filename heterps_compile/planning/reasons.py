"""Why each layer is where it is: what the whole plan would cost with that layer alone on another type."""

from __future__ import annotations

import numpy as np

from heterps_compile.cost_model import CostModel, Ints
from heterps_compile.costs import CostTable
from heterps_compile.plans import Reason
from heterps_compile.provision import score

MAX_REASON_CELLS = 20_000_000


def reasons(model: CostModel, chosen: Ints, costs: CostTable) -> tuple[Reason, ...]:
    """What the plan would cost with each layer (and what shares its table) moved alone to each other type."""
    groups = {index: list(group) for group in model.bound for index in group}
    layers = _most_costly(model, chosen)
    moves, owners = [], []
    for position in layers:
        for kind in np.flatnonzero(model.allowed[position]).tolist():
            if kind != chosen[position]:
                moved = chosen.copy()
                moved[groups.get(position, [position])] = kind
                moves.append(moved)
                owners.append((position, kind))
    elsewhere: dict[int, dict[str, float]] = {position: {} for position in layers}
    if moves:
        scores = score(model, np.array(moves), steps=64).cost_usd_per_million_samples
        for (position, kind), cost in zip(owners, scores.tolist(), strict=True):
            if np.isfinite(cost):
                elsewhere[position][model.types[kind]] = cost
    return tuple(
        Reason(
            layer=(name := model.layers[position]),
            source=costs[name][model.types[chosen[position]]].source,
            pinned=bool(model.allowed[position].sum() == 1 and model.num_types > 1),
            bound=position in groups,
            transfer_bound=bool(
                model.terms[position, chosen[position], 2:6].sum() >= model.terms[position, chosen[position], :2].sum()
            ),
            elsewhere=elsewhere[position],
        )
        for position in layers
    )


def _most_costly(model: CostModel, chosen: Ints) -> list[int]:
    """Layers to give reasons for, in order: all of them, or the dearest ones of a chain too long for that."""
    cells = model.num_layers * max(model.num_types - 1, 1)
    count = min(model.num_layers, max(20, MAX_REASON_CELLS // (cells * model.num_types)))
    spent = model.terms[np.arange(model.num_layers), chosen].sum(axis=1) * model.price_usd_per_h[chosen]
    return sorted(np.argsort(-spent, kind="stable")[:count].tolist())
