"""The discrete-event run: small schedules worked out by hand, and the formula against the run."""

from __future__ import annotations

import pytest

from heterps_compile.costs import CostTable
from heterps_compile.errors import PlanError
from heterps_compile.planning import Request, plan_costs
from heterps_compile.runtime.simulate import SimulatedStage, simulate, simulate_plan


def test_a_schedule_by_hand() -> None:
    """Two stages, one replica each, 2 s and 1 s, link 0.5 s; microbatch 3 leaves at 4 * 2 + 0.5 + 1.

    time     0   2   4   6   8
    stage 0  0 0 1 1 2 2 3 3
    stage 1        0   1   2   3
    """
    run = simulate(
        (SimulatedStage(replicas=1, busy_s=2.0, transfer_s=0.5), SimulatedStage(replicas=1, busy_s=1.0)), 4, 10
    )
    assert run.makespan_s == 9.5
    assert run.predicted_samples_per_s == 5.0
    assert run.throughput_samples_per_s == pytest.approx(5.0)
    assert run.busy == pytest.approx((8 / 9.5, 4 / 9.5))


def test_replicas_share_the_load() -> None:
    run = simulate((SimulatedStage(replicas=3, busy_s=3.0),), 30, 1)
    assert run.makespan_s == 30.0
    assert run.overall_samples_per_s == pytest.approx(1.0)


def test_the_formula_is_within_two_percent_of_ten_thousand_workers() -> None:
    stages = (SimulatedStage(replicas=9000, busy_s=1.0, transfer_s=0.01), SimulatedStage(replicas=1000, busy_s=0.1))
    run = simulate(stages, 200_000, 100, jitter=0.1)
    assert abs(run.error) < 0.02


def test_a_plan_runs_as_predicted() -> None:
    costs = CostTable.from_dict(
        {
            "batch_size": 1000,
            "resources": [
                {"name": "cpu", "price_usd_per_h": 0.04, "limit": 480},
                {"name": "v100", "price_usd_per_h": 2.42, "limit": 32},
            ],
            "layers": [{"name": "emb"}, {"name": "fc"}],
            "costs": {
                "emb": {"cpu": {"compute_s": 0.12, "compute_parallel": 0.999}},
                "fc": {"cpu": {"compute_s": 7.0}, "v100": {"compute_s": 0.01}},
            },
            "edges": [["emb", "fc", 1000.0]],
        }
    )
    plan = plan_costs(costs, None, Request(min_throughput=90_000.0, policy="exact"))
    run = simulate_plan(plan, costs)
    assert run.predicted_samples_per_s == pytest.approx(plan.throughput_samples_per_s)
    assert abs(run.error) < 0.02
    assert simulate_plan(plan, costs, jitter=0.2, seed=1) == simulate_plan(plan, costs, jitter=0.2, seed=1)


def test_stages_need_replicas() -> None:
    with pytest.raises(PlanError, match="stage 0 has 0 replicas"):
        simulate((SimulatedStage(replicas=0, busy_s=1.0),), 4, 1)
    with pytest.raises(PlanError, match="1 stages, 1 microbatches"):
        simulate((SimulatedStage(replicas=1, busy_s=1.0),), 1, 1)
