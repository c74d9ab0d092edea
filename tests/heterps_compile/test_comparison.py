"""Races of training steps: equal starts, turns, medians, and failures that are shown."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from heterps_compile.comparison import Contender, Speed, Step, contender, machine, race, speed_table, training_step
from heterps_compile.data import Batch
from heterps_compile.models import DLRM


def batches(count: int) -> tuple[Batch, ...]:
    return tuple(
        Batch(torch.rand(8, 13), torch.randint(20, (8, 26)), torch.randint(2, (8,)).float()) for _ in range(count)
    )


def small() -> DLRM:
    return DLRM((20,) * 26, 4, bottom=(8,), top=(8,))


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def test_contenders_run_in_turns_and_the_order_rotates() -> None:
    ran: list[str] = []

    def named(name: str) -> Contender:
        def step(batch: Batch) -> Tensor:
            ran.append(name)
            return batch.labels

        return Contender(name=name, make=lambda: step)

    speeds = race([named("a"), named("b")], batches(1), num_segments=3)
    assert "".join(ran) == "aabb" + "ab" + "ba" + "ab"  # first step and warm-up, then three segments
    assert [speed.name for speed in speeds] == ["a", "b"]
    assert all(len(speed.segments_samples_per_s) == 3 for speed in speeds)


def test_a_crash_is_a_result_and_the_others_go_on() -> None:
    def crash() -> Step:
        raise RuntimeError("no compiler\nand a long explanation")

    speeds = race([Contender(name="broken", make=crash), contender("eager", small(), adagrad, "eager")], batches(2))
    assert speeds[0].failure == "RuntimeError: no compiler"
    assert speeds[0].samples_per_s == 0
    assert speeds[1].samples_per_s > 0
    text = speed_table(speeds)
    assert "broken" in text
    assert "RuntimeError: no compiler" in text
    assert "1.00 x" in text


def test_speed_is_the_median_of_segments() -> None:
    assert Speed(name="x", segments_samples_per_s=(1.0, 100.0, 3.0)).samples_per_s == 3.0


def test_contenders_train_copies() -> None:
    model = small()
    before = copy.deepcopy(model.state_dict())
    race([contender("eager", model, adagrad, "eager")], batches(2), num_segments=1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("backend", ["heterps", "train_step"])
def test_every_way_to_step_gives_the_losses_of_eager(backend: str) -> None:
    model, data = small(), batches(4)
    losses = []
    for name in ("eager", backend):
        own = copy.deepcopy(model)
        step = training_step(own, adagrad(own), name)
        losses.append([step(batch).item() for batch in data])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert losses[0][0] != losses[0][3]


def test_machine_names_versions() -> None:
    assert f"torch {torch.__version__}" in machine()
    assert "threads" in machine()
