"""Generated clicks: reproducible, power-law ids, and a planted AUC that is the limit."""

from __future__ import annotations

import pytest
import torch

from heterps_compile.data import Recipe, generate
from heterps_compile.data.synthetic import power_law_ranks

SMALL = Recipe(num_samples=20_000, test_samples=5_000, rows=(500,) * 4, num_signal_tables=2)


def test_equal_recipes_give_equal_clicks_and_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, second = generate(SMALL), generate(SMALL)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.train.ids, second.train.ids)
    assert torch.equal(first.test.labels, second.test.labels)
    assert first.planted_auc == second.planted_auc


def test_sizes_and_ranges() -> None:
    clicks = generate(SMALL)
    assert (len(clicks.train), len(clicks.test)) == (20_000, 5_000)
    assert clicks.train.ids.min() >= 0
    assert clicks.train.ids.max() < 500
    assert 0.6 < clicks.planted_auc < 0.95
    assert 0.1 < clicks.train.labels.mean() < 0.6


def test_without_signal_nothing_can_be_told() -> None:
    clicks = generate(
        Recipe(num_samples=100, test_samples=20_000, rows=(50,) * 2, num_signal_tables=0, dense_scale=0.0)
    )
    assert clicks.planted_auc == 0.5  # every logit is the bias: all ties


def test_frequencies_follow_the_power_law() -> None:
    recipe = Recipe(skew=2.0, shift=0.0, active_rows=100)
    ids = power_law_ranks(400_000, 1000, recipe, torch.Generator().manual_seed(0))
    shares = ids.bincount(minlength=1000).sort(descending=True).values / 400_000
    # density x ** -2 on [1, 101): rank r gets (1 / r - 1 / (r + 1)) / (1 - 1 / 101)
    expected = torch.tensor([1 / r - 1 / (r + 1) for r in range(1, 6)]) / (1 - 1 / 101)
    torch.testing.assert_close(shares[:5], expected, atol=0.003, rtol=0)
    assert int((shares > 0).sum()) <= 100


def test_default_reuse_is_that_of_published_traces() -> None:
    ids = power_law_ranks(65_536, 200_000, Recipe(), torch.Generator().manual_seed(0))
    touches = ids.unique(return_counts=True)[1]
    assert (touches == 1).float().mean().item() == pytest.approx(0.473, abs=0.02)  # rows touched once
    assert (touches[touches > 16].sum() / 65_536).item() == pytest.approx(0.598, abs=0.06)  # accesses to hot rows
    assert 65_536 / len(touches) == pytest.approx(6.9, abs=0.3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_samples": 0}, "num_samples must be at least 1, got 0"),
        ({"num_signal_tables": 5}, "num_signal_tables 5 must be within the 4 tables"),
        ({"skew": 1.0}, r"skew must be positive and not 1, got 1\.0"),
    ],
)
def test_wrong_recipes_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(Recipe(**{"rows": (50,) * 4, "test_samples": 10, **wrong}))
