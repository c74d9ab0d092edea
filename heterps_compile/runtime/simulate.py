"""A discrete-event run of a plan: microbatches flow through stages of replicas, with links and jitter.

Enters: stage times of one microbatch, replicas, transfer times, jitter, a seed. Leaves: what throughput such a
pipeline reaches, beside the formula's prediction. Refused: stages without replicas. Microbatch m waits for its own
data and for a free replica of the stage; the replica that is free first takes it. Communication of a microbatch
overlaps with computing the next one, as the cost model says, so a replica's time per microbatch is the longer of the
two.

    start[m, s] = max(arrival[m, s], earliest free replica of s),   arrival[m, s + 1] = start + time + transfer
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from heterps_compile.cluster import Cluster
from heterps_compile.cost_model import CostModel, stage_time_s
from heterps_compile.costs import CostTable
from heterps_compile.errors import PlanError
from heterps_compile.plans import Plan
from heterps_compile.provision import Stages

Times = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStage:
    """``busy_s``: time of a replica for a microbatch; ``transfer_s``: until its output is at the next stage."""

    replicas: int
    busy_s: float
    transfer_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """Samples per second with the pipeline full and over the whole run; ``busy``: share of time of each stage."""

    throughput_samples_per_s: float
    overall_samples_per_s: float
    predicted_samples_per_s: float
    makespan_s: float
    busy: tuple[float, ...]

    @property
    def error(self) -> float:
        """Prediction over simulation, minus 1."""
        return self.predicted_samples_per_s / self.throughput_samples_per_s - 1


def simulate(
    stages: tuple[SimulatedStage, ...], num_microbatches: int, samples: float, jitter: float = 0.0, seed: int = 0
) -> Simulation:
    """Run ``num_microbatches`` of ``samples`` each; ``jitter`` is the relative standard deviation of each busy time.

    Raises :class:`PlanError` for a stage without replicas or fewer than two microbatches.
    """
    for index, stage in enumerate(stages):
        if stage.replicas < 1:
            raise PlanError(f"stage {index} has {stage.replicas} replicas (allowed: 1 or more)")
    if not stages or num_microbatches < 2:
        raise PlanError(
            f"{len(stages)} stages, {num_microbatches} microbatches (allowed: at least 1 stage, 2 microbatches)"
        )
    rng = np.random.default_rng(seed)
    ready = np.zeros(num_microbatches)
    busy = []
    for stage in stages:
        times = _times(stage, num_microbatches, jitter, rng)
        ready = _through(stage, ready, times)
        busy.append(float(times.sum()) / stage.replicas)
    done = np.sort(ready)
    predicted = min(stage.replicas * samples / stage.busy_s for stage in stages if stage.busy_s > 0)
    return Simulation(
        throughput_samples_per_s=_steady(done, samples, max(stage.replicas for stage in stages)),
        overall_samples_per_s=num_microbatches * samples / float(done[-1]),
        predicted_samples_per_s=predicted,
        makespan_s=float(done[-1]),
        busy=tuple(total / float(done[-1]) for total in busy),
    )


def simulate_plan(
    plan: Plan,
    costs: CostTable,
    cluster: Cluster | None = None,
    num_microbatches: int | None = None,
    jitter: float = 0.0,
    seed: int = 0,
) -> Simulation:
    """Run a plan whose replicas take a microbatch each in turn.

    The busy time of a replica of a stage with k replicas is ``k`` times the stage's time per sample, so that the serial
    parts of Amdahl's law stay in. A microbatch is ``batch_size`` samples. Links move what ``costs.edges`` says.
    """
    fleet = cluster or costs.cluster()
    model = CostModel.of(costs, fleet, plan.min_throughput)
    ragged = Stages.of(model, model.indices(plan.placement)[None])
    times = stage_time_s(ragged.terms, np.array([float(stage.replicas) for stage in plan.stages]))
    stages = tuple(
        SimulatedStage(
            replicas=stage.replicas,
            busy_s=float(time_s) * costs.batch_size * stage.replicas,
            transfer_s=_transfer_s(plan, costs, fleet, index),
        )
        for index, (stage, time_s) in enumerate(zip(plan.stages, times, strict=True))
    )
    count = num_microbatches or 20 * max(stage.replicas for stage in stages) + 10 * len(stages)
    return simulate(stages, count, costs.batch_size, jitter, seed)


def _transfer_s(plan: Plan, costs: CostTable, cluster: Cluster, index: int) -> float:
    """Latency and time on the link of what stage ``index`` sends to the next one, for one batch."""
    if index + 1 == len(plan.stages):
        return 0.0
    before = {name for stage in plan.stages[: index + 1] for name in stage.layers}
    crossing = sum(edge.bytes_per_sample for edge in costs.edges if edge.source in before and edge.target not in before)
    link = cluster.link(plan.stages[index].resource, plan.stages[index + 1].resource)
    return link.latency_s + crossing * costs.batch_size / link.bandwidth_bytes_per_s


def _times(stage: SimulatedStage, count: int, jitter: float, rng: np.random.Generator) -> Times:
    """Busy times with mean ``busy_s``: gamma distributed, so never negative and with a long tail."""
    if jitter <= 0:
        return np.full(count, stage.busy_s)
    shape = 1 / jitter**2
    return rng.gamma(shape, stage.busy_s / shape, count)


def _through(stage: SimulatedStage, ready: Times, times: Times) -> Times:
    """When each microbatch arrives at the next stage; those that arrive first are served first."""
    free = [0.0] * stage.replicas
    done = np.empty(len(ready))
    for index in np.argsort(ready, kind="stable").tolist():
        end = max(ready[index], heapq.heappop(free)) + times[index]
        heapq.heappush(free, end)
        done[index] = end + stage.transfer_s
    return done


def _steady(done: Times, samples: float, widest: int) -> float:
    """Throughput between the first and the last whole rounds of the widest stage: without filling and draining."""
    skip = min(len(done) // 4, widest * math.ceil(len(done) / 8 / widest))
    last = len(done) - 1 - skip
    span = float(done[last] - done[skip])
    return (last - skip) * samples / span if span > 0 else float("inf")
