"""Local improvement of a placement: move a layer, a range of layers or a stage to another type while that helps.

Enters: a cost model and a feasible placement. Leaves: one that no such move makes cheaper. All moves of a round are
scored in one vectorised call. Used by the searching policies; what they find without it is noted by them.
"""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np

from heterps_compile.cost_model import Bools, CostModel, Floats, Ints
from heterps_compile.provision import provision, score

MAX_CELLS = 1_500_000
"""Layers times neighbours scored in one round; ranges get shorter in long graphs to stay below it."""


def improve(
    model: CostModel, placement: Ints, deadline: float, span: int = 1_000_000, steps: int = 64
) -> tuple[Ints, float]:
    """Steepest descent over :func:`neighbours`; returns the placement and its cost (inf if it stays infeasible).

    Ranges are at most ``span`` layers long, whole stages aside.
    """
    current = placement
    made = provision(model, current)
    if made is None:
        cost, violation = _scored(model, current[None], 1)
        best = (float(cost[0]), float(violation[0]))
    else:
        best = (made.cost_usd_per_million_samples, 0.0)
    while time.monotonic() < deadline:
        others = neighbours(model, current, span)
        if not len(others):
            break
        cost, violation = _scored(model, others, steps, best[0])
        index = int(np.lexsort((violation, cost))[0])
        found = (float(cost[index]), float(violation[index]))
        if not (found[0] < best[0] * (1 - 1e-12) or (np.isinf(best[0]) and found[1] < best[1])):
            break
        current, best = others[index], found
    return current, best[0]


def neighbours(model: CostModel, placement: Ints, span: int = 1_000_000) -> Ints:
    """(N, L): every allowed placement that differs in one range of layers (and in what shares a table with it)."""
    length = model.num_layers
    span = max(1, min(span, length, MAX_CELLS // (length * length * model.num_types)))
    ranges = {(i, min(i + n, length)) for i in range(length) for n in range(1, span + 1)}
    cuts = [0, *(np.flatnonzero(np.diff(placement)) + 1).tolist(), length]
    ranges |= set(pairwise(cuts)) | set(zip(cuts, cuts[2:], strict=False))
    begin, end = np.array(sorted(ranges)).T
    position = np.arange(length)
    inside: Bools = (position >= begin[:, None]) & (position < end[:, None])
    for group in model.bound:
        inside[:, list(group)] |= inside[:, list(group)].any(axis=1, keepdims=True)
    kinds = np.arange(model.num_types)[:, None, None]
    moved = np.where(inside & model.allowed.T[:, None, :], kinds, placement).reshape(-1, length)
    moved = moved[(moved != placement).any(axis=1)]
    return _kept_together(model, moved)


def _kept_together(model: CostModel, placements: Ints) -> Ints:
    good = np.ones(len(placements), dtype=bool)
    for group in model.bound:
        good &= (placements[:, list(group)] == placements[:, [group[0]]]).all(axis=1)
    return placements[good]


def _scored(model: CostModel, placements: Ints, steps: int, beat: float = float("inf")) -> tuple[Floats, Floats]:
    scores = [score(model, block, steps, beat) for block in np.array_split(placements, len(placements) // 4096 + 1)]
    return (
        np.concatenate([s.cost_usd_per_million_samples for s in scores]),
        np.concatenate([s.violation for s in scores]),
    )
