"""From a decision to a plan: stages, units, predictions, alternatives; or the best that can be reached instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata

import numpy as np

from heterps_compile.cluster import Cluster
from heterps_compile.cost_model import CostModel, Ints, throughput_samples_per_s
from heterps_compile.costs import CostTable
from heterps_compile.errors import InfeasibleError
from heterps_compile.passes.fuse import Fuse
from heterps_compile.passes.place import Found, fastest
from heterps_compile.passes.place.exact import exact as exact_policy
from heterps_compile.passes.place.rules import RULES, candidates
from heterps_compile.planning.decision import SAME, Decision
from heterps_compile.planning.prediction import predict, stage_times
from heterps_compile.planning.reasons import reasons
from heterps_compile.planning.request import Request
from heterps_compile.plans import Alternative, Plan, Stage
from heterps_compile.provision import Provision, provision
from heterps_compile.static_ratio import Served, sta_ps_ratio, sta_ratio


def plan_of(
    model: CostModel,
    decision: Decision,
    stages: tuple[Stage, ...],
    costs: CostTable,
    cluster: Cluster,
    request: Request,
) -> Plan:
    """Everything but the time it took."""
    found = predict(model, cluster, stages)
    chosen = decision.found.chosen
    others = {name: _alternative(model, other) for name, other in decision.alternatives.items()}
    if request.compare and chosen is not None:
        others |= _fixed_ratios(model, decision, costs, cluster)
    full = model.full
    return Plan(
        placement={name: stage.resource for stage in stages for name in stage.layers},
        stages=found.stages,
        provision=found.provision,
        policy=decision.policy,
        seed=request.seed,
        min_throughput=model.min_throughput,
        mode=request.mode,
        microbatches=full.microbatches if full else 1,
        samples=request.samples,
        data_rate=full.data_rate if full else None,
        without=full.without if full else (),
        batch_size=costs.batch_size,
        throughput_samples_per_s=found.throughput_samples_per_s,
        price_usd_per_h=found.price_usd_per_h,
        cost_usd_per_million_samples=found.cost_usd_per_million_samples,
        optimum_usd_per_million_samples=decision.optimum if np.isfinite(decision.optimum) else 0.0,
        optimum_proven=decision.proven and bool(np.isfinite(decision.optimum)),
        gap_to_optimum=_gap(found.cost_usd_per_million_samples, decision.optimum),
        alternatives=others,
        resources=cluster.resources,
        reasons=reasons(model, chosen, costs) if chosen is not None else (),
        notes=(*found.notes, *decision.notes),
        sources=_sources(costs, stages),
        versions={"heterps-compile": _version("heterps-compile"), "numpy": np.__version__},
    )


def infeasible(model: CostModel, decision: Decision, costs: CostTable, cluster: Cluster, request: Request) -> Plan:
    """The best that can be reached instead, and what binds. Raises :class:`InfeasibleError` when nothing fits."""
    options = [model]
    exact = decision.found if decision.policy == "exact" else decision.alternatives.get("exact", decision.found)
    if decision.policy in RULES:
        options = [
            model.restricted(np.arange(model.num_types) == row[:, None]) for row in candidates(decision.policy, model)
        ]
    reached = max(
        (fastest(option, request.time_limit_s) for option in options), key=lambda r: r.throughput_samples_per_s
    )
    binds = (*reached.binds, *_pins_that_bind(model, costs, cluster, request))
    if np.isfinite(exact.cost):
        binds = (
            *binds,
            f"policy {decision.policy}; exact reaches the floor at {exact.cost:.4g} USD per million samples",
        )
    if reached.chosen is None:
        raise InfeasibleError(f"no placement fits the limits at any throughput; in the way: {'; '.join(binds)}")
    slower = replace(model, min_throughput=reached.throughput_samples_per_s)
    stages = stages_of(slower, reached.chosen, costs)
    at = replace(decision, found=Found(chosen=None), optimum=float("inf"), proven=False)
    plan = plan_of(slower, at, stages, costs, cluster, request)
    return replace(plan, feasible=False, min_throughput=model.min_throughput, binds=binds)


def _pins_that_bind(model: CostModel, costs: CostTable, cluster: Cluster, request: Request) -> tuple[str, ...]:
    """The pins, where the floor is within reach without them."""
    if not request.pin:
        return ()
    free = CostModel.of(costs, cluster, model.min_throughput, None, model.full)
    if exact_policy(free, time_limit_s=request.time_limit_s, first=True).chosen is None:
        return ()
    return ("the pins " + ", ".join(f"{glob}={kind}" for glob, kind in request.pin.items()),)


def topped_up(plan: Plan, model: CostModel, cluster: Cluster, replicas: Mapping[str, int]) -> Plan:
    """Give the units that ``replicas`` forces beyond the plan's to the slowest stages of their type."""
    units = [stage.replicas for stage in plan.stages]
    for name, wanted in replicas.items():
        mine = [index for index, stage in enumerate(plan.stages) if stage.resource == name]
        while mine and sum(units[i] for i in mine) < wanted:
            times = stage_times(model, plan.placement, _with_units(plan.stages, units))
            units[max(mine, key=lambda i: times[i])] += 1
    found = predict(model, cluster, _with_units(plan.stages, units))
    forced = ", ".join(f"{count} {name}" for name, count in replicas.items())
    extra = found.cost_usd_per_million_samples / plan.cost_usd_per_million_samples - 1
    missed = found.throughput_samples_per_s < (model.min_throughput or 0.0) * (1 - SAME)
    idle = [name for name, count in replicas.items() if count and name not in found.provision]
    notes = (
        f"units were forced: {forced}; that costs {extra:+.1%}",
        *(f"{name} has no layers, so none are rented" for name in idle),
    )
    return replace(
        plan,
        stages=found.stages,
        provision=found.provision,
        throughput_samples_per_s=found.throughput_samples_per_s,
        price_usd_per_h=found.price_usd_per_h,
        cost_usd_per_million_samples=found.cost_usd_per_million_samples,
        optimum_usd_per_million_samples=0.0,  # the optimum of all fleets says nothing of one with forced units
        optimum_proven=False,
        gap_to_optimum=0.0,
        alternatives={},
        reasons=(),
        feasible=not missed,
        binds=(f"the forced units ({forced}): replicas are in each other's way",) if missed else (),
        notes=(*plan.notes, *notes),
    )


