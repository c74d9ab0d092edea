"""A run of a plan, event by event: microbatches flow through stages of replicas, with links and jitter.

Enters: what a replica of each stage takes for its share of a microbatch, a load, a seed. Leaves: what throughput such a
pipeline reaches, beside the formula's. Refused: stages without replicas, fewer than two microbatches, jitter out of
range. ``m`` is a microbatch, ``s`` a stage, ``k`` its replicas. Every replica has a link and a unit; both take
microbatches in order, so the link fetches the next one while the unit computes::

    fetched[m] = max(ready[m, s],  fetched[m - 1]) + communication      ready[m, 0] = 0
    end[m]     = max(fetched[m],   end[m - 1])     + compute            ready[m, s + 1] = done[m, s] + delay

``split``, the default, cuts a microbatch over all ``k`` replicas and is done when the last of them is: that is what
``OCT/B (1 - alpha + alpha/k)`` means, a batch on ``k`` units. ``whole`` gives microbatch ``m`` to replica ``m mod k``,
each taking ``k`` times as long: the same throughput once the pipeline is full, since ``k`` of them are under way, but
``k`` times as long to fill and drain. Nothing bounds how far a stage runs ahead; the end of the run is where all wait
for the slowest, as before an all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from heterps_compile.cluster import Cluster
from heterps_compile.cost_model import (
    CostModel,
    FullMode,
    part_time_s,
    pipeline_stretch,
    stage_time_s,
    throughput_samples_per_s,
)
from heterps_compile.cost_terms import cut_bytes
from heterps_compile.costs import CostTable
from heterps_compile.errors import OptionError, PlanError
from heterps_compile.plans import Plan
from heterps_compile.provision import Stages

Times = npt.NDArray[np.float64]
Dispatch = Literal["split", "whole"]

AT_ONCE = 2**20
"""Microbatch-replica pairs worked on together: 8 MB an array, which stays in the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStage:
    """Times of one replica for its share of a microbatch; ``delay_s``: until the output is at the next stage."""

    replicas: int
    compute_s: float
    communication_s: float = 0.0
    delay_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What flows through: ``microbatches`` of ``samples`` each.

    ``jitter`` is the standard deviation of every single time over its mean. Raises :class:`OptionError`.
    """

    microbatches: int = 1000
    samples: float = 1.0
    jitter: float = 0.0
    seed: int = 0
    dispatch: Dispatch = "split"

    def __post_init__(self) -> None:
        if self.microbatches < 2:
            raise OptionError(f"microbatches is {self.microbatches} (allowed: a whole number >= 2)")
        if not 0 <= self.jitter <= 1:
            raise OptionError(f"jitter is {self.jitter:g} (allowed: from 0 to 1, such as 0.1 for 10 %)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """Samples per second: with the pipeline full, and over the whole run; each as predicted and as it ran.

    ``fill_share`` of the run passes before the last stage starts, ``drain_share`` after the first stage has ended.
    ``busy`` is the share of the run in which a replica's unit, or its link if that works more, is at work.
    """

    predicted_samples_per_s: float
    throughput_samples_per_s: float
    predicted_overall_samples_per_s: float
    overall_samples_per_s: float
    makespan_s: float
    fill_share: float
    drain_share: float
    busy: tuple[float, ...]

    @property
    def error(self) -> float:
        """Prediction over simulation, minus 1."""
        return self.predicted_samples_per_s / self.throughput_samples_per_s - 1


@dataclass(frozen=True, slots=True)
class _Passage:
    """One stage over the run: when each microbatch was done, when computing began and ended, work per replica."""

    done: Times
    began_s: float
    ended_s: float
    worked_s: float


def simulate(stages: tuple[SimulatedStage, ...], load: Load) -> Simulation:
    """Run ``load`` through ``stages``.

    Raises :class:`PlanError` for no stages and for a stage without replicas,
    :class:`OptionError` for fewer whole microbatches than replicas.
    """
    if not stages:
        raise PlanError("a plan without stages runs nothing (allowed: at least 1 stage)")
    for index, stage in enumerate(stages):
        if stage.replicas < 1:
            raise PlanError(f"stage {index} has {stage.replicas} replicas (allowed: 1 or more)")
        if load.dispatch == "whole" and load.microbatches <= stage.replicas:
            raise OptionError(
                f"microbatches is {load.microbatches}, dealt out whole to the {stage.replicas} replicas of stage "
                f"{index} (allowed: more than {stage.replicas}, or some never work)"
            )
    rng = np.random.default_rng(load.seed)
    ready = np.zeros(load.microbatches)
    passages = []
    for stage in stages:
        passage = _split(stage, ready, load, rng) if load.dispatch == "split" else _whole(stage, ready, load, rng)
        passages.append(passage)
        ready = passage.done + stage.delay_s
    makespan_s = max(passage.ended_s for passage in passages)
    run_s = max(makespan_s, 1e-300)  # stages that take no time
    slowest_s = max(_formula_s(stage, load) for stage in stages)
    stretch = float(pipeline_stretch(np.array(len(stages)), load.microbatches))
    return Simulation(
        predicted_samples_per_s=throughput_samples_per_s(slowest_s),
        predicted_overall_samples_per_s=throughput_samples_per_s(slowest_s * stretch),
        throughput_samples_per_s=throughput_samples_per_s(_interval_s(passages[-1].done) / load.samples),
        overall_samples_per_s=throughput_samples_per_s(makespan_s / load.microbatches / load.samples),
        makespan_s=makespan_s,
        fill_share=passages[-1].began_s / run_s,
        drain_share=1 - passages[0].ended_s / run_s if makespan_s else 0.0,
        busy=tuple(passage.worked_s / run_s for passage in passages),
    )


def simulate_plan(plan: Plan, costs: CostTable, cluster: Cluster | None = None, load: Load = Load()) -> Simulation:
    """Run a plan on its own costs; a microbatch is what the plan cuts a batch into, whatever ``load`` says.

    Raises :class:`PlanError` for a plan of other layers, other types or none.
    """
    fleet = cluster or costs.cluster()
    plan.validate(costs, fleet)
    load = replace(load, samples=costs.batch_size / plan.microbatches)
    return simulate(_stages(plan, costs, fleet, load) if plan.stages else (), load)


def _stages(plan: Plan, costs: CostTable, fleet: Cluster, load: Load) -> tuple[SimulatedStage, ...]:
    """Stages with CT and DT of the cost model, at the replicas of the plan.

    What a ``full`` model adds to max(CT, DT), such as the all-reduce, holds unit and link alike.
    """
    model = CostModel.of(costs, fleet, plan.min_throughput, full=FullMode.of(plan))
    terms = Stages.of(model, model.indices(plan.placement)[None]).terms
    replicas = np.array([float(stage.replicas) for stage in plan.stages])
    compute, communication = (part_time_s(terms[:, i], terms[:, i + 1], replicas) for i in (0, 2))
    added = stage_time_s(terms, replicas) - np.maximum(compute, communication)
    share = load.samples * (replicas if load.dispatch == "whole" else np.ones_like(replicas))
    return tuple(
        SimulatedStage(
            replicas=stage.replicas,
            compute_s=float((compute + added)[index] * share[index]),
            communication_s=float((communication + added)[index] * share[index]),
            delay_s=_delay_s(plan, costs, fleet, index, load) if model.between is None else 0.0,
        )
        for index, stage in enumerate(plan.stages)
    )


def _delay_s(plan: Plan, costs: CostTable, fleet: Cluster, index: int, load: Load) -> float:
    """Latency and time on the link of what a replica of stage ``index`` sends to the next one, for one microbatch.

    In ``paper`` mode no formula knows it, so it delays a microbatch and holds nobody; ``full`` mode counts it in DT.
    """
    if index + 1 == len(plan.stages):
        return 0.0
    link = fleet.link(plan.stages[index].resource, plan.stages[index + 1].resource)
    crossing = float(cut_bytes(costs)[sum(len(stage.layers) for stage in plan.stages[: index + 1])])
    senders = plan.stages[index].replicas if load.dispatch == "split" else 1
    return link.latency_s + crossing * load.samples / senders / link.bandwidth_bytes_per_s


def _formula_s(stage: SimulatedStage, load: Load) -> float:
    """ET of a stage, seconds per sample: the longer of computing and communicating (HeterPS)."""
    under_way = stage.replicas if load.dispatch == "whole" else 1
    return max(stage.compute_s, stage.communication_s) / under_way / load.samples


def _split(stage: SimulatedStage, ready: Times, load: Load, rng: np.random.Generator) -> _Passage:
    """Every replica takes its part of every microbatch."""
    done = np.zeros(len(ready))
    began_s, worked_s = np.inf, 0.0
    width = max(1, AT_ONCE // len(ready))
    for first in range(0, stage.replicas, width):
        shape = (len(ready), min(width, stage.replicas - first))
        compute, communication = (_times(t, shape, load, rng) for t in (stage.compute_s, stage.communication_s))
        ends = _in_order(_in_order(ready[:, None], communication), compute)
        done = np.maximum(done, ends.max(axis=1))
        began_s = min(began_s, float((ends[0] - compute[0]).min()))
        worked_s += max(float(compute.sum()), float(communication.sum()))
    return _Passage(done, began_s, float(done.max()), worked_s / stage.replicas)


def _whole(stage: SimulatedStage, ready: Times, load: Load, rng: np.random.Generator) -> _Passage:
    """Microbatch ``m`` goes to replica ``m mod k``: one column per replica, one row per round."""
    count = len(ready)
    rounds = -(-count // stage.replicas)
    empty = rounds * stage.replicas - count  # the last round may leave replicas without work
    rows = np.pad(ready, (0, empty), mode="edge").reshape(rounds, stage.replicas)
    times = [_times(t, rows.shape, load, rng) for t in (stage.compute_s, stage.communication_s)]
    if empty:
        for values in times:
            values[-1, -empty:] = 0.0
    compute, communication = times
    ends = _in_order(_in_order(rows, communication), compute)
    done = ends.reshape(-1)[:count]
    worked_s = max(float(compute.sum()), float(communication.sum())) / stage.replicas
    return _Passage(done, float((ends[0] - compute[0]).min()), float(done.max()), worked_s)


def _in_order(ready: Times, times: Times) -> Times:
    """When each is done, one served after the other down a column: ``end[i] = max(ready[i], end[i-1]) + times[i]``.

    Unrolled: ``end[i] = max over j <= i of ready[j] + times[j] + ... + times[i]`` (Lindley 1952).
    """
    total = np.cumsum(times, axis=0)
    waits: Times = np.maximum.accumulate(ready - (total - times), axis=0)
    return total + waits


def _times(mean_s: float, shape: tuple[int, ...], load: Load, rng: np.random.Generator) -> Times:
    """Times with mean ``mean_s``: gamma distributed, so never negative and with a long tail."""
    if load.jitter <= 0 or mean_s <= 0:
        return np.full(shape, mean_s)
    form = 1 / load.jitter**2
    return rng.gamma(form, mean_s / form, shape)


def _interval_s(done: Times) -> float:
    """Seconds from one microbatch to the next with the pipeline full: the slope through the middle half of the run."""
    edge = len(done) // 4
    middle = np.sort(done)[edge : len(done) - edge]
    order = np.arange(len(middle)) - (len(middle) - 1) / 2
    return float(order @ (middle - middle.mean()) / (order @ order))
