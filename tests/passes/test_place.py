"""Placement: hand-written tables with the plan spelled out, and every policy against an independent brute force."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_costs import random_floor, random_table

from heterps_compile import options
from heterps_compile.cost_model import CostModel
from heterps_compile.costs import CostTable
from heterps_compile.errors import InfeasibleError, OptionError, PlanError
from heterps_compile.passes.place import POLICIES, Place
from heterps_compile.passes.place import limits as limits_module
from heterps_compile.passes.place.recurrent import RecurrentPolicy
from heterps_compile.passes.place.search import all_placements, num_placements
from heterps_compile.planning import Request, check_predictions, plan_costs
from heterps_compile.provision import provision, score


def load_brute_force() -> Any:
    spec = importlib.util.spec_from_file_location("brute_force", Path(__file__).parents[1] / "brute_force.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["brute_force"] = module
    spec.loader.exec_module(module)
    return module


brute = load_brute_force()


def check_against_brute_force(seed: int, policy: str, most_layers: int, gap: float) -> None:
    table, floor = random_table(seed, most_layers), random_floor(seed)
    costs = CostTable.from_dict(table)
    best = brute.brute_force(table, floor)
    plan = plan_costs(costs, None, Request(min_throughput=floor, policy=policy, seed=seed))
    assert plan.feasible == (best is not None)
    if best is None:
        return
    cost, throughput = brute.plan_cost(
        table, [(s.resource, list(s.layers)) for s in plan.stages], [s.replicas for s in plan.stages]
    )
    assert plan.cost_usd_per_million_samples == pytest.approx(cost, rel=1e-9)
    assert plan.throughput_samples_per_s == pytest.approx(throughput, rel=1e-9)
    assert floor is None or throughput >= floor * (1 - 2e-9)
    assert cost >= best.cost * (1 - 1e-9)
    assert cost <= best.cost * (1 + gap)
    assert plan.optimum_proven
    assert plan.optimum_usd_per_million_samples == pytest.approx(best.cost, rel=1e-9)
    assert plan.gap_to_optimum == pytest.approx(cost / best.cost - 1, abs=1e-8)


@pytest.mark.parametrize("seed", range(40))
def test_exact_equals_brute_force(seed: int) -> None:
    check_against_brute_force(seed, "exact", most_layers=5, gap=1e-9)


@pytest.mark.parametrize("seed", range(100, 110))
def test_rl_is_within_a_thousandth_of_brute_force(seed: int) -> None:
    check_against_brute_force(seed, "rl", most_layers=5, gap=1e-3)


@pytest.mark.parametrize("policy", ["rl-rnn", "brute-force", "greedy", "genetic", "heuristic", "cpu-only", "gpu-only"])
def test_no_policy_undercuts_brute_force(policy: str) -> None:
    for seed in (3, 7, 11):
        table, floor = random_table(seed, 4), random_floor(seed)
        model = CostModel.of(CostTable.from_dict(table), None, floor)
        best = brute.brute_force(table, floor)
        found = POLICIES[policy](model, seed, 20.0)
        if best is None or policy == "brute-force":
            assert found.cost == pytest.approx(best.cost if best else np.inf, rel=1e-9)
        else:
            assert found.cost >= best.cost * (1 - 1e-9)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1000, 100_000))
def test_exact_has_no_gap_on_any_table(seed: int) -> None:
    check_against_brute_force(seed, "exact", most_layers=4, gap=1e-9)


@pytest.mark.parametrize("few", [0, 3000])
def test_limits_are_exact_with_labels_and_without(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``few=0`` sends every case to the mixed-integer programme, 3000 keeps all of them with the labels."""
    if few == 0:
        pytest.importorskip("scipy")
    monkeypatch.setattr(limits_module, "FEW_LABELS", few)
    for seed in range(0, 30, 3):
        check_against_brute_force(seed, "exact", most_layers=5, gap=1e-9)


def two_layers(**changes: Any) -> dict[str, Any]:
    """An embedding that a V100 does not speed up, and a dense layer that it computes 50 times faster."""
    table: dict[str, Any] = {
        "batch_size": 1000,
        "resources": [
            {"name": "cpu", "price_usd_per_h": 0.04, "limit": 480},
            {"name": "v100", "price_usd_per_h": 2.42, "limit": 32},
        ],
        "layers": [{"name": "emb", "kind": "embedding"}, {"name": "fc", "kind": "linear"}],
        "costs": {
            "emb": {"cpu": {"compute_s": 0.12, "communication_s": 0.02}, "v100": {"compute_s": 0.12}},
            "fc": {"cpu": {"compute_s": 7.0}, "v100": {"compute_s": 0.01}},
        },
    }
    return {**table, **changes}


