"""``heterps bench truth``: what is predicted for this machine beside what it does.

Enters: models, numbers of cores, resource types. Leaves: for each case the throughput predicted from its layers, from
its stages, and measured. Predicted and measured is one whole training step of ``train_step``: forward, loss, backward
and the update (Adagrad, tables with sparse gradients).

*Layers*: every layer timed alone, as it is lowered, with its update (``Profile``), added up by the cost model:
``ET_i = max(CT_i, DT_i)`` of each stage. *Stages*: each stage of the plan timed once more as a group, since fused costs
do not add up. Either way a step takes ``sum_i ET_i``: the stages of one process run in turn on the same cores, with one
microbatch, so that ``min_i 1/ET_i``, which gives each stage units of its own, would promise an overlap that cannot be.

Other load slows a machine by more than any prediction is off. So each round predicts and measures, stages and whole
steps in turns, and what counts is the median over the rounds of predicted over measured.
"""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heterps_compile.bench.stage_steps import stage_steps
from heterps_compile.calibrate import calibrate
from heterps_compile.capture import Captured, capture
from heterps_compile.cluster import Cluster
from heterps_compile.comparison import click_loss
from heterps_compile.cost_model import CostModel
from heterps_compile.costs import CostTable
from heterps_compile.data import Batch
from heterps_compile.devices import sim
from heterps_compile.models import MODELS, NUM_DENSE, NUM_TABLES
from heterps_compile.passes.lower import Lower
from heterps_compile.passes.profile import Profile
from heterps_compile.passes.trace import Trace
from heterps_compile.planning import Request, plan_costs
from heterps_compile.planning.prediction import stage_times
from heterps_compile.plans import Plan
from heterps_compile.training import train_step

TARGET = 0.15
"""How far a prediction may be off."""
TYPES = ("cpu", "cpu+sim")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One model on ``cores`` cores; with ``types`` "cpu+sim" the look-ups are pinned to cpu and the rest to sim."""

    model: str
    cores: int
    types: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of the models and of the measurement: ``steps`` whole steps in each of up to ``rounds``.

    No round begins more than ``budget_s`` after the first one of its case.
    """

    rows: int = 100_000
    dim: int = 16
    batch_size: int = 512
    rounds: int = 5
    steps: int = 8
    budget_s: float = 14.0


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of one training step: from layers, from stages, and measured."""

    layers_s: float
    stages_s: float
    measured_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A case with its rounds; throughput in samples per second, errors as predicted over measured, minus 1."""

    case: Case
    batch_size: int
    num_stages: int
    rounds: tuple[Round, ...]

    @property
    def measured_samples_per_s(self) -> float:
        """The median round."""
        return self.batch_size / statistics.median(r.measured_s for r in self.rounds)

    @property
    def layers_error(self) -> float:
        """Of the throughput predicted from layers."""
        return statistics.median(r.measured_s / r.layers_s for r in self.rounds) - 1

    @property
    def stages_error(self) -> float:
        """Of the throughput predicted from stages."""
        return statistics.median(r.measured_s / r.stages_s for r in self.rounds) - 1


def cases(models: Sequence[str], cores: Sequence[int]) -> tuple[Case, ...]:
    """Every model on every number of cores, on cpu alone and on cpu and sim."""
    return tuple(Case(model=m, cores=c, types=t) for m in models for c in cores for t in TYPES)


def run(wanted: Sequence[Case], sizes: Sizes) -> Iterator[Outcome]:
    """Predict and measure case by case; the number of threads is as before in the end.

    Raises :class:`DeviceError` where the simulated accelerator cannot be had.
    """
    sim.install()
    threads = torch.get_num_threads()
    try:
        for case in wanted:
            torch.set_num_threads(case.cores)
            torch.compiler.reset()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Sparse invariant checks", UserWarning)  # of torch's sparse Adagrad
                outcome = _outcome(case, sizes)
            yield outcome
    finally:
        torch.set_num_threads(threads)