def stages_of(model: CostModel, chosen: Ints, costs: CostTable) -> tuple[Stage, ...]:
    """The stages of a placement with the cheapest whole units."""
    made = provision(model, chosen)
    assert made is not None, "a placement was taken that cannot be provisioned"
    return _with_units(Fuse()(model.named(chosen), costs), made.units.tolist())


def _alternative(model: CostModel, found: Found) -> Alternative:
    made = provision(model, found.chosen) if found.chosen is not None else None
    if made is None:
        return Alternative(feasible=False)
    return Alternative(
        feasible=True,
        cost_usd_per_million_samples=made.cost_usd_per_million_samples,
        throughput_samples_per_s=throughput_samples_per_s(made.slowest_s),
        price_usd_per_h=made.price_usd_per_h,
    )


def _fixed_ratios(model: CostModel, decision: Decision, costs: CostTable, cluster: Cluster) -> dict[str, Alternative]:
    """What the same placement costs with units in fixed ratios, as the paper's baselines provision."""
    chosen = decision.found.chosen
    if chosen is None:
        return {}
    found: dict[str, Provision | Served | None] = {"StaRatio": sta_ratio(model, chosen)}
    servers = [resource for resource in cluster if not resource.is_accelerator]
    if servers:
        server = min(servers, key=lambda resource: resource.price_usd_per_h)
        found["StaPSRatio"] = sta_ps_ratio(model, chosen, costs, server)
    return {f"{decision.policy}, units by {name}": _by_ratio(made) for name, made in found.items()}


def _by_ratio(made: Provision | Served | None) -> Alternative:
    if made is None:
        return Alternative(feasible=False)
    workers = made.workers if isinstance(made, Served) else made
    return Alternative(
        feasible=True,
        cost_usd_per_million_samples=made.cost_usd_per_million_samples,
        throughput_samples_per_s=throughput_samples_per_s(workers.slowest_s),
        price_usd_per_h=made.price_usd_per_h,
    )


def _gap(cost: float, optimum: float) -> float:
    if not optimum > 0 or not np.isfinite(optimum):
        return 0.0
    gap = cost / optimum - 1
    return gap if abs(gap) > SAME else 0.0


def _with_units(stages: tuple[Stage, ...], units: list[int]) -> tuple[Stage, ...]:
    return tuple(replace(stage, replicas=count) for stage, count in zip(stages, units, strict=True))


def _sources(costs: CostTable, stages: tuple[Stage, ...]) -> Mapping[str, str]:
    """For each type used, whether the times of its layers were measured, estimated or given."""
    found: dict[str, set[str]] = {}
    for stage in stages:
        for name in stage.layers:
            found.setdefault(stage.resource, set()).add(costs[name][stage.resource].source)
    return {name: next(iter(kinds)) if len(kinds) == 1 else "mixed" for name, kinds in found.items()}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"
