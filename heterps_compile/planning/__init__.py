"""place -> fuse -> provision -> validate: from a cost table to a plan with its cost and its gap to the optimum.

Enters: a cost table, a cluster and a request. Leaves: a :class:`Plan`, feasible or not, with its gap to the proven
optimum, the alternatives, and why each layer is where it is. Refused: pins and counts that contradict the cluster.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from heterps_compile.cluster import Cluster
from heterps_compile.cost_model import CostModel
from heterps_compile.costs import CostTable
from heterps_compile.errors import OptionError
from heterps_compile.passes.place import policy_named
from heterps_compile.planning.decision import decide
from heterps_compile.planning.describe import infeasible, plan_of, stages_of, topped_up
from heterps_compile.planning.prediction import Prediction, check_predictions, predict
from heterps_compile.planning.request import Mode, Request
from heterps_compile.plans import Plan

__all__ = ["Mode", "Prediction", "Request", "check_predictions", "plan_costs", "predict"]


def plan_costs(costs: CostTable, cluster: Cluster | None = None, request: Request = Request()) -> Plan:  # noqa: B008
    """Plan a cost table; ``feasible=False`` says what is reachable and what binds.

    Raises :class:`OptionError` for unknown policies, types and globs, :class:`PlanError` for a layer that can run
    nowhere, :class:`InfeasibleError` where no placement fits at any throughput.
    """
    started = time.perf_counter()
    if request.policy is not None:
        policy_named(request.policy)
    fleet = _forced(cluster or costs.cluster(), request.replicas)
    model = CostModel.of(costs, fleet, request.floor, request.pin, request.full)
    if not model.layers:
        policy = request.policy or "exact"
        return Plan(placement={}, stages=(), provision={}, policy=policy, seed=request.seed, optimum_proven=True)
    decision = decide(model, request)
    if decision.found.chosen is None:
        plan = infeasible(model, decision, costs, fleet, request)
    else:
        stages = stages_of(model, decision.found.chosen, costs)
        plan = plan_of(model, decision, stages, costs, fleet, request)
    if request.replicas and plan.feasible:
        plan = replace(
            topped_up(plan, model, fleet, request.replicas), resources=(cluster or costs.cluster()).resources
        )
    plan = replace(plan, planning_s=time.perf_counter() - started)
    plan.validate(costs, fleet)
    check_predictions(plan, costs, fleet)
    return plan


def _forced(cluster: Cluster, replicas: Mapping[str, int]) -> Cluster:
    for name, count in replicas.items():
        if count > cluster[name].limit:
            raise OptionError(f"replicas asks for {count} units of {name}, over its limit {cluster[name].limit}")
    return cluster.with_limits(replicas) if replicas else cluster
