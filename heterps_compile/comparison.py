"""Compare ways to run one training step, fairly: same weights, same batches, in turns, in one process.

Enter contenders, each a name and a function that makes its step (so that even a failing compiler is a result); leave
their speeds. Segments of all contenders are interleaved and their order rotates: a machine that slows down slows all of
them. A speed is the median over segments, in samples per second. Measured, never estimated.
"""

from __future__ import annotations

import copy
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Optimizer

from heterps_compile.data import Batch

Step = Callable[[Batch], Tensor]
MakeOptimizer = Callable[[nn.Module], Optimizer]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A name and what makes its training step; making may take long (compiling) and may fail."""

    name: str
    make: Callable[[], Step]


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What a contender did: seconds until its first step was done, samples per second of each segment, or a failure."""

    name: str
    first_step_s: float = 0.0
    segments_samples_per_s: tuple[float, ...] = ()
    failure: str = ""

    @property
    def samples_per_s(self) -> float:
        """The median segment; 0 after a failure."""
        return statistics.median(self.segments_samples_per_s) if self.segments_samples_per_s else 0.0


@dataclass(kw_only=True)
class _Runner:
    contender: Contender
    step: Step | None = None
    first_step_s: float = 0.0
    segments: list[float] = field(default_factory=list)
    failure: str = ""

    def start(self, batch: Batch) -> None:
        started = time.perf_counter()
        try:
            self.step = self.contender.make()
            self.step(batch)
        except Exception as error:  # another compiler's crash is a result of the comparison, shown in its table
            self.step, self.failure = None, f"{type(error).__name__}: {(str(error) or '-').splitlines()[0]}"
        self.first_step_s = time.perf_counter() - started

    def run(self, batches: Sequence[Batch]) -> None:
        if self.step is None:
            return
        started = time.perf_counter()
        for batch in batches:
            self.step(batch)
        elapsed_s = time.perf_counter() - started
        self.segments.append(sum(len(batch.labels) for batch in batches) / elapsed_s)

    def speed(self) -> Speed:
        return Speed(
            name=self.contender.name,
            first_step_s=self.first_step_s,
            segments_samples_per_s=tuple(self.segments),
            failure=self.failure,
        )


def race(contenders: Sequence[Contender], batches: Sequence[Batch], *, num_segments: int = 5) -> tuple[Speed, ...]:
    """Run all batches ``num_segments`` times with every contender, in turns; one more time before, not counted."""
    runners = [_Runner(contender=contender) for contender in contenders]
    for runner in runners:
        runner.start(batches[0])
        runner.run(batches)
        runner.segments.clear()
    for segment in range(num_segments):
        turn = segment % len(runners)
        for runner in runners[turn:] + runners[:turn]:
            runner.run(batches)
    return tuple(runner.speed() for runner in runners)


def contender(name: str, model: nn.Module, make_optimizer: MakeOptimizer, backend: str) -> Contender:
    """One that trains its own copy of ``model``; for ``backend`` see :func:`training_step`."""

    def make() -> Step:
        own = copy.deepcopy(model)
        return training_step(own, make_optimizer(own), backend)

    return Contender(name=name, make=make)


def training_step(model: nn.Module, optimizer: Optimizer, backend: str) -> Step:
    """The stock step under ``eager`` or any torch.compile backend, or under ``train_step``: heterps owns the step."""
    if backend == "train_step":
        from heterps_compile.training import train_step

        owned = train_step(click_loss, optimizer=optimizer)
        return lambda batch: owned(model, batch)
    return stock_step(model if backend == "eager" else torch.compile(model, backend=backend), optimizer)


def stock_step(model: Callable[[Tensor, Tensor], Tensor], optimizer: Optimizer) -> Step:
    """Forward, backward, update, as everybody writes them; the step returns the detached loss."""

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = click_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def click_loss(model: Callable[[Tensor, Tensor], Tensor], batch: Batch) -> Tensor:
    """Mean binary cross-entropy of the model's logits."""
    return binary_cross_entropy_with_logits(model(batch.dense, batch.ids), batch.labels)


def speed_table(speeds: Sequence[Speed], *, against: str = "eager") -> str:
    """Samples per second, range over segments, ratio to ``against``, seconds to the first step."""
    base = next((speed.samples_per_s for speed in speeds if speed.name == against), 0.0)
    lines = [f"{'':12}{'samples/s':>12}{'range of segments':>23}{f'vs {against}':>11}{'first step':>13}"]
    for speed in speeds:
        if speed.failure:
            lines.append(f"{speed.name:12}failed after {speed.first_step_s:.1f} s: {speed.failure[:160]}")
            continue
        spread = f"{min(speed.segments_samples_per_s):,.0f} - {max(speed.segments_samples_per_s):,.0f}"
        ratio = f"{speed.samples_per_s / base:.2f} x" if base else "-"
        lines.append(f"{speed.name:12}{speed.samples_per_s:12,.0f}{spread:>23}{ratio:>11}{speed.first_step_s:11.1f} s")
    return "\n".join(lines)


def machine() -> str:
    """Processor, cores used, memory and versions: one line to put beside any figure."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8", errors="replace").splitlines() if information.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    accelerator = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"{model}{accelerator}, {torch.get_num_threads()} threads on {os.cpu_count()} cores, "
        f"{platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
