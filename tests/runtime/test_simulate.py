"""The simulated run: small schedules worked out by hand, and the formula against the run."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterps_compile.costs import CostTable
from heterps_compile.errors import OptionError, PlanError
from heterps_compile.planning import Mode, Request, plan_costs
from heterps_compile.plans import Plan, Stage
from heterps_compile.runtime.simulate import Dispatch, Load, SimulatedStage, Simulation, simulate, simulate_plan

FAST = SimulatedStage(replicas=1, compute_s=1.0)
SLOW = SimulatedStage(replicas=1, compute_s=2.0, delay_s=0.5)


def test_a_schedule_by_hand() -> None:
    """Two stages, 2 s and 1 s, 0.5 s between them; microbatch 3 leaves at 4 * 2 + 0.5 + 1.

    time     0   2   4   6   8
    stage 0  0 0 1 1 2 2 3 3
    stage 1       0   1   2   3       begins at 2.5, and waits for stage 0 each time
    """
    run = simulate((SLOW, FAST), Load(microbatches=4, samples=10))
    assert run.makespan_s == 9.5
    assert run.predicted_samples_per_s == 5.0
    assert run.throughput_samples_per_s == pytest.approx(5.0)
    assert run.overall_samples_per_s == pytest.approx(40 / 9.5)
    assert run.fill_share == pytest.approx(2.5 / 9.5)
    assert run.drain_share == pytest.approx(1.5 / 9.5)
    assert run.busy == pytest.approx((8 / 9.5, 4 / 9.5))


def test_a_link_fetches_while_the_unit_computes() -> None:
    """Link 2 s, unit 1 s: the first is fetched at 2, then one every 2 s; the last is done at 4 * 2 + 1."""
    run = simulate((SimulatedStage(replicas=1, compute_s=1.0, communication_s=2.0),), Load(microbatches=4))
    assert run.makespan_s == 9.0
    assert run.predicted_samples_per_s == 0.5
    assert run.throughput_samples_per_s == pytest.approx(0.5)
    assert run.busy == pytest.approx((8 / 9,))


@pytest.mark.parametrize(("dispatch", "each_s"), [("split", 1.0), ("whole", 3.0)])
def test_both_ways_to_use_replicas_give_one_microbatch_a_second(dispatch: Dispatch, each_s: float) -> None:
    """Three replicas: a third of each microbatch in 1 s, or every third microbatch whole in 3 s."""
    run = simulate((SimulatedStage(replicas=3, compute_s=each_s),), Load(microbatches=30, dispatch=dispatch))
    assert run.makespan_s == 30.0
    assert run.predicted_samples_per_s == 1.0
    assert run.overall_samples_per_s == pytest.approx(1.0)
    assert run.busy == pytest.approx((1.0,))


def test_whole_microbatches_fill_a_round_of_replicas() -> None:
    """Two replicas, then one; five microbatches of 2 s and 1 s.

    time       0   2   4   6
    replica 0  0 0 2 2 4 4
    replica 1  1 1 3 3
    stage 1        0 1 2 3 4
    """
    stages = (SimulatedStage(replicas=2, compute_s=2.0), FAST)
    run = simulate(stages, Load(microbatches=5, dispatch="whole"))
    assert run.makespan_s == 7.0
    assert run.busy == pytest.approx((5 / 7, 5 / 7))
    assert run.fill_share == pytest.approx(2 / 7)
    assert run.drain_share == pytest.approx(1 / 7)


def test_balanced_stages_fill_and_drain_as_the_formula_says() -> None:
    stages = (SimulatedStage(replicas=7, compute_s=2.0),) * 4
    run = simulate(stages, Load(microbatches=8))
    assert run.overall_samples_per_s / run.throughput_samples_per_s == pytest.approx(8 / (8 + 4 - 1))
    assert run.predicted_overall_samples_per_s == pytest.approx(run.overall_samples_per_s)


def test_ten_thousand_workers_are_within_two_percent() -> None:
    stages = tuple(SimulatedStage(replicas=count, compute_s=1.0, communication_s=0.5) for count in (5000, 3000, 2000))
    assert abs(simulate(stages, Load(microbatches=200)).error) < 0.02
    jittery = simulate(stages, Load(microbatches=200, jitter=0.1))
    assert jittery.overall_samples_per_s < 0.97 * simulate(stages, Load(microbatches=200)).overall_samples_per_s


def test_the_slowest_of_many_replicas_sets_the_pace_of_a_short_run() -> None:
    """Two microbatches: all wait for the slowest of 1,000, over three standard deviations late."""
    stage = SimulatedStage(replicas=1000, compute_s=1.0)
    run = simulate((stage,), Load(microbatches=2, jitter=0.1))
    assert 2 * (1 + 0.1 * 2.5 / 2**0.5) < run.makespan_s < 2 * (1 + 0.1 * 5.0 / 2**0.5)
    assert run == simulate((stage,), Load(microbatches=2, jitter=0.1))
    assert run != simulate((stage,), Load(microbatches=2, jitter=0.1, seed=1))


times = st.floats(0.001, 1.0)
shares = st.floats(0.0, 1.0)


@st.composite
def tables(draw: st.DrawFn) -> CostTable:
    """Chains of 2 to 6 layers over 2 or 3 types, with and without bytes between the layers."""
    names = [f"layer{index}" for index in range(draw(st.integers(2, 6)))]
    kinds = [f"type{index}" for index in range(draw(st.integers(2, 3)))]
    cost = {"compute_s": times, "communication_s": times, "compute_parallel": shares, "communication_parallel": shares}
    return CostTable.from_dict(
        {
            "batch_size": draw(st.integers(1, 4096)),
            "resources": [{"name": kind, "price_usd_per_h": 1.0, "limit": 4000} for kind in kinds],
            "layers": [{"name": name} for name in names],
            "costs": {name: {kind: draw(st.fixed_dictionaries(cost)) for kind in kinds} for name in names},
            "edges": [[a, b, draw(st.floats(0.0, 1e4))] for a, b in pairwise(names)],
        }
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[CostTable, Plan]:
    """A table and any plan of it, with up to 600 replicas a stage; throughput is what its own cost model says."""
    costs = draw(tables())
    stages: list[Stage] = []
    for name in costs.names():
        kind = draw(st.sampled_from(costs.resource_names()))
        if stages and stages[-1].resource == kind:
            stages[-1] = replace(stages[-1], layers=(*stages[-1].layers, name))
        else:
            stages.append(Stage(resource=kind, layers=(name,), replicas=draw(st.integers(1, 600))))
    placement = {name: stage.resource for stage in stages for name in stage.layers}
    return costs, Plan.from_dict({"placement": placement, "stages": [_entries(stage) for stage in stages]})


def _entries(stage: Stage) -> dict[str, object]:
    return {"resource": stage.resource, "layers": list(stage.layers), "replicas": stage.replicas}


@settings(deadline=None, max_examples=60)
@given(plans())
def test_prediction_is_within_two_percent_of_any_plan(drawn: tuple[CostTable, Plan]) -> None:
    costs, plan = drawn
    run = simulate_plan(plan, costs, load=Load(microbatches=200))
    assert abs(run.error) < 0.02
    assert run.predicted_samples_per_s == pytest.approx(_by_hand(costs, plan))
    many = 40 * max(stage.replicas for stage in plan.stages)
    whole = simulate_plan(plan, costs, load=Load(microbatches=many, dispatch="whole"))
    assert whole.predicted_samples_per_s == pytest.approx(run.predicted_samples_per_s)
    assert abs(whole.error) < 0.02


def _by_hand(costs: CostTable, plan: Plan) -> float:
    """The least over the stages of B / max(CT, DT), from the table, as design section 5 writes it."""
    rates = []
    for stage in plan.stages:
        rows = [costs[name][stage.resource] for name in stage.layers]
        shrink = [
            sum(t * (1 - p + p / stage.replicas) for t, p in parts)
            for parts in (
                [(row.compute_s, row.compute_parallel) for row in rows],
                [(row.communication_s, row.communication_parallel) for row in rows],
            )
        ]
        rates.append(costs.batch_size / max(shrink))
    return min(rates)


@pytest.mark.parametrize("mode", ["paper", "full"])
def test_what_the_planner_makes_runs_as_predicted(mode: Mode) -> None:
    costs, plan = planned(90_000.0, mode)
    run = simulate_plan(plan, costs, load=Load(microbatches=plan.microbatches if mode == "full" else 200))
    assert abs(run.error) < 0.02
    predicted = run.predicted_overall_samples_per_s if mode == "full" else run.predicted_samples_per_s
    assert predicted == pytest.approx(plan.throughput_samples_per_s)


def planned(min_throughput: float, mode: Mode = "paper") -> tuple[CostTable, Plan]:
    costs = CostTable.from_dict(
        {
            "batch_size": 1000,
            "resources": [
                {"name": "cpu", "price_usd_per_h": 0.04, "limit": 480},
                {"name": "v100", "price_usd_per_h": 2.42, "limit": 32},
            ],
            "layers": [{"name": "emb", "kind": "embedding"}, {"name": "fc", "parameter_bytes": 1e6}],
            "costs": {
                "emb": {"cpu": {"compute_s": 0.12, "compute_parallel": 0.999}},
                "fc": {"cpu": {"compute_s": 7.0}, "v100": {"compute_s": 0.01}},
            },
            "edges": [["emb", "fc", 1000.0]],
        }
    )
    return costs, plan_costs(costs, None, Request(min_throughput=min_throughput, policy="exact", mode=mode))


def test_a_plan_of_other_layers_is_refused() -> None:
    _, plan = planned(90_000.0)
    other = CostTable.from_dict(
        {
            "batch_size": 1,
            "resources": [{"name": "cpu", "price_usd_per_h": 0.04, "limit": 480}],
            "layers": [{"name": "other"}],
            "costs": {"other": {"cpu": {"compute_s": 1.0}}},
        }
    )
    with pytest.raises(PlanError, match="the stages do not hold the layers of the graph"):
        simulate_plan(plan, other)


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(PlanError, match="stage 0 has 0 replicas"):
        simulate((SimulatedStage(replicas=0, compute_s=1.0),), Load(microbatches=4))
    with pytest.raises(PlanError, match="a plan without stages runs nothing"):
        simulate((), Load())
    with pytest.raises(OptionError, match=r"microbatches is 1 \(allowed: a whole number >= 2\)"):
        Load(microbatches=1)
    with pytest.raises(OptionError, match=r"jitter is 1.5 \(allowed: from 0 to 1"):
        Load(jitter=1.5)


def test_stages_that_take_no_time_are_no_division_by_zero() -> None:
    run: Simulation = simulate((SimulatedStage(replicas=1, compute_s=0.0),), Load(microbatches=4))
    assert run.throughput_samples_per_s == run.predicted_samples_per_s == pytest.approx(1e15)
    assert run.busy == (0.0,)


def test_whole_microbatches_for_fewer_than_all_replicas_are_refused() -> None:
    stages = (SimulatedStage(replicas=9, compute_s=1.0),)
    with pytest.raises(OptionError, match="microbatches is 8, dealt out whole to the 9 replicas of stage 0"):
        simulate(stages, Load(microbatches=8, dispatch="whole"))
