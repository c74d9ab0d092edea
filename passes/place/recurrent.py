"""The recurrent policy of HeterPS in numpy: sampling, the gradient of the log-probability, and Adam.

Enters: features of each step and the allowed types. Leaves: sampled actions, and parameters moved along a weighted
gradient. numpy, because a network this small is several times faster without a framework, and because planning happens
inside ``torch.compile``, where the caller's random state, grad mode, threads and default device must not be touched.

Letters: ``x`` input of a step (features, previous choice one-hot, 1), ``h`` hidden, ``c`` cell, ``z`` pre-activations.

    LSTM:  i, f, o = sigmoid(z_i, z_f, z_o),  g = tanh(z_g),  c' = f c + i g,  h' = o tanh(c')        RNN:  h' = tanh(z)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from heterps_compile.cost_model import Bools, Floats, Ints

Cell = Literal["lstm", "rnn"]


@dataclass(frozen=True, slots=True)
class Rollout:
    """N sampled placements: actions (N, steps), probabilities (N, steps, T), and what the gradient needs."""

    actions: Ints
    probabilities: Floats
    inputs: list[Floats]
    hidden: list[Floats]
    cells: list[Floats]
    gates: list[Floats]


@dataclass(slots=True)
class RecurrentPolicy:
    """Weights ``w`` (inputs + hidden, gates) and ``head`` (hidden + 1, T), with Adam's moments beside them."""

    features: Floats
    allowed: Bools
    cell: Cell
    hidden: int
    rng: np.random.Generator
    rate: float
    w: Floats = field(init=False)
    head: Floats = field(init=False)
    moments: dict[str, Floats] = field(init=False)
    updates: int = 0

    def __post_init__(self) -> None:
        inputs = self.features.shape[1] + self.allowed.shape[1] + 1
        gates = (4 if self.cell == "lstm" else 1) * self.hidden
        scale = 1 / self.hidden**0.5
        self.w = self.rng.uniform(-scale, scale, (inputs + self.hidden, gates))
        self.head = np.zeros((self.hidden + 1, self.allowed.shape[1]))  # every type equally likely at first
        self.moments = {name: np.zeros((2, *getattr(self, name).shape)) for name in ("w", "head")}

    def rollout(self, count: int, forced: Ints | None = None) -> Rollout:
        """Sample ``count`` placements, or follow ``forced`` (count, steps)."""
        steps, types = self.allowed.shape
        h, c = np.zeros((2, count, self.hidden))
        previous = np.zeros((count, types))
        run = Rollout(np.zeros((count, steps), dtype=np.int64), np.zeros((count, steps, types)), [], [], [], [])
        draws = self.rng.random((steps, count, 1)) if forced is None else None
        for step in range(steps):
            x = np.concatenate(
                [
                    np.broadcast_to(self.features[step], (count, self.features.shape[1])),
                    previous,
                    np.ones((count, 1)),
                    h,
                ],
                axis=1,
            )
            c_before = c
            h, c, gates = self._cell(x, c)
            logits = np.where(self.allowed[step], h @ self.head[:-1] + self.head[-1], -np.inf)
            probability = np.exp(logits - logits.max(axis=1, keepdims=True))
            probability /= probability.sum(axis=1, keepdims=True)
            if draws is not None:
                drawn = (np.cumsum(probability, axis=1) < draws[step] * (1 - 1e-12)).sum(axis=1)
                action = np.where(self.allowed[step][np.minimum(drawn, types - 1)], drawn, probability.argmax(axis=1))
            else:
                assert forced is not None
                action = forced[:, step]
            run.actions[:, step], run.probabilities[:, step] = action, probability
            run.inputs.append(x)
            run.hidden.append(h)
            run.cells.append(c_before)
            run.gates.append(gates)
            previous = np.eye(types)[action]
        return run

    def _cell(self, x: Floats, c: Floats) -> tuple[Floats, Floats, Floats]:
        z = x @ self.w
        if self.cell == "rnn":
            h = np.tanh(z)
            return h, c, h
        n = self.hidden
        gates = np.concatenate([1 / (1 + np.exp(-z[:, : 3 * n])), np.tanh(z[:, 3 * n :])], axis=1)
        c = gates[:, n : 2 * n] * c + gates[:, :n] * gates[:, 3 * n :]
        return gates[:, 2 * n : 3 * n] * np.tanh(c), c, gates

    def gradient(self, run: Rollout, weight: Floats, entropy: float) -> dict[str, Floats]:
        """Gradient of ``sum_n weight_n log P(actions_n) + entropy * mean entropy of a step``, by back-propagation."""
        count, steps = run.actions.shape
        grads = {"w": np.zeros_like(self.w), "head": np.zeros_like(self.head)}
        dh, dc = np.zeros((2, count, self.hidden))
        for step in range(steps - 1, -1, -1):
            p = run.probabilities[:, step]
            chosen = np.eye(p.shape[1])[run.actions[:, step]]
            log_p = np.log(np.where(p > 0, p, 1.0))
            spread = -p * (log_p - (p * log_p).sum(axis=1, keepdims=True))
            dlogits = weight[:, None] * (chosen - p) + entropy / (count * steps) * spread
            grads["head"][:-1] += run.hidden[step].T @ dlogits
            grads["head"][-1] += dlogits.sum(axis=0)
            dh = dh + dlogits @ self.head[:-1].T
            dz, dc = self._cell_gradient(run, step, dh, dc)
            grads["w"] += run.inputs[step].T @ dz
            dh = dz @ self.w[-self.hidden :].T
        return grads

    def _cell_gradient(self, run: Rollout, step: int, dh: Floats, dc: Floats) -> tuple[Floats, Floats]:
        gates, n = run.gates[step], self.hidden
        if self.cell == "rnn":
            return dh * (1 - gates**2), dc
        i, f, o, g = (gates[:, k * n : (k + 1) * n] for k in range(4))
        t = np.tanh(f * run.cells[step] + i * g)
        dc = dc + dh * o * (1 - t**2)
        slopes = (dc * g * i * (1 - i), dc * run.cells[step] * f * (1 - f), dh * t * o * (1 - o), dc * i * (1 - g**2))
        return np.concatenate(slopes, axis=1), dc * f

    def ascend(self, grads: dict[str, Floats]) -> None:
        """One step of Adam upwards, the gradient's norm clipped to 1."""
        norm = sum(float((g**2).sum()) for g in grads.values()) ** 0.5
        self.updates += 1
        for name, gradient in grads.items():
            clipped = gradient / max(norm, 1.0)
            first, second = self.moments[name]
            first += 0.1 * (clipped - first)
            second += 0.01 * (clipped**2 - second)
            corrected = first / (1 - 0.9**self.updates)
            step = corrected / (np.sqrt(second / (1 - 0.99**self.updates)) + 1e-8)
            setattr(self, name, getattr(self, name) + self.rate * step)
