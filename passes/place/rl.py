"""The policy of HeterPS: a recurrent network places layer after layer and learns from the provisioned plan's price.

Enters: a cost model and a seed. Leaves: the cheapest placement seen, after local improvement of the best samples. Each
step reads the layer's features and the previous choice, gives a softmax over the resource types, and the sampled type
feeds on. REINFORCE with a moving-average baseline b (HeterPS, section on scheduling; the sizes and rates are ours, the
paper's are not published):

    theta += eta / N sum_n sum_l grad log P(a_l | a_<l; theta) (R_n - b),     b = (1 - gamma) b + gamma / N sum_n R_n

R is minus the log of the cost after provisioning, or below all feasible plans by how far a plan is from feasible. Two
things are ours: the best plan so far is part of each batch, and every ``IMPROVE_EVERY`` rounds the best sample, and the
best plan after a random move, and random plans, are improved by moving layers and ranges of layers. Long chains are
placed in at most ``MAX_STEPS`` groups of neighbours.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from heterps_compile.cost_model import CostModel, Floats, Ints
from heterps_compile.passes.place.found import Found
from heterps_compile.passes.place.groups import neighbour_groups
from heterps_compile.passes.place.improve import improve
from heterps_compile.passes.place.recurrent import Cell, RecurrentPolicy
from heterps_compile.passes.place.search import num_placements, random_placements, together
from heterps_compile.provision import score

SAMPLES = 64
ROUNDS = 150
PATIENCE = 60
"""Rounds without a better plan after which learning stops."""
LONG_WORK = 6000
"""Layers times rounds in chains of more than ``MAX_STEPS`` layers, whose rounds all end with an improvement."""
IMPROVE_EVERY = 10
KICKS = 3
HIDDEN = 32
RATE = 0.02
BASELINE_RATE = 0.2
ENTROPY = 0.05
MAX_STEPS = 64
SHORT_RANGE, PROMISING = 4, 1.03
"""Longest range moved while improving, and how near to the best a plan must come to be improved with all ranges."""
SCORE_STEPS = 4
"""Sweep points per sample while learning; the plan kept is provisioned exactly."""

Key = tuple[float, float]
"""(cost, violation): what is compared between placements."""


@dataclass(slots=True)
class _Best:
    """The best placement seen, and the placements whose improvement was already tried."""

    rng: np.random.Generator
    key: Key = (float("inf"), float("inf"))
    chosen: Ints | None = None
    tried: set[bytes] = field(default_factory=set)

    def offer(self, key: Key, placement: Ints) -> bool:
        if key >= self.key:
            return False
        self.key, self.chosen = key, placement.copy()
        return True


def rl(model: CostModel, seed: int = 0, time_limit_s: float = 60.0) -> Found:
    """LSTM and REINFORCE, the paper's RL-LSTM."""
    return _learn(model, seed, time_limit_s, "lstm")


def rl_rnn(model: CostModel, seed: int = 0, time_limit_s: float = 60.0) -> Found:
    """The same with a plain recurrent cell, the paper's RL-RNN."""
    return _learn(model, seed, time_limit_s, "rnn")


