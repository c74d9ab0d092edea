"""AUC against counting every pair, and log-loss against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heterps_compile.metrics import auc, log_loss


def auc_by_counting_pairs(labels: list[float], scores: list[float]) -> float:
    positives = [score for score, label in zip(scores, labels, strict=True) if label]
    negatives = [score for score, label in zip(scores, labels, strict=True) if not label]
    won = sum(1.0 if p > n else 0.5 if p == n else 0.0 for p in positives for n in negatives)
    return won / (len(positives) * len(negatives))


@given(st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=2, max_size=40))
def test_auc_counts_pairs_with_many_ties(samples: list[tuple[bool, int]]) -> None:
    labels, scores = [float(label) for label, _ in samples], [float(score) for _, score in samples]
    if 0 < sum(labels) < len(labels):
        found = auc(torch.tensor(labels), torch.tensor(scores))
        assert found == pytest.approx(auc_by_counting_pairs(labels, scores), abs=1e-12)


def test_auc_of_many_samples_is_exact() -> None:
    from sklearn.metrics import roc_auc_score

    labels, scores = (torch.rand(200_000) < 0.3).float(), torch.randn(200_000)
    assert auc(labels, scores) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_auc_by_hand() -> None:
    assert auc(torch.tensor([0.0, 1.0]), torch.tensor([-1.0, 2.0])) == 1.0
    assert auc(torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 2.0])) == 0.0
    assert auc(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([5.0, 5.0, 5.0])) == 0.5


def test_log_loss_is_its_definition_and_survives_large_logits() -> None:
    labels, logits = torch.tensor([1.0, 0.0]), torch.tensor([0.5, -2.0])
    by_hand = (math.log(1 + math.exp(-0.5)) + math.log(1 + math.exp(-2.0))) / 2
    assert log_loss(labels, logits) == pytest.approx(by_hand, rel=1e-12)
    assert log_loss(torch.tensor([0.0]), torch.tensor([1000.0])) == 1000.0


def test_what_has_no_value_is_refused() -> None:
    with pytest.raises(ValueError, match="AUC needs both classes, got 0 positives of 3 labels"):
        auc(torch.zeros(3), torch.rand(3))
    with pytest.raises(ValueError, match=r"labels \(3,\) and scores \(3, 1\) must be one equal dimension"):
        auc(torch.zeros(3), torch.rand(3, 1))
    with pytest.raises(ValueError, match="1 of 2 scores are NaN: the model diverged"):
        log_loss(torch.zeros(2), torch.tensor([0.0, math.nan]))