def test_embedding_on_cores_and_dense_on_a_card() -> None:
    """100,000 samples/s: 12 cores do 1000 / 0.12 each; one V100 does 1000 / 0.01. Price 0.48 + 2.42 per hour."""
    plan = plan_costs(CostTable.from_dict(two_layers()), None, Request(min_throughput=100_000.0))
    assert plan.placement == {"emb": "cpu", "fc": "v100"}
    assert [(s.resource, s.replicas) for s in plan.stages] == [("cpu", 12), ("v100", 1)]
    assert plan.throughput_samples_per_s == pytest.approx(100_000)
    assert plan.price_usd_per_h == pytest.approx(2.90)
    assert plan.cost_usd_per_million_samples == pytest.approx(2.90 / 3600 * 10)
    assert plan.gap_to_optimum == 0.0
    assert plan.optimum_proven


def test_faster_than_asked_when_that_is_cheaper() -> None:
    """A core alone needs 7.12 s for 1000 samples; a card used to the full does them for a tenth of the money."""
    plan = plan_costs(CostTable.from_dict(two_layers()), None, Request(min_throughput=50.0))
    assert plan.provision == {"cpu": 12, "v100": 1}


def test_a_slow_floor_needs_no_dear_card() -> None:
    """50 samples/s: one core takes 7.12 s for 1000 samples, 140 samples/s, and costs 0.04 USD/h."""
    table = two_layers()
    table["resources"][1] = {"name": "v100", "price_usd_per_h": 100.0, "limit": 32}
    plan = plan_costs(CostTable.from_dict(table), None, Request(min_throughput=50.0))
    assert plan.stages[0].layers == ("emb", "fc")
    assert plan.provision == {"cpu": 1}
    assert plan.cost_usd_per_million_samples == pytest.approx(0.04 / 3600 * 7.12 * 1000)


def test_a_shared_table_keeps_its_layers_together() -> None:
    plan = plan_costs(CostTable.from_dict(two_layers(bound=[["emb", "fc"]])), None, Request(min_throughput=100_000.0))
    assert set(plan.placement.values()) == {"v100"}
    assert plan.provision == {"v100": 13}


def test_a_pin_is_obeyed_and_its_price_is_shown() -> None:
    costs = CostTable.from_dict(two_layers())
    plan = plan_costs(costs, None, Request(min_throughput=100_000.0, pin={"e*": "v100"}))
    assert plan.placement["emb"] == "v100"
    assert next(r for r in plan.reasons if r.layer == "emb").pinned
    with pytest.raises(OptionError, match=r"pin 'x\*' matches no layer"):
        plan_costs(costs, None, Request(pin={"x*": "cpu"}))
    with pytest.raises(OptionError, match="'tpu' is no resource type"):
        plan_costs(costs, None, Request(pin={"emb": "tpu"}))
    with pytest.raises(PlanError, match="'emb' can run on no resource type"):
        plan_costs(
            CostTable.from_dict(two_layers(bound=[["emb", "fc"]])), None, Request(pin={"emb": "cpu", "fc": "v100"})
        )


def test_forced_replicas_are_rented_even_if_not_needed() -> None:
    plan = plan_costs(
        CostTable.from_dict(two_layers()), None, Request(min_throughput=100_000.0, replicas={"cpu": 20, "v100": 2})
    )
    assert plan.provision == {"cpu": 20, "v100": 2}
    assert any("forced" in note for note in plan.notes)
    with pytest.raises(OptionError, match="asks for 33 units of v100, over its limit 32"):
        plan_costs(CostTable.from_dict(two_layers()), None, Request(replicas={"v100": 33}))


def test_out_of_reach_says_what_is_reachable_and_which_limit_binds() -> None:
    """480 cores do 480 * 1000 / 0.12 = 4 million; 32 cards do 3.2 million."""
    table = two_layers()
    table["costs"] = {"emb": {"cpu": table["costs"]["emb"]["cpu"]}, "fc": {"v100": table["costs"]["fc"]["v100"]}}
    plan = plan_costs(CostTable.from_dict(table), None, Request(min_throughput=5_000_000.0))
    assert not plan.feasible
    assert plan.throughput_samples_per_s == pytest.approx(3_200_000, rel=1e-4)
    assert plan.provision == {"cpu": 384, "v100": 32}
    assert plan.binds == ("the limits of cpu, v100 together",)
    plan = plan_costs(CostTable.from_dict(table), None, Request(min_throughput=3_500_000.0))
    assert plan.binds == ("limit of v100 (32)",)
    assert "No plan reaches 3,500,000 samples/s. In the way: limit of v100 (32)" in plan.explain()


def test_out_of_reach_names_the_part_that_units_do_not_shorten() -> None:
    table = two_layers()
    table["costs"]["emb"] = {"cpu": {"compute_s": 0.12, "compute_parallel": 0.5}}
    plan = plan_costs(CostTable.from_dict(table), None, Request(min_throughput=50_000.0))
    assert not plan.feasible
    assert "layer emb that more units do not shorten: at most 16,667 samples/s on cpu" in plan.binds[0]


