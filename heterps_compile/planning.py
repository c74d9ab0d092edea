"""place -> fuse -> provision -> validate: from a cost table to a plan with its cost and its gap to the optimum.

Enters: a cost table, a cluster, a throughput floor, pins. Leaves: a :class:`Plan`, feasible or not, with its gap to the
proven optimum, the alternatives, and why each layer is where it is. Refused: pins and counts that contradict the
cluster.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata

import numpy as np

from heterps_compile.cluster import Cluster
from heterps_compile.cost_model import (
    CostModel,
    Ints,
    cost_usd_per_million_samples,
    stage_time_s,
    throughput_samples_per_s,
)
from heterps_compile.costs import CostTable
from heterps_compile.errors import InfeasibleError, OptionError, PlanError
from heterps_compile.passes.fuse import Fuse
from heterps_compile.passes.place import POLICIES, Found, fastest, num_placements, policy_named
from heterps_compile.passes.place.rules import RULES, candidates
from heterps_compile.plans import Alternative, Plan, Reason, Stage, units_of
from heterps_compile.provision import Stages, provision, score

CHEAP_POLICIES = ("cpu-only", "gpu-only", "heuristic", "greedy")
MAX_COMPARED_PLACEMENTS = 2_000_000
"""Brute force is left out of a comparison above this."""
MAX_REASON_CELLS = 20_000_000
SAME = 1e-9
"""Relative difference below which two costs are the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Decision:
    """What place found: the placement taken, its policy, the optimum or its bound, and the alternatives."""

    policy: str
    found: Found
    optimum: float
    proven: bool
    alternatives: Mapping[str, Found]
    notes: tuple[str, ...] = ()


def plan_costs(
    costs: CostTable,
    cluster: Cluster | None = None,
    min_throughput: float | None = None,
    policy: str | None = None,
    seed: int = 0,
    pin: Mapping[str, str] | None = None,
    replicas: Mapping[str, int] | None = None,
    *,
    compare: bool = False,
    quick: bool = False,
    time_limit_s: float = 60.0,
) -> Plan:
    """Plan a cost table with the paper's cost model; ``feasible=False`` says what is reachable and what binds.

    Without ``policy`` both ``rl`` and ``exact`` run and the cheaper is taken (``exact`` alone if ``quick`` and it
    proves the optimum); a named policy is taken as it is. ``replicas`` forces the units of a type. ``compare`` runs
    every policy. Raises :class:`OptionError` for unknown policies, types and globs, :class:`PlanError` for a layer that
    can run nowhere, :class:`InfeasibleError` where no placement fits at any throughput.
    """
    started = time.perf_counter()
    if policy is not None:
        policy_named(policy)
    fleet = _forced(cluster or costs.cluster(), replicas or {})
    model = CostModel.of(costs, fleet, min_throughput, pin)
    if not model.layers:
        return Plan(placement={}, stages=(), provision={}, policy=policy or "exact", seed=seed, optimum_proven=True)
    decision = _decide(model, policy, seed, compare, quick, time_limit_s)
    if decision.found.chosen is None:
        plan = _infeasible(model, decision, costs, fleet, seed, time_limit_s)
    else:
        stages = _stages(model, decision.found.chosen, costs)
        plan = _plan(model, decision, stages, costs, fleet, seed)
    if replicas and plan.feasible:
        plan = _topped_up(plan, model, replicas)
    plan = replace(plan, planning_s=time.perf_counter() - started)
    plan.validate(costs, fleet)
    check_predictions(plan, costs, fleet)
    return plan


def check_predictions(plan: Plan, costs: CostTable, cluster: Cluster) -> None:
    """Recompute throughput and cost of a plan from its stages. Raises :class:`PlanError` where they differ."""
    if not plan.stages:
        return
    model = CostModel.of(costs, cluster, plan.min_throughput)
    slowest = max(_stage_times(model, plan.placement, plan.stages))
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


def _forced(cluster: Cluster, replicas: Mapping[str, int]) -> Cluster:
    for name, count in replicas.items():
        if count > cluster[name].limit:
            raise OptionError(f"replicas asks for {count} units of {name}, over its limit {cluster[name].limit}")
    return cluster.with_limits(replicas) if replicas else cluster


