"""Requests on the edge: free types, memory that is just full, no time, forced units that are in each other's way."""

from __future__ import annotations

from typing import Any

import pytest

from heterps_compile.costs import CostTable
from heterps_compile.errors import InfeasibleError
from heterps_compile.planning import Request, plan_costs


def table(resources: list[dict[str, Any]], costs: dict[str, Any], **layers: dict[str, Any]) -> CostTable:
    named = [{"name": name, "kind": "fc", **layers.get(name, {})} for name in costs]
    return CostTable.from_dict({"batch_size": 64, "resources": resources, "layers": named, "costs": costs})


def test_a_type_that_costs_nothing_is_rented_within_its_limit() -> None:
    own = {"name": "mine", "device": "cpu", "price_usd_per_h": 0.0, "limit": 2}
    costs = {
        "a": {"mine": {"compute_s": 64.0, "compute_parallel": 0.5}, "v100": {"compute_s": 6.4}},
        "b": {"mine": {"compute_s": 64.0}, "v100": {"compute_s": 3.2}},
    }
    plan = plan_costs(table([own, {"name": "v100", "limit": 8}], costs), None, Request(min_throughput=5.0))
    assert plan.feasible
    assert plan.provision == {"v100": 1}
    slow = plan_costs(table([own, {"name": "v100", "limit": 8}], costs), None, Request(min_throughput=0.4))
    assert slow.provision.keys() == {"mine"}
    assert slow.price_usd_per_h == 0.0


def test_memory_that_is_just_full_is_enough() -> None:
    card = {"name": "v100", "limit": 1, "memory_bytes": 1000.0}
    costs = {"a": {"v100": {"compute_s": 1.0}}, "b": {"v100": {"compute_s": 1.0}}}
    full = table([card], costs, a={"parameter_bytes": 700.0}, b={"parameter_bytes": 300.0})
    assert plan_costs(full, None, Request(mode="full", min_throughput=1.0)).feasible
    more = table([card], costs, a={"parameter_bytes": 701.0}, b={"parameter_bytes": 300.0})
    with pytest.raises(InfeasibleError, match="in the way: memory of v100"):
        plan_costs(more, None, Request(mode="full", min_throughput=1.0))


def test_without_time_there_is_still_a_plan() -> None:
    costs = {
        f"l{i}": {f"t{t}": {"compute_s": 0.1 + i % 3 + t, "compute_parallel": 0.9} for t in range(3)} for i in range(16)
    }
    resources = [{"name": f"t{t}", "device": "cuda", "price_usd_per_h": 1.0 + t, "limit": 6} for t in range(3)]
    problem = table(resources, costs)
    plan = plan_costs(problem, None, Request(mode="full", time_limit_s=0.01))
    assert plan.feasible
    assert plan.optimum_usd_per_million_samples <= plan.cost_usd_per_million_samples * (1 + 1e-9)


def test_forced_units_that_slow_the_plan_below_its_floor_say_so() -> None:
    card = {"name": "v100", "price_usd_per_h": 2.42, "limit": 8, "network_bytes_per_s": 1e5}
    costs = {name: {"v100": {"compute_s": 0.1}} for name in "ab"}
    problem = table([card], costs, a={"parameter_bytes": 1e6})
    forced = Request(mode="full", policy="exact", replicas={"v100": 4}, min_throughput=300.0)
    plan = plan_costs(problem, None, forced)
    assert not plan.feasible
    assert plan.provision == {"v100": 4}
    assert "the forced units (4 v100)" in plan.binds[0]


def test_forced_units_without_a_layer_are_not_rented() -> None:
    resources = [{"name": "cpu", "limit": 8}, {"name": "v100", "limit": 8}]
    costs = {name: {"cpu": {"compute_s": 10.0}, "v100": {"compute_s": 0.001}} for name in "ab"}
    plan = plan_costs(table(resources, costs), None, Request(min_throughput=1000.0, replicas={"cpu": 3}))
    assert plan.provision == {"v100": 1}
    assert "cpu has no layers, so none are rented" in plan.notes
