"""Predictions of a plan recomputed from its stages, by planner and executor alike."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from heterps_compile.cluster import Cluster
from heterps_compile.cost_model import (
    CostModel,
    cost_usd_per_million_samples,
    stage_time_s,
    throughput_samples_per_s,
)
from heterps_compile.costs import CostTable
from heterps_compile.errors import PlanError
from heterps_compile.plans import Plan, Stage
from heterps_compile.provision import Stages


def check_predictions(plan: Plan, costs: CostTable, cluster: Cluster) -> None:
    """Recompute throughput and cost of a plan from its stages. Raises :class:`PlanError` where they differ."""
    if not plan.stages:
        return
    model = CostModel.of(costs, cluster, plan.min_throughput)
    slowest = max(stage_times(model, plan.placement, plan.stages))
    price = sum(cluster[name].price_usd_per_h * count for name, count in plan.provision.items())
    cost = float(cost_usd_per_million_samples(price, slowest))
    for name, given, computed in (
        ("throughput_samples_per_s", plan.throughput_samples_per_s, throughput_samples_per_s(slowest)),
        ("cost_usd_per_million_samples", plan.cost_usd_per_million_samples, cost),
    ):
        if abs(given - computed) > 1e-6 * max(abs(given), abs(computed)):
            raise PlanError(f"the plan says {name} = {given:g}, its stages give {computed:g}")
    reached = plan.throughput_samples_per_s
    if plan.feasible and plan.min_throughput is not None and reached < plan.min_throughput * (1 - 1e-8):
        raise PlanError(f"the plan reaches {reached:g} samples/s, below its floor {plan.min_throughput:g}")


def stage_times(model: CostModel, placement: Mapping[str, str], stages: tuple[Stage, ...]) -> list[float]:
    """Seconds per sample of each stage with the replicas it has."""
    ragged = Stages.of(model, model.indices(placement)[None])
    return [float(t) for t in stage_time_s(ragged.terms, np.array([float(s.replicas) for s in stages]))]