def _learn(model: CostModel, seed: int, time_limit_s: float, cell: Cell) -> Found:
    deadline = time.monotonic() + time_limit_s
    groups = step_groups(model)
    first = np.flatnonzero(np.diff(groups, prepend=-1))
    policy = RecurrentPolicy(
        features=step_features(model, groups),
        allowed=model.allowed[first],
        cell=cell,
        hidden=HIDDEN,
        rng=np.random.default_rng(seed),
        rate=RATE,
    )
    best = _Best(rng=policy.rng)
    baseline, quiet = None, 0
    rounds = ROUNDS if num_placements(model) > SAMPLES else 4
    if model.num_layers > MAX_STEPS:
        rounds = min(rounds, LONG_WORK // model.num_layers + 1)
    for turn in range(rounds):
        run = policy.rollout(SAMPLES)
        placements = together(model, run.actions[:, groups])
        scores = score(model, placements, SCORE_STEPS)
        cost, violation = scores.cost_usd_per_million_samples, scores.violation
        better = _improve_best(model, best, placements, (cost, violation), deadline, turn)
        quiet = 0 if better else quiet + 1
        reward = _reward(cost, violation)
        mean = float(reward.mean())
        baseline = mean if baseline is None else (1 - BASELINE_RATE) * baseline + BASELINE_RATE * mean
        weight = (reward - baseline) / (float(reward.std()) + 1e-6) / SAMPLES
        grads = policy.gradient(run, weight, ENTROPY)
        if best.chosen is not None:
            follow = policy.rollout(1, forced=best.chosen[None, first])
            for name, gradient in policy.gradient(follow, np.array([1.0 / SAMPLES]), 0.0).items():
                grads[name] += gradient
        policy.ascend(grads)
        if quiet >= PATIENCE or time.monotonic() > deadline:
            break
    return Found(chosen=best.chosen if np.isfinite(best.key[0]) else None, cost=best.key[0])


def step_groups(model: CostModel) -> Ints:
    """(L,): the step of the policy that places each layer; one step per layer in chains of up to ``MAX_STEPS``."""
    return neighbour_groups(model, MAX_STEPS)


def step_features(model: CostModel, groups: Ints) -> Floats:
    """(steps, F): place in the chain, per type log times against the chain's, and the layers' facts."""
    count = int(groups[-1]) + 1
    sums = np.zeros((count, *model.terms.shape[1:]))
    np.add.at(sums, groups, model.terms)
    times = np.stack([sums[..., 0] + sums[..., 1], sums[..., 2] + sums[..., 3]], axis=2).reshape(count, -1)
    logs = np.log(times + 1e-9)
    scaled = (logs - logs.mean(axis=0)) / (logs.std(axis=0) + 1e-6)
    first = np.flatnonzero(np.diff(groups, prepend=-1))
    facts = model.features[first] if model.features is not None else np.zeros((count, 0))
    return np.concatenate([np.linspace(-1, 1, count)[:, None], scaled, facts], axis=1)


def _improve_best(
    model: CostModel, best: _Best, placements: Ints, scores: tuple[Floats, Floats], deadline: float, turn: int
) -> bool:
    """Take the best sample, and every few rounds what local moves make of it; True when there is a new best."""
    cost, violation = scores
    index = int(np.lexsort((violation, cost))[0])
    better = best.offer((float(cost[index]), float(violation[index])), placements[index])
    for start in _starts(model, best, placements[index], turn):
        if start.tobytes() not in best.tried:
            best.tried.add(start.tobytes())
            improved, improved_cost = improve(model, start, deadline, SHORT_RANGE)
            if improved_cost < best.key[0] * PROMISING:
                improved, improved_cost = improve(model, improved, deadline)
            if np.isfinite(improved_cost):
                better |= best.offer((improved_cost, 0.0), improved)
    return better


def _starts(model: CostModel, best: _Best, sample: Ints, turn: int) -> tuple[Ints, ...]:
    """What to improve: every few rounds the sample, the best plan after random moves, and random plans.

    In a long chain, of which samples are far from good, the best plan after a random move gets further.
    """
    assert best.chosen is not None
    if model.num_layers > MAX_STEPS and turn:
        return tuple(kicked(model, best.chosen, 1, best.rng))
    if turn % IMPROVE_EVERY:
        return ()
    return (sample, *kicked(model, best.chosen, KICKS, best.rng), *random_placements(model, 2, best.rng))


def kicked(model: CostModel, placement: Ints, count: int, rng: np.random.Generator) -> Ints:
    """``count`` copies (count, L), each with two random ranges of layers moved to types they may run on.

    In a long chain most ranges are short: what is right about the rest is kept.
    """
    copies = np.repeat(placement[None], count, axis=0)
    for row in copies:
        for _ in range(2):
            begin = int(rng.integers(0, model.num_layers))
            most = max(2, model.num_layers // 3)
            end = begin + 1 + int(rng.integers(0, most) if model.num_layers <= MAX_STEPS else most ** rng.random())
            drawn = int(rng.integers(0, model.num_types))
            row[begin:end] = np.where(model.allowed[begin:end, drawn], drawn, row[begin:end])
    return together(model, copies)


def _reward(cost: Floats, violation: Floats) -> Floats:
    feasible = np.isfinite(cost)
    worst = float(-np.log(cost[feasible].max() + 1e-30)) if feasible.any() else 0.0
    return np.where(feasible, -np.log(np.where(feasible, cost, 1.0) + 1e-30), worst - 0.5 - violation)