def _decide(
    model: CostModel, policy: str | None, seed: int, compare: bool, quick: bool, time_limit_s: float
) -> _Decision:
    if policy in RULES and not candidates(policy, model):
        raise InfeasibleError(
            f"policy {policy} has no placement: a type it needs is missing, or a layer cannot run there",
            hint=f"the cluster has {', '.join(model.types)}",
        )
    if num_placements(model) == 1:
        return _only_choice(model, policy)
    runs: dict[str, Found] = {"exact": POLICIES["exact"](model, seed, time_limit_s)}
    names = [name for name in CHEAP_POLICIES if not (quick and name == "greedy")]
    if compare:
        small = num_placements(model) <= MAX_COMPARED_PLACEMENTS
        names = [name for name in POLICIES if name != "brute-force" or small]
    wants_rl = policy is None and not (quick and runs["exact"].lower_bound >= runs["exact"].cost)
    for name in dict.fromkeys([*names, *([policy] if policy else []), *(["rl"] if wants_rl else [])]):
        if name not in runs and np.isfinite(runs["exact"].lower_bound):
            runs[name] = POLICIES[name](model, seed, time_limit_s)
    least = min(runs.values(), key=lambda found: found.cost)
    proven = runs["exact"].lower_bound >= least.cost * (1 - SAME)
    optimum = least.cost if proven else runs["exact"].lower_bound
    taken, notes = _take(policy, runs, quick, proven)
    return _Decision(
        policy=taken,
        found=runs.get(taken, runs["exact"]) if np.isfinite(runs["exact"].lower_bound) else runs["exact"],
        optimum=optimum,
        proven=proven,
        alternatives={name: found for name, found in runs.items() if name != taken},
        notes=(*notes, *runs["exact"].notes),
    )


def _only_choice(model: CostModel, policy: str | None) -> _Decision:
    chosen = model.allowed.argmax(axis=1)
    made = provision(model, chosen)
    cost = made.cost_usd_per_million_samples if made else float("inf")
    found = Found(chosen=chosen if made else None, cost=cost, lower_bound=cost)
    return _Decision(policy=policy or "exact", found=found, optimum=cost, proven=True, alternatives={})


def _take(policy: str | None, runs: Mapping[str, Found], quick: bool, proven: bool) -> tuple[str, tuple[str, ...]]:
    """The name of the policy whose placement is taken, and what there is to say about that."""
    cheapest = min(runs, key=lambda name: runs[name].cost)
    if policy is not None:
        mine = runs.get(policy)
        if mine is None or mine.cost <= runs[cheapest].cost * (1 + SAME) or not np.isfinite(mine.cost):
            return policy, ()
        excess = mine.cost / runs[cheapest].cost - 1
        return policy, (f"{policy} costs {excess:.2%} more than {cheapest}; taken because it was asked for",)
    rl = runs.get("rl")
    if rl is None:
        return "exact", ("exact proved the optimum, so rl was not run",) if quick and proven else ()
    if rl.cost <= runs[cheapest].cost * (1 + SAME):
        return "rl", ()
    if not np.isfinite(rl.cost):
        return cheapest, (f"rl found no placement that reaches the floor; {cheapest} did and is taken",)
    return cheapest, (f"rl costs {rl.cost / runs[cheapest].cost - 1:.2%} more than {cheapest}, which is taken",)


def _stages(model: CostModel, chosen: Ints, costs: CostTable) -> tuple[Stage, ...]:
    made = provision(model, chosen)
    assert made is not None, "a placement was taken that cannot be provisioned"
    return tuple(
        replace(stage, replicas=int(units), throughput_samples_per_s=throughput_samples_per_s(float(time_s)))
        for stage, units, time_s in zip(Fuse()(model.named(chosen), costs), made.units, made.stage_s, strict=True)
    )


def _plan(
    model: CostModel, decision: _Decision, stages: tuple[Stage, ...], costs: CostTable, cluster: Cluster, seed: int
) -> Plan:
    """Everything but the time it took."""
    provisioned = units_of(stages)
    price = sum(cluster[name].price_usd_per_h * count for name, count in provisioned.items())
    slowest = max(_stage_times(model, {n: s.resource for s in stages for n in s.layers}, stages))
    cost = float(cost_usd_per_million_samples(price, slowest))
    chosen = decision.found.chosen
    return Plan(
        placement={name: stage.resource for stage in stages for name in stage.layers},
        stages=stages,
        provision=provisioned,
        policy=decision.policy,
        seed=seed,
        min_throughput=model.min_throughput,
        batch_size=costs.batch_size,
        throughput_samples_per_s=throughput_samples_per_s(slowest),
        price_usd_per_h=price,
        cost_usd_per_million_samples=cost,
        optimum_usd_per_million_samples=decision.optimum if np.isfinite(decision.optimum) else 0.0,
        optimum_proven=decision.proven and bool(np.isfinite(decision.optimum)),
        gap_to_optimum=_gap(cost, decision.optimum),
        alternatives={name: _alternative(model, found) for name, found in decision.alternatives.items()},
        resources=cluster.resources,
        reasons=_reasons(model, chosen, costs) if chosen is not None else (),
        notes=decision.notes,
        sources=_sources(costs, stages),
        versions={"heterps-compile": _version("heterps-compile"), "numpy": np.__version__},
    )


def _gap(cost: float, optimum: float) -> float:
    if not optimum > 0 or not np.isfinite(optimum):
        return 0.0
    gap = cost / optimum - 1
    return gap if abs(gap) > SAME else 0.0


