"""Bayesian optimisation: a Gaussian process over the placements scored so far says which to score next.

Enters: a cost model, a seed and a time limit. Leaves: the best placement seen. Refused: to run without scikit-learn
(:class:`~heterps_compile.errors.MissingPackageError`). HeterPS (arXiv 2111.10635) compares with this method without
naming its surrogate; here it is the textbook one, expected improvement (Jones et al. 1998), on ranks: costs and misses
of the floor differ by orders of magnitude, so the process sees normal scores of their ranks (Salinas et al. 2020).

A placement is seen as one bit per layer and type and one per boundary between stages: the kernel of the distance then
decays with the number of layers and boundaries that differ. Each round fits once and asks for a batch of points, which
one call scores, so that no loop runs over placements.

The process is scikit-learn's, which is kept and which the tests need anyway. Tried beside it on 20 layers of 3 types:
optuna 5.0 (TPE) takes 8 s for 640 points, where this takes 1 s for 544, and brings SQLAlchemy along. scikit-optimize is
no longer maintained.
"""

from __future__ import annotations

import importlib.util
import math
import time
import warnings
from typing import Any

import numpy as np

from heterps_compile.cost_model import CostModel, Floats, Ints
from heterps_compile.errors import MissingPackageError
from heterps_compile.passes.place.found import Found
from heterps_compile.passes.place.search import num_placements, random_placements, together
from heterps_compile.provision import provision, score

INSTALL = "pip install 'heterps-compile[bayesian]'"
FIRST = 64
"""Placements scored before the first fit."""
ROUNDS = 20
BATCH = 24
CANDIDATES = 1024
"""Placements whose expected improvement is looked at in a round; the best of them are scored."""
PARENTS = 8
"""The best placements so far, whose neighbours are candidates."""
FITTED_ROUNDS = (0, 5)
"""Rounds that also fit the kernel's scale, which takes as long as ten others."""
SCORED_STEPS = 4
"""Steps of the provisioning sweep while searching: it is exact only for the last."""
FINALISTS = 64
BEYOND = 1e30
"""More than any placement costs."""


def available() -> bool:
    """Whether scikit-learn is installed."""
    return importlib.util.find_spec("sklearn") is not None


def bayesian(model: CostModel, seed: int = 0, time_limit_s: float = 20.0) -> Found:
    """544 placements in batches, each where the process expects the most improvement.

    Raises :class:`MissingPackageError` without scikit-learn.
    """
    if not available():
        raise MissingPackageError("policy bayesian needs scikit-learn, which is not installed", hint=INSTALL)
    deadline = time.monotonic() + time_limit_s
    rng = np.random.default_rng(seed)
    tried = _unseen(random_placements(model, FIRST, rng), np.empty((0, model.num_layers), dtype=np.int64))
    losses, surrogate = loss(model, tried), None
    for turn in range(ROUNDS):
        if time.monotonic() > deadline or len(tried) == num_placements(model):
            break
        heights = normal_scores(losses)
        surrogate = _fitted(features(model, tried), heights, None if turn in FITTED_ROUNDS else surrogate)
        fresh = _unseen(_candidates(model, tried[np.argsort(heights, kind="stable")[:PARENTS]], rng), tried)
        if not len(fresh):
            continue
        mean, deviation = surrogate.predict(features(model, fresh), return_std=True)
        gain = expected_improvement(mean, deviation, float(heights.min()))
        batch = fresh[np.argsort(-gain, kind="stable")[:BATCH]]
        tried, losses = np.concatenate([tried, batch]), np.concatenate([losses, loss(model, batch)])
    last = tried[np.argsort(losses, kind="stable")[:FINALISTS]]
    chosen = last[int(np.argmin(score(model, last).cost_usd_per_million_samples))]
    made = provision(model, chosen)
    return Found(chosen=None) if made is None else Found(chosen=chosen, cost=made.cost_usd_per_million_samples)


def loss(model: CostModel, placements: Ints) -> Floats:
    """(N,) the cost where the floor is reached; elsewhere more than any cost, rising with what is missing."""
    scores = score(model, placements, steps=SCORED_STEPS)
    cost = scores.cost_usd_per_million_samples
    return np.where(np.isfinite(cost), cost, BEYOND * (1 + scores.violation))


def normal_scores(losses: Floats) -> Floats:
    """(N,) the quantiles of the normal distribution at the ranks of ``losses``: same order, no outliers."""
    from scipy.special import ndtri  # scikit-learn needs scipy

    rank = np.empty(len(losses))
    rank[np.argsort(losses, kind="stable")] = np.arange(len(losses))
    heights: Floats = ndtri((rank + 0.5) / len(losses))
    return heights


def features(model: CostModel, placements: Ints) -> Floats:
    """(N, L T + L - 1) one bit per layer and type, and one per boundary."""
    bits = placements[..., None] == np.arange(model.num_types)
    cuts = placements[:, 1:] != placements[:, :-1]
    return np.concatenate([bits.reshape(len(placements), -1), cuts], axis=1).astype(np.float64)


def expected_improvement(mean: Floats, deviation: Floats, best: float) -> Floats:
    """``E max(best - y, 0)`` for normal ``y``: ``d (z Phi(z) + phi(z))`` with ``z = (best - mean) / d``."""
    from scipy.special import ndtr

    deviation = np.maximum(deviation, 1e-12)
    z = (best - mean) / deviation
    gain: Floats = deviation * (z * ndtr(z) + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi))
    return gain


def _fitted(known: Floats, heights: Floats, before: Any) -> Any:
    """The process given what is known; with the kernel of ``before``, or with one fitted to it."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, WhiteKernel

    fresh = RBF(math.sqrt(known.shape[1]), (0.5, 1e3)) + WhiteKernel(1e-3, (1e-6, 1.0))
    kernel, optimizer = (fresh, "fmin_l_bfgs_b") if before is None else (before.kernel_, None)
    surrogate = GaussianProcessRegressor(kernel, optimizer=optimizer, normalize_y=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a scale is at its bound, which is no news
        return surrogate.fit(known, heights)


def _candidates(model: CostModel, parents: Ints, rng: np.random.Generator) -> Ints:
    """Neighbours of ``parents``, a run of layers moved to another type, and some at random."""
    num_near = CANDIDATES * 3 // 4
    near = parents[rng.integers(0, len(parents), num_near)]
    begin = rng.integers(0, model.num_layers, num_near)[:, None]
    length = rng.geometric(0.4, num_near)[:, None]
    position = np.arange(model.num_layers)
    moved = (position >= begin) & (position < begin + length)
    to = rng.random((num_near, 1, model.num_types))  # one ranking of the types for the whole run
    near = np.where(moved, np.argmax(np.where(model.allowed, to, -1.0), axis=2), near)
    return np.concatenate([together(model, near), random_placements(model, CANDIDATES - num_near, rng)])


def _unseen(placements: Ints, tried: Ints) -> Ints:
    """Each placement that was not tried, once, in order of first appearance."""
    both = np.concatenate([tried, placements])
    _, first = np.unique(both, axis=0, return_index=True)
    return both[np.sort(first[first >= len(tried)])]
