"""How good a model's logits are on held-out rows: exact AUC and log-loss.

Enter labels (num_samples,) of zeros and ones, and scores or logits of the same shape. Both are computed in float64.
Refused: shapes that differ, scores that are not numbers, and an AUC of one class alone (it has no value).
"""

from __future__ import annotations

import torch
from torch import Tensor


def auc(labels: Tensor, scores: Tensor) -> float:
    """Chance that a positive scores above a negative, a tie counting one half (the Mann-Whitney statistic).

    Raises:
        ValueError: shapes differ, a score is NaN, or only one class is present.
    """
    _check(labels, scores)
    positive = labels.double()
    num_positive, num_negative = positive.sum(), (1 - positive).sum()
    if num_positive == 0 or num_negative == 0:
        raise ValueError(f"AUC needs both classes, got {int(num_positive)} positives of {len(labels)} labels")
    _, group, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = counts.cumsum(0).double() - (counts.double() - 1) / 2  # ties share the mean of their ranks, from 1
    rank_sum = (mean_rank[group] * positive).sum()
    return float((rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative))


def log_loss(labels: Tensor, logits: Tensor) -> float:
    """Mean of -log p(label), in nats, straight from the logits.

    Raises:
        ValueError: shapes differ, or a logit is NaN.
    """
    _check(labels, logits)
    return float(torch.nn.functional.binary_cross_entropy_with_logits(logits.double(), labels.double()))


def _check(labels: Tensor, scores: Tensor) -> None:
    if labels.shape != scores.shape or labels.dim() != 1:
        raise ValueError(f"labels {tuple(labels.shape)} and scores {tuple(scores.shape)} must be one equal dimension")
    if num_nan := int(scores.isnan().sum()):
        raise ValueError(f"{num_nan} of {len(scores)} scores are NaN: the model diverged")