def _infeasible(
    model: CostModel, decision: _Decision, costs: CostTable, cluster: Cluster, seed: int, time_limit_s: float
) -> Plan:
    """The best that can be reached instead, and what binds. Raises :class:`InfeasibleError` when nothing fits."""
    options = [model]
    exact = decision.found if decision.policy == "exact" else decision.alternatives.get("exact", decision.found)
    if decision.policy in RULES:
        options = [
            model.restricted(np.arange(model.num_types) == row[:, None]) for row in candidates(decision.policy, model)
        ]
    reached = max((fastest(option, time_limit_s) for option in options), key=lambda r: r.throughput_samples_per_s)
    binds = reached.binds
    if np.isfinite(exact.cost):
        binds = (
            *binds,
            f"policy {decision.policy}; exact reaches the floor at {exact.cost:.4g} USD per million samples",
        )
    if reached.chosen is None:
        raise InfeasibleError(f"no placement fits the limits at any throughput: {'; '.join(binds)} binds")
    slower = replace(model, min_throughput=reached.throughput_samples_per_s)
    stages = _stages(slower, reached.chosen, costs)
    at = replace(decision, found=Found(chosen=None), optimum=float("inf"), proven=False)
    plan = _plan(slower, at, stages, costs, cluster, seed)
    return replace(plan, feasible=False, min_throughput=model.min_throughput, binds=binds)


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


def _reasons(model: CostModel, chosen: Ints, costs: CostTable) -> tuple[Reason, ...]:
    """What the plan would cost with each layer (and what shares its table) moved alone to each other type."""
    groups = {index: list(group) for group in model.bound for index in group}
    layers = _most_costly(model, chosen)
    moves, owners = [], []
    for position in layers:
        for kind in np.flatnonzero(model.allowed[position]).tolist():
            if kind != chosen[position]:
                moved = chosen.copy()
                moved[groups.get(position, [position])] = kind
                moves.append(moved)
                owners.append((position, kind))
    elsewhere: dict[int, dict[str, float]] = {position: {} for position in layers}
    if moves:
        scores = score(model, np.array(moves), steps=64).cost_usd_per_million_samples
        for (position, kind), cost in zip(owners, scores.tolist(), strict=True):
            if np.isfinite(cost):
                elsewhere[position][model.types[kind]] = cost
    return tuple(
        Reason(
            layer=(name := model.layers[position]),
            source=costs[name][model.types[chosen[position]]].source,
            pinned=bool(model.allowed[position].sum() == 1 and model.num_types > 1),
            bound=position in groups,
            transfer_bound=bool(
                model.terms[position, chosen[position], 2:].sum() >= model.terms[position, chosen[position], :2].sum()
            ),
            elsewhere=elsewhere[position],
        )
        for position in layers
    )


def _most_costly(model: CostModel, chosen: Ints) -> list[int]:
    """Layers to give reasons for, in order: all of them, or the dearest ones of a chain too long for that."""
    cells = model.num_layers * max(model.num_types - 1, 1)
    count = min(model.num_layers, max(20, MAX_REASON_CELLS // (cells * model.num_types)))
    spent = model.terms[np.arange(model.num_layers), chosen].sum(axis=1) * model.price_usd_per_h[chosen]
    return sorted(np.argsort(-spent, kind="stable")[:count].tolist())


def _stage_times(model: CostModel, placement: Mapping[str, str], stages: tuple[Stage, ...]) -> list[float]:
    ragged = Stages.of(model, model.indices(placement)[None])
    return [float(t) for t in stage_time_s(ragged.terms, np.array([float(s.replicas) for s in stages]))]


def _topped_up(plan: Plan, model: CostModel, replicas: Mapping[str, int]) -> Plan:
    """Give the units that ``replicas`` forces beyond the plan's to the slowest stages of their type."""
    units = [stage.replicas for stage in plan.stages]
    for name, wanted in replicas.items():
        mine = [index for index, stage in enumerate(plan.stages) if stage.resource == name]
        while mine and sum(units[i] for i in mine) < wanted:
            times = _stage_times(model, plan.placement, _with_units(plan.stages, units))
            units[max(mine, key=lambda i: times[i])] += 1
    stages = _with_units(plan.stages, units)
    times = _stage_times(model, plan.placement, stages)
    stages = tuple(
        replace(s, throughput_samples_per_s=throughput_samples_per_s(t)) for s, t in zip(stages, times, strict=True)
    )
    prices = {r.name: r.price_usd_per_h for r in plan.resources}
    price = sum(prices[name] * count for name, count in units_of(stages).items())
    cost = float(cost_usd_per_million_samples(price, max(times)))
    forced = ", ".join(f"{count} {name}" for name, count in replicas.items())
    return replace(
        plan,
        stages=stages,
        provision=units_of(stages),
        throughput_samples_per_s=throughput_samples_per_s(max(times)),
        price_usd_per_h=price,
        cost_usd_per_million_samples=cost,
        gap_to_optimum=_gap(cost, plan.optimum_usd_per_million_samples),
        notes=(*plan.notes, f"units were forced: {forced}"),
    )


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
