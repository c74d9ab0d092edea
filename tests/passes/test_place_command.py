"""``heterps plan --costs`` on random tables of up to 7 layers and 3 types against an independent brute force.

``benchmarks/planner.py`` does the same for 200 tables.
"""

from __future__ import annotations

import pytest
from planner import load_brute_force, planned
from random_costs import FLOORS, random_table

brute = load_brute_force()


@pytest.mark.parametrize("seed", [1, 3, 6, 8, 12, 16, 18, 27])
def test_the_command_plans_as_brute_force_does(seed: int) -> None:
    table, floor = random_table(seed, most_layers=7), FLOORS[seed // 3 % 4]
    best, plan = brute.brute_force(table, floor), planned(table, floor, "rl")
    assert plan["feasible"] == (best is not None)
    if best is None:
        assert plan["throughput_samples_per_s"] < floor
        return
    stages = [(stage["resource"], stage["layers"]) for stage in plan["stages"]]
    cost, throughput = brute.plan_cost(table, stages, [stage["replicas"] for stage in plan["stages"]])
    assert plan["cost_usd_per_million_samples"] == pytest.approx(cost, rel=1e-9)
    assert throughput >= floor * (1 - 2e-9)
    assert plan["optimum_usd_per_million_samples"] == pytest.approx(best.cost, rel=1e-9)
    assert best.cost * (1 - 1e-9) <= cost <= best.cost * 1.001
    for resource in table["resources"]:
        assert plan["provision"].get(resource["name"], 0) <= resource["limit"]