def test_a_named_policy_is_taken_and_compared() -> None:
    costs = CostTable.from_dict(two_layers())
    plan = plan_costs(costs, None, Request(min_throughput=100_000.0, policy="gpu-only"))
    assert (plan.policy, set(plan.placement.values())) == ("gpu-only", {"v100"})
    assert plan.gap_to_optimum == pytest.approx(13 * 2.42 / 2.90 * 100 / 100 - 1, rel=1e-2)
    assert any("gpu-only costs" in note and "asked for" in note for note in plan.notes)
    assert plan.alternatives["exact"].feasible
    with pytest.raises(OptionError, match=r"policy is 'exakt' .*\n.*did you mean exact"):
        plan_costs(costs, None, Request(policy="exakt"))


def test_rules_without_their_type_are_refused() -> None:
    table = two_layers()
    table["resources"] = table["resources"][:1]
    table["costs"] = {name: {"cpu": row["cpu"]} for name, row in table["costs"].items()}
    costs = CostTable.from_dict({**table, "resources": [*table["resources"], {"name": "cpu-aws", "limit": 4}]})
    with pytest.raises(InfeasibleError, match="policy gpu-only has no placement"):
        plan_costs(costs, None, Request(min_throughput=10.0, policy="gpu-only"))


def test_the_pass_returns_a_placement() -> None:
    placement = Place(policy="exact")(CostTable.from_dict(two_layers()), None, 100_000.0)
    assert dict(placement) == {"emb": "cpu", "fc": "v100"}
    assert placement.lower_bound_usd_per_million_samples == pytest.approx(2.90 / 360)
    with pytest.raises(InfeasibleError, match="policy exact finds no placement"):
        Place(policy="exact")(CostTable.from_dict(two_layers()), None, 1e9)


@pytest.mark.parametrize("policy", ["rl", "rl-rnn", "genetic", None])
def test_equal_seeds_give_equal_plans(policy: str | None) -> None:
    costs = CostTable.from_dict(random_table(5))
    first, second = (plan_costs(costs, None, Request(min_throughput=1000.0, policy=policy, seed=4)) for _ in range(2))
    assert first == second


def test_planning_leaves_the_callers_random_state_alone() -> None:
    import torch

    before, numpy_before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    plan_costs(CostTable.from_dict(random_table(5)), None, Request(min_throughput=1000.0, policy="rl"))
    assert torch.equal(before, torch.random.get_rng_state())
    assert (numpy_before == np.random.get_state()[1]).all()


def test_scoring_many_equals_provisioning_each() -> None:
    model = CostModel.of(CostTable.from_dict(random_table(2)), None, 1000.0)
    placements = np.concatenate(list(all_placements(model)))
    assert len(placements) == num_placements(model)
    costs = score(model, placements).cost_usd_per_million_samples
    each = [provision(model, placement) for placement in placements]
    expected = [np.inf if made is None else made.cost_usd_per_million_samples for made in each]
    np.testing.assert_allclose(costs, expected, rtol=1e-12)


@pytest.mark.parametrize("cell", ["lstm", "rnn"])
def test_policy_gradient_equals_finite_differences(cell: Any) -> None:
    rng = np.random.default_rng(0)
    allowed = np.ones((4, 3), dtype=bool)
    allowed[2, 1] = False
    policy = RecurrentPolicy(features=rng.normal(size=(4, 5)), allowed=allowed, cell=cell, hidden=6, rng=rng, rate=0.01)
    policy.head = rng.normal(size=policy.head.shape)
    run = policy.rollout(7)
    weight = rng.normal(size=7)

    def objective() -> float:
        again = policy.rollout(7, forced=run.actions)
        p = again.probabilities
        chosen = np.take_along_axis(p, run.actions[..., None], axis=2)[..., 0]
        entropy = -(p * np.log(np.where(p > 0, p, 1.0))).sum(axis=2).mean()
        return float((weight * np.log(chosen).sum(axis=1)).sum() + 0.3 * entropy)

    grads = policy.gradient(run, weight, 0.3)
    for name in ("w", "head"):
        values = getattr(policy, name)
        for index in zip(*(rng.integers(0, n, 12) for n in values.shape), strict=True):
            values[index] += 1e-6
            up = objective()
            values[index] -= 2e-6
            down = objective()
            values[index] += 1e-6
            assert grads[name][index] == pytest.approx((up - down) / 2e-6, rel=1e-4, abs=1e-7)


def test_a_plan_with_wrong_predictions_is_refused() -> None:
    from dataclasses import replace

    costs = CostTable.from_dict(two_layers())
    plan = plan_costs(costs, None, Request(min_throughput=100_000.0))
    with pytest.raises(PlanError, match=r"the plan says cost_usd_per_million_samples = 1, its stages give"):
        check_predictions(replace(plan, cost_usd_per_million_samples=1.0), costs, costs.cluster())


def test_the_options_list_exactly_the_policies_there_are() -> None:
    assert set(options.POLICIES) == set(POLICIES)
