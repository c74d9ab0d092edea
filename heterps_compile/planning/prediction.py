"""What stages with their replicas are predicted to do: time, memory, money; and what keeps each from being faster.

Enters: a cost model and stages. Leaves: a :class:`Prediction`, from the equations of the cost model alone. Planner and
executor both recompute a plan with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from heterps_compile.cluster import Cluster
from heterps_compile.cost_model import (
    CostModel,
    Floats,
    FullMode,
    fewest_units,
    memory_share,
    part_time_s,
    stage_time_s,
    throughput_samples_per_s,
)
from heterps_compile.costs import CostTable
from heterps_compile.errors import PlanError
from heterps_compile.plans import Plan, Stage, units_of
from heterps_compile.provision import Stages


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """``stages`` with their throughput, memory and what binds them; the rest is that of the whole pipeline."""

    stages: tuple[Stage, ...]
    provision: Mapping[str, int]
    throughput_samples_per_s: float
    price_usd_per_h: float
    cost_usd_per_million_samples: float
    notes: tuple[str, ...] = ()


def predict(model: CostModel, cluster: Cluster, stages: tuple[Stage, ...]) -> Prediction:
    """Time, memory and money of ``stages`` with the replicas they have."""
    ragged = Stages.of(model, model.indices({name: s.resource for s in stages for name in s.layers})[None])
    units = np.array([float(stage.replicas) for stage in stages])
    times = stage_time_s(ragged.terms, units)
    usage: Floats = np.bincount(ragged.kind, units, model.num_types).astype(float)
    pipeline_s = float(ragged.pipeline_s(units)[0])
    described = tuple(
        replace(
            stage,
            throughput_samples_per_s=throughput_samples_per_s(float(times[index])),
            memory_bytes=_memory_bytes(ragged.terms[index], units[index], cluster[stage.resource].memory_bytes),
            bound_by=_bound_by(ragged.terms[index], units[index]),
        )
        for index, stage in enumerate(stages)
    )
    provisioned = units_of(stages)
    return Prediction(
        stages=described,
        provision=provisioned,
        throughput_samples_per_s=throughput_samples_per_s(pipeline_s),
        price_usd_per_h=sum(cluster[name].price_usd_per_h * count for name, count in provisioned.items()),
        cost_usd_per_million_samples=float(model.bill(usage, pipeline_s)),
        notes=_memory_notes(model, ragged, described),
    )


def stage_times(model: CostModel, placement: Mapping[str, str], stages: tuple[Stage, ...]) -> list[float]:
    """Seconds per sample of each stage with the replicas it has."""
    ragged = Stages.of(model, model.indices(placement)[None])
    return [float(t) for t in stage_time_s(ragged.terms, np.array([float(s.replicas) for s in stages]))]


def check_predictions(plan: Plan, costs: CostTable, cluster: Cluster) -> None:
    """Recompute what a plan says of its stages. Raises :class:`PlanError` where it differs or memory is too small."""
    if not plan.stages:
        return
    model = CostModel.of(costs, cluster, plan.min_throughput, full=FullMode.of(plan))
    found = predict(model, cluster, plan.stages)
    for name in ("throughput_samples_per_s", "price_usd_per_h", "cost_usd_per_million_samples"):
        given, computed = getattr(plan, name), getattr(found, name)
        if abs(given - computed) > 1e-6 * max(abs(given), abs(computed)):
            raise PlanError(f"the plan says {name} = {given:g}, its stages give {computed:g}")
    for stage in found.stages:
        memory = cluster[stage.resource].memory_bytes
        if memory and stage.memory_bytes > memory * (1 + 1e-9):
            raise PlanError(
                f"stage {stage.layers[0]}.. needs {stage.memory_bytes:.3g} bytes on each of its {stage.replicas} "
                f"{stage.resource}, which have {memory:.3g}",
                hint="give the stage more replicas, or place a layer of it elsewhere",
            )
    reached = plan.throughput_samples_per_s
    if plan.feasible and plan.min_throughput is not None and reached < plan.min_throughput * (1 - 1e-8):
        raise PlanError(f"the plan reaches {reached:g} samples/s, below its floor {plan.min_throughput:g}")


def _memory_bytes(terms: Floats, units: float, memory_bytes: float) -> float:
    """Of one unit; 0 where the cost model does not know."""
    known = len(terms) > 4 and memory_bytes > 0
    return float(memory_share(terms, np.array(units))) * memory_bytes if known else 0.0


def _bound_by(terms: Floats, units: float) -> str:
    """What asks for the units there are: memory if one fewer would not hold the stage, else the longer time."""
    if len(terms) > 4 and units > 1 and memory_share(terms, np.array(units - 1)) > 1:
        return "memory"
    compute = float(part_time_s(terms[0], terms[1], np.array(units)))
    return "compute" if compute >= float(stage_time_s(terms, np.array(units))) else "communication"


def _memory_notes(model: CostModel, ragged: Stages, stages: tuple[Stage, ...]) -> tuple[str, ...]:
    """Units beyond what the floor asks for, rented for memory: they are the parameter servers of a stage's tables."""
    if model.full is None or model.min_throughput is None:
        return ()
    terms = ragged.terms.copy()
    terms[:, 6:] = 0.0
    enough = fewest_units(terms, ragged.stage_limit_s(np.array([model.slowest_s])))
    return tuple(
        f"stage {index + 1} would reach the floor with {int(count)} {stage.resource}; {stage.replicas} are rented to "
        "hold and serve its tables, shared row by row"
        for index, (stage, count) in enumerate(zip(stages, enough, strict=True))
        if stage.bound_by == "memory" and count < stage.replicas
    )
