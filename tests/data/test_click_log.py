"""Batches of a click log: every sample once, order by seed, and what does not fit together."""

from __future__ import annotations

import pytest
import torch

from heterps_compile.data import ClickLog


def log_of(num_samples: int) -> ClickLog:
    labels = torch.arange(num_samples, dtype=torch.float32)
    return ClickLog(dense=labels[:, None].clone(), ids=torch.arange(num_samples)[:, None], labels=labels, rows=(99,))


def order(log: ClickLog, **options: int) -> list[float]:
    return [label for batch in log.batches(4, **options) for label in batch.labels.tolist()]


def test_batches_come_in_order_and_the_last_is_smaller() -> None:
    assert [len(batch.labels) for batch in log_of(10).batches(4)] == [4, 4, 2]
    assert order(log_of(10)) == list(range(10))
    assert log_of(10).num_batches(4) == 3


def test_shuffled_batches_hold_every_sample_once_in_an_order_of_the_seed() -> None:
    log = log_of(10)
    assert sorted(order(log, shuffle=True, seed=1)) == list(range(10))
    assert order(log, shuffle=True, seed=1) == order(log, shuffle=True, seed=1)
    assert order(log, shuffle=True, seed=1) != order(log, shuffle=True, seed=2)


def test_rows_of_a_shuffled_batch_stay_together() -> None:
    for batch in log_of(10).batches(3, shuffle=True, seed=5):
        assert batch.dense[:, 0].tolist() == batch.ids[:, 0].tolist() == batch.labels.tolist()


def test_shuffling_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    order(log_of(10), shuffle=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_split_takes_the_end_or_a_seeded_part() -> None:
    train, test = log_of(10).split(0.2)
    assert (len(train), test.labels.tolist()) == (8, [8, 9])
    train, test = log_of(10).split(0.2, seed=3)
    assert sorted(train.labels.tolist() + test.labels.tolist()) == list(range(10))
    with pytest.raises(ValueError, match=r"test_fraction 0\.01 of 10 samples leaves an empty part"):
        log_of(10).split(0.01)


def test_parts_that_do_not_fit_are_refused() -> None:
    dense, ids, labels = torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3)
    with pytest.raises(ValueError, match=r"ids is torch\.int32"):
        ClickLog(dense=dense, ids=ids.int(), labels=labels, rows=(1,))
    with pytest.raises(ValueError, match=r"dense is torch\.float32 \(2, 2\).*3 samples"):
        ClickLog(dense=dense[:2], ids=ids, labels=labels, rows=(1,))
    with pytest.raises(ValueError, match=r"rows has 2 entries for 1 columns"):
        ClickLog(dense=dense, ids=ids, labels=labels, rows=(1, 1))
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        next(log_of(3).batches(0))
