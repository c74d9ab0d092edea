"""Generated clicks with power-law ids and a planted signal, so that the best possible AUC is known.

Enters a ``Recipe``; leave a training and a test ``ClickLog`` and ``planted_auc``: the AUC that the true logits reach
on these very test samples. No model can expect to do better, so a trained one is judged by the gap.

    logit = bias + sum over signal tables of weight[table][id] + dense effects,    label ~ Bernoulli(sigmoid(logit))

Ids follow a shifted, truncated power law, P(rank r) ~ (r + shift) ** -skew for r up to ``active_rows``, behind a random
renumbering of all rows. The defaults give a batch of 65,536 the reuse of Meta's published embedding traces (856 tables,
github.com/facebookresearch/dlrm_datasets): rows touched once 48 % (traces 47 %), accesses to rows touched more than 16
times 64 % (60 %), touches per row 6.8 (6.9).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from heterps_compile.data.click_log import ClickLog
from heterps_compile.metrics import auc


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What to generate. The signal sits in every dense column and every row of the first ``num_signal_tables`` tables.

    ``signal_scale`` is the standard deviation of what the tables add to the logit, ``dense_scale`` of the dense part.
    How far a model gets from ``num_samples`` depends on how often a row is seen: on ``num_samples / active_rows``.
    """

    num_samples: int = 1_000_000
    test_samples: int = 100_000
    rows: tuple[int, ...] = (200_000,) * 26
    num_dense: int = 13
    active_rows: int = 20_000
    skew: float = 1.4
    shift: float = 100.0
    num_signal_tables: int = 2
    signal_scale: float = 1.5
    dense_scale: float = 0.7
    bias: float = -1.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlantedClicks:
    """A training and a test set, and the AUC of the true probabilities on the test set."""

    train: ClickLog
    test: ClickLog
    planted_auc: float


def generate(recipe: Recipe) -> PlantedClicks:
    """Draw the samples; equal recipes give equal samples.

    Raises:
        ValueError: a size is not positive, or there are more signal tables than tables.
    """
    _check(recipe)
    generator = Generator().manual_seed(recipe.seed)
    num_samples = recipe.num_samples + recipe.test_samples
    dense = torch.randn(num_samples, recipe.num_dense, generator=generator)
    effects = torch.randn(recipe.num_dense, generator=generator)
    logits = recipe.bias + dense @ (effects * recipe.dense_scale / effects.norm())
    ids = torch.empty(num_samples, len(recipe.rows), dtype=torch.int64)
    for table, rows in enumerate(recipe.rows):
        numbering = torch.randperm(rows, generator=generator)
        ranks = power_law_ranks(num_samples, rows, recipe, generator)
        ids[:, table] = numbering[ranks]
        if table < recipe.num_signal_tables:
            weights = torch.randn(rows, generator=generator) * (recipe.signal_scale / recipe.num_signal_tables**0.5)
            logits += weights[ranks]
    labels = (torch.rand(num_samples, generator=generator) < logits.sigmoid()).float()
    clicks = ClickLog(dense=dense, ids=ids, labels=labels, rows=recipe.rows)
    train, test = clicks.split(recipe.test_samples / num_samples)
    return PlantedClicks(train=train, test=test, planted_auc=auc(test.labels, logits[-recipe.test_samples :]))


def power_law_ranks(num_ids: int, rows: int, recipe: Recipe, generator: Generator) -> Tensor:
    """Popularity ranks (num_ids,), 0 the most popular, by the law at the top: its distribution function inverted."""
    active = min(rows, recipe.active_rows)
    power = 1.0 - recipe.skew
    start, end = (1.0 + recipe.shift) ** power, (active + 1.0 + recipe.shift) ** power
    uniform = torch.rand(num_ids, generator=generator, dtype=torch.float64)
    ranks: Tensor = (start + uniform * (end - start)) ** (1 / power) - 1.0 - recipe.shift
    return ranks.long().clamp_(0, active - 1)


def _check(recipe: Recipe) -> None:
    for name in ("num_samples", "test_samples"):
        if getattr(recipe, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(recipe, name)}")
    if not 0 <= recipe.num_signal_tables <= len(recipe.rows):
        raise ValueError(f"num_signal_tables {recipe.num_signal_tables} must be within the {len(recipe.rows)} tables")
    if recipe.skew <= 0 or recipe.skew == 1:
        raise ValueError(f"skew must be positive and not 1, got {recipe.skew}")