def _outcome(case: Case, sizes: Sizes) -> Outcome:
    torch.manual_seed(0)
    model = MODELS[case.model]([sizes.rows] * NUM_TABLES, sizes.dim, sparse=True)
    batch = synthetic_batch(sizes)
    (captured,) = capture(copy.deepcopy(model), (batch.dense, batch.ids))
    cluster = _cluster(case)
    predict = _Layers(captured, cluster, case)
    plan = predict.plan()
    steps = stage_steps(captured.gm, captured.example_inputs, predict.graph, plan, adagrad)
    own = train_step(click_loss, optimizer=adagrad(list(model.parameters())), plan=plan)
    rounds: list[Round] = []
    began = time.monotonic()
    while len(rounds) < sizes.rounds and (not rounds or time.monotonic() - began < sizes.budget_s):
        layers_s = predict.step_s(plan)
        *stages_s, measured_s = in_turns([*steps, lambda: own(model, batch)], sizes.steps)
        rounds.append(Round(layers_s, sum(stages_s), measured_s))
    return Outcome(case=case, batch_size=sizes.batch_size, num_stages=len(plan.stages), rounds=tuple(rounds))


class _Layers:
    """Predictions from layers timed alone."""

    def __init__(self, captured: Captured, cluster: Cluster, case: Case) -> None:
        self.graph = Trace()(captured.gm, captured.example_inputs)
        self._captured, self._cluster, self._case = captured, cluster, case
        lower = Lower(lazy_tables=True)
        self._profile = Profile(
            mode="measure", runs_as=lambda stage: lower(stage).run, make_optimizer=adagrad, simulated=True
        )

    def plan(self) -> Plan:
        """All cores, and the pins of the case; which plan follows from that, so that costs need no measuring."""
        costs = Profile(mode="estimate")(self._captured.gm, self.graph, self._cluster)
        pin = {layer.name: "cpu" if layer.lookups else self._cluster.names()[-1] for layer in self.graph}
        counts = {resource.name: resource.limit for resource in self._cluster}
        request = Request(policy="exact", pin=_escaped(pin), replicas=counts)
        return plan_costs(costs, self._cluster, request)

    def step_s(self, plan: Plan) -> float:
        """Measure the layers and add up: the stages take turns."""
        costs: CostTable = self._profile(self._captured.gm, self.graph, self._cluster)
        model = CostModel.of(costs, self._cluster)
        return sum(stage_times(model, plan.placement, plan.stages)) * costs.batch_size


def in_turns(steps: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """The median seconds of each, after one of each to warm up."""
    taken: list[list[float]] = [[] for _ in steps]
    for index in range(repeats + 1):
        for times, step in zip(taken, steps, strict=True):
            began = time.perf_counter()
            step()
            if index:
                times.append(time.perf_counter() - began)
    return [statistics.median(times) for times in taken]


def synthetic_batch(sizes: Sizes) -> Batch:
    """Uniform ids: most rows are in no cache."""
    generator = torch.Generator().manual_seed(0)
    size = sizes.batch_size
    return Batch(
        dense=torch.randn(size, NUM_DENSE, generator=generator),
        ids=torch.randint(0, sizes.rows, (size, NUM_TABLES), generator=generator),
        labels=torch.rand(size, generator=generator).round(),
    )


def adagrad(parameters: list[Tensor]) -> torch.optim.Optimizer:
    """What every contender trains with."""
    return torch.optim.Adagrad(parameters, lr=0.01)


def _cluster(case: Case) -> Cluster:
    """This machine at its own rates, with as many cores as the case has."""
    local = Cluster.local(simulated=int(case.types == "cpu+sim"))
    kept = tuple(resource for resource in local if resource.device in ("cpu", "sim"))
    return calibrate().applied(Cluster(resources=kept)).with_limits({"cpu": case.cores})


def _escaped(pin: dict[str, str]) -> dict[str, str]:
    """Names as globs that match only themselves."""
    return {name.replace("[", "[[]"): kind for name, kind in pin.items()}
