"""The paper's learner without what ``passes/place/rl.py`` adds to it: LSTM, REINFORCE, a moving-average baseline.

Enters: a cost model and a seed. Leaves: the cheapest placement it sampled. Sizes and rates are those of ``rl`` (the
paper's are not published), but the best plan is not part of each batch and no plan is improved by local moves: what
``rl`` finds and this does not is owed to the additions. All rounds run, with no early end.
"""

from __future__ import annotations

import time

import numpy as np

from heterps_compile.cost_model import CostModel, Floats
from heterps_compile.passes.place import Found
from heterps_compile.passes.place.recurrent import RecurrentPolicy
from heterps_compile.passes.place.rl import (
    BASELINE_RATE,
    ENTROPY,
    HIDDEN,
    RATE,
    ROUNDS,
    SAMPLES,
    SCORE_STEPS,
    step_features,
    step_groups,
)
from heterps_compile.passes.place.rules import best_of
from heterps_compile.passes.place.search import together
from heterps_compile.provision import Scores, score


def rl_plain(model: CostModel, seed: int = 0, time_limit_s: float = 60.0) -> Found:
    """REINFORCE as the paper has it; of each round the best sample is kept, and provisioned exactly in the end."""
    deadline = time.monotonic() + time_limit_s
    groups = step_groups(model)
    policy = RecurrentPolicy(
        features=step_features(model, groups),
        allowed=model.allowed[np.flatnonzero(np.diff(groups, prepend=-1))],
        cell="lstm",
        hidden=HIDDEN,
        rng=np.random.default_rng(seed),
        rate=RATE,
    )
    kept, baseline = {}, None
    for _ in range(ROUNDS):
        run = policy.rollout(SAMPLES)
        placements = together(model, run.actions[:, groups])
        reward = rewards(score(model, placements, SCORE_STEPS))
        best = placements[int(np.argmax(reward))]
        kept[best.tobytes()] = best
        mean = float(reward.mean())
        baseline = mean if baseline is None else (1 - BASELINE_RATE) * baseline + BASELINE_RATE * mean
        policy.ascend(policy.gradient(run, (reward - baseline) / (float(reward.std()) + 1e-6) / SAMPLES, ENTROPY))
        if time.monotonic() > deadline:
            break
    return best_of(model, kept.values())


def rewards(scores: Scores) -> Floats:
    """(N,) minus the log of the cost; what misses the floor is below all that reaches it, by how far it misses."""
    cost, feasible = scores.cost_usd_per_million_samples, np.isfinite(scores.cost_usd_per_million_samples)
    reward = -np.log(np.where(feasible, cost, 1.0))
    worst = float(reward[feasible].min()) if feasible.any() else 0.0
    return np.where(feasible, reward, worst - 0.5 - scores.violation)
