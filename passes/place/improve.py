"""Local improvement of a placement: move a layer, a range of layers or a stage to another type while that helps.

Enters: a cost model and a feasible placement. Leaves: one that no such move makes cheaper. All moves of a round are
scored in one vectorised call. Chains of more than ``LONG_CHAIN`` layers have too many ranges for that: there stages
grow, shrink, merge and change type, runs of a few lengths are set into them, and the best moves that leave each other
alone are made together. Used by the searching policies; what they find without it is noted by them.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import numpy as np

from heterps_compile.cost_model import Bools, CostModel, Floats, Ints
from heterps_compile.provision import provision, score

MAX_CELLS = 1_500_000
"""Layers times neighbours scored in one round; ranges get shorter in long graphs to stay below it."""
LONG_CHAIN, LONG_ROUNDS, LONG_STEPS, LONG_CELLS = 64, 100, 3, 400_000
RUN_LENGTHS = (1, 2, 4, 8, 16, 32)
PACES = (1.0, 1.1, 0.9)
"""Times per sample at which a long chain's moves are scored, in turn, over that of the placement they change."""
TOGETHER = 24
"""Moves of a round that may be made together."""

Key = tuple[float, float]
"""(cost, violation): what is compared between placements."""


def improve(
    model: CostModel, placement: Ints, deadline: float, span: int = 1_000_000, steps: int = 64
) -> tuple[Ints, float]:
    """Steepest descent; returns the placement and its cost (inf if it stays infeasible).

    Ranges are at most ``span`` layers long, whole stages aside; costs of moves are those of ``steps`` sweep points.
    """
    if model.num_layers > LONG_CHAIN:
        return _improve_long(model, placement, deadline)
    current, best = placement, _key(model, placement)
    while time.monotonic() < deadline:
        others = neighbours(model, current, span)
        if not len(others):
            break
        cost, violation = _scored(model, others, steps, best[0])
        index = int(np.lexsort((violation, cost))[0])
        found = (float(cost[index]), float(violation[index]))
        if not _better(found, best):
            break
        current, best = others[index], found
    return current, best[0]


def _improve_long(model: CostModel, placement: Ints, deadline: float) -> tuple[Ints, float]:
    """The best joint moves of each round, scored at times around the one that the placement is cheapest at."""
    current, best, fruitless = placement, _key(model, placement), 0
    time_s = _cheapest_at_s(model, current)
    for turn in range(LONG_ROUNDS):
        near = replace(model, min_throughput=1 / min(time_s * PACES[turn % len(PACES)], model.slowest_s))
        others = stage_moves(model, current, turn)
        cost, violation = _scored(near, others, LONG_STEPS, best[0])
        joint = joined(current, others[np.lexsort((violation, cost))[: 8 * TOGETHER]])
        cost, violation = _scored(near, joint, LONG_STEPS, best[0])
        index = int(np.lexsort((violation, cost))[0])
        found = (float(cost[index]), float(violation[index]))
        fruitless += 1
        if _better(found, best):
            current, best, fruitless = joint[index], found, 0
            time_s = _cheapest_at_s(model, current)
        if fruitless == len(RUN_LENGTHS) or time.monotonic() > deadline:
            break
    return current, min(best[0], _key(model, current)[0])


def _cheapest_at_s(model: CostModel, placement: Ints) -> float:
    made = provision(model, placement)
    return model.slowest_s if made is None else made.slowest_s


def _key(model: CostModel, placement: Ints) -> Key:
    made = provision(model, placement)
    if made is not None:
        return made.cost_usd_per_million_samples, 0.0
    cost, violation = _scored(model, placement[None], 1)
    return float(cost[0]), float(violation[0])


def _better(found: Key, best: Key) -> bool:
    return found[0] < best[0] * (1 - 1e-12) or (np.isinf(best[0]) and found[1] < best[1])


def stage_moves(model: CostModel, placement: Ints, turn: int) -> Ints:
    """(N, L): stages grown into their neighbours, changed as a whole or in pairs, and runs of one length set in.

    The length and where the runs begin depend on ``turn``, and in a very long chain also which moves are left out.
    """
    length = model.num_layers
    cuts = np.array([0, *(np.flatnonzero(np.diff(placement)) + 1).tolist(), length])
    run = RUN_LENGTHS[turn % len(RUN_LENGTHS)]
    begins = np.arange(turn % run, length, max(run, length // 128))
    moves = [(begin, min(begin + run, length), t) for begin in begins.tolist() for t in range(model.num_types)]
    for left, right in (*pairwise(cuts.tolist()), *zip(cuts.tolist(), cuts[2:].tolist(), strict=False)):
        moves += [(left, right, t) for t in range(model.num_types)]
    for cut in cuts[1:-1].tolist():
        for size in RUN_LENGTHS:
            moves.append((max(cut - size, 0), cut, int(placement[cut])))
            moves.append((cut, min(cut + size, length), int(placement[cut - 1])))
    skip = len(moves) * length // LONG_CELLS + 1
    begin, end, types = np.array(moves[turn % skip :: skip]).T
    position = np.arange(length)
    inside = _with_bound(model, (position >= begin[:, None]) & (position < end[:, None]))
    moved = np.where(inside & model.allowed.T[types], types[:, None], placement)
    return _kept_together(model, moved[(moved != placement).any(axis=1)])


def joined(placement: Ints, moved: Ints) -> Ints:
    """(K, L): the first move, the first two that touch different layers, the first three, ..."""
    taken, current = np.zeros(len(placement), dtype=bool), placement.copy()
    together = []
    for row in moved:
        changed = row != placement
        near = changed.copy()
        near[1:] |= changed[:-1]
        near[:-1] |= changed[1:]
        if not (near & taken).any():
            taken |= changed
            current = np.where(changed, row, current)
            together.append(current)
        if len(together) == TOGETHER:
            break
    return np.array(together)


def neighbours(model: CostModel, placement: Ints, span: int = 1_000_000) -> Ints:
    """(N, L): every allowed placement that differs in one range of layers (and in what shares a table with it)."""
    length = model.num_layers
    span = max(1, min(span, length, MAX_CELLS // (length * length * model.num_types)))
    ranges = {(i, min(i + n, length)) for i in range(length) for n in range(1, span + 1)}
    cuts = [0, *(np.flatnonzero(np.diff(placement)) + 1).tolist(), length]
    ranges |= set(pairwise(cuts)) | set(zip(cuts, cuts[2:], strict=False))
    begin, end = np.array(sorted(ranges)).T
    position = np.arange(length)
    inside = _with_bound(model, (position >= begin[:, None]) & (position < end[:, None]))
    types = np.arange(model.num_types)[:, None, None]
    moved = np.where(inside & model.allowed.T[:, None, :], types, placement).reshape(-1, length)
    moved = moved[(moved != placement).any(axis=1)]
    return _kept_together(model, moved)


def _with_bound(model: CostModel, inside: Bools) -> Bools:
    """What shares a table with a layer that moves, moves too."""
    for group in model.bound:
        inside[:, list(group)] |= inside[:, list(group)].any(axis=1, keepdims=True)
    return inside


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
