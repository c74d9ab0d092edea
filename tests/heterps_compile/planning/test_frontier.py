"""Cost against throughput: every point by hand on a table small enough for that."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from heterps_compile.costs import CostTable
from heterps_compile.planning import Request, plan_costs
from heterps_compile.planning.frontier import frontier


def one_layer(parallel: float, limit: int, compute_s: float = 1e-3) -> CostTable:
    """A layer of ``compute_s`` per sample on one core of 0.036 USD/h, of which a part is shared by the cores."""
    values: dict[str, Any] = {
        "batch_size": 1,
        "resources": [{"name": "cpu", "price_usd_per_h": 0.036, "limit": limit}],
        "layers": [{"name": "fc"}],
        "costs": {"fc": {"cpu": {"compute_s": compute_s, "compute_parallel": parallel}}},
    }
    return CostTable.from_dict(values)


def test_every_point_of_a_small_frontier_is_found_with_what_ends_it() -> None:
    """k cores take 0.5 (1 + 1/k) ms and cost 0.00001 k USD/s: 1000, 1333, 1500 and 1600 samples/s."""
    calls: list[int] = []
    found = frontier(one_layer(0.5, limit=4), None, Request(), progress=lambda: calls.append(1))
    assert [plan.provision["cpu"] for plan in found.plans] == [1, 2, 3, 4]
    reached = [plan.throughput_samples_per_s for plan in found.plans]
    assert reached == pytest.approx([1000, 4000 / 3, 1500, 1600])
    costs = [plan.cost_usd_per_million_samples for plan in found.plans]
    assert costs == pytest.approx([1e-5 * k * 0.5e-3 * (1 + 1 / k) * 1e6 for k in (1, 2, 3, 4)])
    assert found.end is not None
    assert not found.end.feasible
    assert found.end.binds == ("limit of cpu (4)",)
    assert 4 < len(calls) <= 14 + 4


def test_the_floor_asked_for_is_a_point() -> None:
    costs = one_layer(0.9, limit=400)
    asked = 5_000.0
    found = frontier(costs, None, Request(min_throughput=asked), num_points=6)
    plan = plan_costs(costs, None, Request(min_throughput=asked, quick=True))
    assert plan.throughput_samples_per_s in [p.throughput_samples_per_s for p in found.plans]


def test_throughput_and_cost_rise_along_the_frontier_and_no_plan_misses_its_floor() -> None:
    found = frontier(one_layer(0.97, limit=900), None, Request())
    assert len(found.plans) > 8
    for slow, fast in pairwise(found.plans):
        assert slow.throughput_samples_per_s < fast.throughput_samples_per_s
        assert slow.cost_usd_per_million_samples <= fast.cost_usd_per_million_samples * (1 + 1e-6)
    assert all(p.throughput_samples_per_s >= (p.min_throughput or 0) * (1 - 1e-8) for p in found.plans)


def test_a_frontier_of_one_unit_has_one_point() -> None:
    found = frontier(one_layer(1.0, limit=1), None, Request())
    assert [plan.provision for plan in found.plans] == [{"cpu": 1}]
    assert found.end is not None
    assert found.end.throughput_samples_per_s == pytest.approx(1000, rel=1e-5)


def test_layers_that_take_no_time_have_no_end() -> None:
    found = frontier(one_layer(1.0, limit=1, compute_s=0.0), None, Request())
    assert found.end is None
    assert found.to_dict()["end"] is None


def test_json_holds_the_points_and_the_end() -> None:
    shown = frontier(one_layer(0.5, limit=2), None, Request()).to_dict()
    assert [point["provision"] for point in shown["points"]] == [{"cpu": 1}, {"cpu": 2}]
    assert shown["points"][0]["floor_samples_per_s"] is None
    assert shown["points"][1]["throughput_samples_per_s"] == pytest.approx(4000 / 3)
    assert shown["points"][1]["num_stages"] == 1
    assert shown["end"]["binds"] == ["limit of cpu (2)"]
    assert shown["end"]["reachable_samples_per_s"] == pytest.approx(4000 / 3, rel=1e-5)
