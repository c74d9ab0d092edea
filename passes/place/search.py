"""Searches without learning: brute force, greedy and genetic.

Enters: a cost model, a seed and a time limit. Leaves: the best placement seen. Refused: brute force over more
placements than it could score in minutes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from heterps_compile.cost_model import CostModel, Ints
from heterps_compile.errors import OptionError
from heterps_compile.passes.place.found import Found
from heterps_compile.provision import provision, score

MAX_BRUTE_FORCE = 20_000_000
BLOCK = 8192
GREEDY_STEPS = 8
"""Points of the sweep over time by which greedy compares types; the plan it ends with is provisioned exactly."""


def brute_force(model: CostModel, seed: int = 0, time_limit_s: float = 600.0) -> Found:
    """Score every placement. Raises :class:`OptionError` when there are more than 20 million."""
    del seed
    size = num_placements(model)
    if size > MAX_BRUTE_FORCE:
        raise OptionError(
            f"policy brute-force would score about 1e{len(str(size)) - 1} placements (allowed: {MAX_BRUTE_FORCE})",
            hint="use policy exact, which gives the same answer",
        )
    deadline = time.monotonic() + time_limit_s
    best, chosen = float("inf"), None
    for block in all_placements(model):
        costs = score(model, block).cost_usd_per_million_samples
        index = int(np.argmin(costs))
        if costs[index] < best:
            best, chosen = float(costs[index]), block[index]
        if time.monotonic() > deadline:
            return Found(chosen=chosen, cost=best, notes=("brute force ran out of time",))
    return Found(chosen=chosen, cost=best, lower_bound=best)


def num_placements(model: CostModel) -> int:
    """How many placements there are, layers that share a table counted once."""
    followers = {index for group in model.bound for index in group[1:]}
    counts = [n for index, n in enumerate(model.allowed.sum(axis=1).tolist()) if index not in followers]
    return math.prod(counts)


def all_placements(model: CostModel) -> Iterator[Ints]:
    """All allowed placements in blocks (N, L), in mixed-radix order."""
    leader = np.arange(model.num_layers)
    for group in model.bound:
        leader[list(group)] = group[0]
    free = np.unique(leader)
    choices = [np.flatnonzero(model.allowed[index]) for index in free]
    radix = np.cumprod([1, *(len(options) for options in choices)])
    for begin in range(0, int(radix[-1]), BLOCK):
        number = np.arange(begin, min(begin + BLOCK, int(radix[-1])))
        digits = [options[number // radix[i] % len(options)] for i, options in enumerate(choices)]
        yield np.stack(digits, axis=1)[:, np.searchsorted(free, leader)]


def greedy(model: CostModel, seed: int = 0, time_limit_s: float = 20.0) -> Found:
    """Layer by layer the type with which the layers so far cost least, never looking back."""
    del seed
    deadline = time.monotonic() + time_limit_s
    chosen = np.zeros(model.num_layers, dtype=np.int64)
    leader = {index: group[0] for group in model.bound for index in group[1:]}
    for position in range(model.num_layers):
        if time.monotonic() > deadline:
            return Found(chosen=None, notes=("greedy ran out of time",))
        if position in leader:
            chosen[position] = chosen[leader[position]]
            continue
        options = np.flatnonzero(model.allowed[position])
        tried = np.repeat(chosen[None, : position + 1], len(options), axis=0)
        tried[:, position] = options
        scores = score(_first_layers(model, position + 1), tried, GREEDY_STEPS)
        chosen[position] = options[np.lexsort((scores.violation, scores.cost_usd_per_million_samples))[0]]
    made = provision(model, chosen)
    return Found(chosen=None) if made is None else Found(chosen=chosen, cost=made.cost_usd_per_million_samples)


def genetic(model: CostModel, seed: int = 0, time_limit_s: float = 20.0) -> Found:
    """Selection by tournament, two-point crossover, mutation of single layers; 64 placements, 80 generations."""
    deadline = time.monotonic() + time_limit_s
    rng = np.random.default_rng(seed)
    population = random_placements(model, 64, rng)
    best, chosen = float("inf"), None
    for _ in range(80):
        scores = score(model, population, steps=4)
        fitness = np.where(
            np.isfinite(scores.cost_usd_per_million_samples), scores.cost_usd_per_million_samples, np.inf
        )
        order = np.lexsort((scores.violation, fitness))
        if fitness[order[0]] < best:
            best, chosen = float(fitness[order[0]]), population[order[0]].copy()
        if time.monotonic() > deadline:
            break
        rank = np.empty(len(order), dtype=np.int64)
        rank[order] = np.arange(len(order))
        population = np.concatenate([population[order[:4]], _children(model, population, rank, 60, rng)])
    made = provision(model, chosen) if chosen is not None else None
    return Found(chosen=None) if made is None else Found(chosen=chosen, cost=made.cost_usd_per_million_samples)


def random_placements(model: CostModel, count: int, rng: np.random.Generator) -> Ints:
    """Half uniformly random, half made of a few long runs; all allowed."""
    noise = rng.random((count, model.num_layers, model.num_types))
    runs = rng.integers(1, 6, size=count)
    for row in range(0, count, 2):
        segment = np.sort(rng.integers(0, runs[row], size=model.num_layers))
        noise[row] = rng.random((runs[row], model.num_types))[segment]
    placements = np.argmax(np.where(model.allowed, noise, -1.0), axis=2)
    return together(model, placements)


def together(model: CostModel, placements: Ints) -> Ints:
    """Layers that share a table follow the first of them."""
    for group in model.bound:
        placements[:, list(group)] = placements[:, [group[0]]]
    return placements


def _children(model: CostModel, population: Ints, rank: Ints, count: int, rng: np.random.Generator) -> Ints:
    rivals = rng.integers(0, len(population), size=(2, count, 3))
    parents = np.take_along_axis(rivals, np.argmin(rank[rivals], axis=2)[..., None], axis=2)[..., 0]
    cuts = np.sort(rng.integers(0, model.num_layers + 1, size=(count, 2)), axis=1)
    position = np.arange(model.num_layers)
    swapped = (position >= cuts[:, :1]) & (position < cuts[:, 1:])
    children = np.where(swapped, population[parents[1]], population[parents[0]])
    mutated = rng.random(children.shape) < 1.5 / model.num_layers
    noise = np.where(model.allowed, rng.random((*children.shape, model.num_types)), -1.0)
    return together(model, np.where(mutated, np.argmax(noise, axis=2), children))


def _first_layers(model: CostModel, count: int) -> CostModel:
    return replace(
        model, layers=model.layers[:count], terms=model.terms[:count], allowed=model.allowed[:count], bound=()
    )
