"""``heterps bench paper``: how cases are made, what is kept of runs, and what text and claims say about them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from heterps_compile import cli
from heterps_compile.bench import policy_runs
from heterps_compile.bench.paper_cases import TYPES, Case, cases, cluster, floor_of
from heterps_compile.bench.paper_claims import against_baselines, against_brute_force, against_exact
from heterps_compile.bench.paper_text import case_text, gap, placement_text, planning_time_text
from heterps_compile.bench.policy_runs import CaseResult, PolicyResult, Run, policies_for, run_case
from heterps_compile.bench.rl_plain import rewards, rl_plain
from heterps_compile.cost_model import CostModel
from heterps_compile.costs import CostTable
from heterps_compile.models import CTRDNN, NCE, PAPER_MODELS
from heterps_compile.provision import Scores

RESOURCES = [
    {"name": "cpu", "price_usd_per_h": 0.04, "limit": 9600},
    {"name": "v100", "price_usd_per_h": 2.42, "limit": 256},
]


def table(**layers: tuple[float, float]) -> CostTable:
    """Compute seconds of each layer for one sample on a core and on a V100, all of it parallel."""
    costs = {name: {"cpu": {"compute_s": a}, "v100": {"compute_s": b}} for name, (a, b) in layers.items()}
    names = [{"name": name} for name in layers]
    return CostTable.from_dict({"batch_size": 1, "resources": RESOURCES, "layers": names, "costs": costs})


def problem(floor: float = 1000.0) -> CostModel:
    return CostModel.of(table(emb=(0.001, 0.001), mlp=(0.1, 0.001)), cluster(2), floor)


def result(model: str = "nce", **costs: tuple[float, ...]) -> CaseResult:
    """Costs per policy and seed by hand; exact proves its own."""
    policies = []
    for name, values in costs.items():
        placement = ("cpu", "v100")
        runs = [
            Run(
                seed=seed,
                cost_usd_per_million_samples=cost,
                cpu_s=0.5,
                placement=placement if cost < float("inf") else (),
                lower_bound_usd_per_million_samples=cost if name == "exact" else 0.0,
            )
            for seed, cost in enumerate(values)
        ]
        policies.append(PolicyResult(policy=name.replace("_", "-"), runs=tuple(runs)))
    return CaseResult(case=Case(model=model, problem=problem(), floor_multiple=2.0), policies=tuple(policies))


def test_clusters_take_the_first_types_with_the_papers_prices() -> None:
    assert [len(cluster(count)) for count in (2, 4, 8)] == [2, 4, 8]
    assert cluster(8).names() == TYPES
    assert [resource.price_usd_per_h for resource in cluster(2)] == [0.04, 2.42]


def test_the_floor_is_the_smallest_multiple_at_which_both_types_pay() -> None:
    # One V100 does 1 / 0.002 = 500 samples/s. The look-up costs 60.5 times less on a core at the same speed, the other
    # layer 1.65 times more: two stages at any floor.
    assert floor_of(table(emb=(0.001, 0.001), mlp=(0.1, 0.001))) == (5.0, pytest.approx(2500))


def test_without_such_a_multiple_the_floor_is_the_largest_that_is_reached() -> None:
    only_cores = table(emb=(0.001, 0.001), mlp=(0.001, 0.001))
    assert floor_of(only_cores) == (40.0, pytest.approx(20_000))
    # 9600 cores and 256 cards reach 12 times what one card does, and no more.
    slow = CostTable.from_dict(
        {
            "batch_size": 1,
            "resources": RESOURCES,
            "layers": [{"name": "mlp"}],
            "costs": {"mlp": {"v100": {"compute_s": 1.0, "compute_parallel": 11 / 12}}},
        }
    )
    assert floor_of(slow) == (10.0, pytest.approx(10))


def test_a_case_of_each_model_and_cluster_has_one_floor_per_model(monkeypatch: pytest.MonkeyPatch) -> None:
    small_models(monkeypatch)
    made = list(cases(["ctrdnn-8", "nce"], [2, 4]))
    assert [case.name for case in made] == ["ctrdnn-8, 2 types", "ctrdnn-8, 4 types", "nce, 2 types", "nce, 4 types"]
    assert made[0].min_throughput == made[1].min_throughput != made[2].min_throughput
    assert [case.problem.num_layers for case in made] == [4, 4, 5, 5]


def test_policies_that_draw_run_once_per_seed_and_none_undercuts_the_bound() -> None:
    case = Case(model="nce", problem=problem(), floor_multiple=2.0)
    found = CaseResult(case=case, policies=tuple(run_case(case, 3, policies_for(case.problem))))
    # One core and one card, each busy for 1 ms per sample: (0.04 + 2.42) / 3.6 USD per million samples.
    assert found.cheapest == pytest.approx(2.46 / 3.6)
    assert found.proven
    assert {policy.policy: len(policy.runs) for policy in found.policies if len(policy.runs) > 1} == {
        name: 3 for name in ("rl", "rl-rnn", "rl-plain", "genetic", "bayesian") if name in found
    }
    assert all(cost >= found.bound * (1 - 1e-9) for policy in found.policies for cost in policy.costs)
    assert found["cpu-only"].mean_cost == pytest.approx(101 * 0.04 / 3.6)


def test_brute_force_is_left_out_of_large_cases() -> None:
    layers = {f"mlp{index}": (0.01, 0.001) for index in range(21)}
    large = CostModel.of(table(**layers), cluster(2), 10.0)
    assert "brute-force" not in policies_for(large)
    assert "brute-force" in policies_for(problem())


def test_a_policy_without_its_optional_package_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "greedy" in policies_for(problem())
    monkeypatch.setitem(policy_runs.NEEDS, "greedy", "a_package_nobody_has")
    assert "greedy" not in policies_for(problem())


def test_text_of_a_case() -> None:
    lines = case_text(
        result(rl=(2.0, 2.01), exact=(2.0,), genetic=(2.5, float("inf")), gpu_only=(float("inf"),))
    ).splitlines()
    assert lines == [
        "nce, 2 types (cpu, v100): 2 layers, 4 placements",
        "  at least 1,000 samples/s (2 x one v100); the proven optimum is 2.000000 USD per million samples",
        "  policy    USD/M samples  x optimum       gap                min - max over seeds  CPU s  placement",
        "  rl             2.005000     1.0025  0.2500 %                        0 - 0.5000 %   0.50  1 cpu, 1 v100",
        "  exact          2.000000     1.0000         0                                       0.50  1 cpu, 1 v100",
        "  genetic        2.500000     1.2500    25.0 %  25.0 % - 25.0 %, 1 of 2 infeasible   0.50  1 cpu, 1 v100",
        "  gpu-only     infeasible                                                            0.50",
    ]


@pytest.mark.parametrize(("ratio", "text"), [(1 + 1e-9, "0"), (1.00012, "0.0120 %"), (4.123, "312.3 %")])
def test_gap(ratio: float, text: str) -> None:
    assert gap(ratio) == text


def test_placements_are_told_by_stage_unless_there_are_many() -> None:
    few, many = ("cpu", "cpu", "v100"), ("cpu", "v100") * 4
    texts = [placement_text(Run(seed=0, cost_usd_per_million_samples=1.0, cpu_s=0.0, placement=p)) for p in (few, many)]
    assert texts == ["2 cpu, 1 v100", "8 stages"]


def test_planning_times_are_those_of_ctrdnn() -> None:
    lines = planning_time_text([result("ctrdnn-8", rl=(1.0,), exact=(1.0,)), result("nce", rl=(1.0,))]).splitlines()
    assert [line.split() for line in lines[2:]] == [["2", "2", "4.0e+00", "-", "0.50", "0.50"]]
    assert planning_time_text([result("nce", rl=(1.0,))]) == ""


def test_claim_against_brute_force() -> None:
    same = result(rl=(2.0, 2.0), rl_plain=(2.0, 2.2), exact=(2.0,), brute_force=(2.0,))
    worse = result("2emb", rl=(2.0, 2.2), rl_plain=(2.0, 2.5), exact=(2.0,), brute_force=(2.0,))
    without = result(rl=(3.0,), exact=(2.0,))
    assert against_brute_force([same, without]) == (
        "rl matches brute force with every seed in 1 of the 1 cases where brute force ran; without our additions to "
        "the paper's learner, rl-plain matches brute force with every seed in 0 (at worst 10.0 % above, nce, 2 types) "
        "of the 1 cases where brute force ran."
    )
    assert "every seed in 1 (at worst 10.0 % above, 2emb, 2 types) of the 2" in against_brute_force([same, worse])
    lost = result(rl=(2.0, float("inf")), rl_plain=(2.0,), exact=(2.0,), brute_force=(2.0,))
    assert "rl matches brute force with every seed in 0 (at worst inf % above" in against_brute_force([lost])
    assert "not known" in against_brute_force([without])


def test_the_plain_learner_finds_an_optimum_of_few_placements_and_takes_no_infeasible_one() -> None:
    found = rl_plain(problem(), seed=1)
    assert found.cost == pytest.approx(2.46 / 3.6)
    slow = rewards(Scores(cost_usd_per_million_samples=np.array([1.0, 2.0, np.inf]), violation=np.array([0, 0, 0.1])))
    assert slow.tolist() == pytest.approx([0.0, -np.log(2), -np.log(2) - 0.6])
    out_of_reach = rl_plain(problem(floor=1e9))
    assert out_of_reach.chosen is None


def test_claim_against_the_other_methods() -> None:
    first = result(rl=(2.0, 2.2), exact=(2.0,), greedy=(2.0,), gpu_only=(8.4,))
    second = result("2emb", rl=(2.0, 2.0), exact=(2.0,), greedy=(2.0,), gpu_only=(float("inf"),))
    assert against_baselines([first, second]) == (
        "rl (mean over seeds) costs less than greedy in 0 of 2 cases (equal in 1, dearer in 1); gpu-only in 2 of 2 "
        "cases (equal in 0, dearer in 0, gpu-only finds nothing in 1); the largest difference is to gpu-only on nce, "
        "2 types, which costs 300.0% more than rl (rl is 75.0% cheaper), where the paper says 312.3%."
    )
    nobody = result(rl=(2.0,), greedy=(float("inf"),))
    assert against_baselines([nobody]).endswith("greedy finds nothing in 1).")


def test_claim_against_exact() -> None:
    same, worse = result(rl=(2.0, 2.0), exact=(2.0,)), result("2emb", rl=(2.0, 2.002), exact=(2.0,))
    start = "exact proves the optimum in 2 of 2 cases, it takes 1.0 CPU s for all of them, rl 1.0 per seed, "
    assert against_exact([same, same]) == start + "and in none does it cost less than rl's worst seed."
    assert against_exact([same, worse]) == (
        start + "and in 1 it costs less than rl's worst seed: 2emb, 2 types (0.1000 %)."
    )


def test_command_prints_tables_claims_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    small_models(monkeypatch)
    path = tmp_path / "paper.json"
    assert cli.main(["bench", "paper", "--models", "nce", "--types", "2", "--seeds", "2", "--json", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("nce, 2 types (cpu, v100): 5 layers, 32 placements\n")
    assert "\n- rl matches brute force" in printed.out
    (case,) = json.loads(path.read_text())["cases"]
    assert case["resources"] == ["cpu", "v100"]
    assert case["optimum_proven"] is True
    assert [run["seed"] for run in case["policies"]["rl"]] == [0, 1]
    assert len(case["policies"]["exact"][0]["placement"]) == 5
    assert printed.err == f"heterps: wrote {path}\n"


def test_unknown_model_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "paper", "--models", "dlrm"]) == 2
    assert "--models names no model 'dlrm' (allowed: ctrdnn-8," in capsys.readouterr().err


def small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.randint(50, (1000, 26))
    monkeypatch.setitem(PAPER_MODELS, "nce", lambda: (NCE(rows=50, num_noise=3), (ids, torch.randint(50, (1000, 4)))))
    monkeypatch.setitem(PAPER_MODELS, "ctrdnn-8", lambda: (CTRDNN(4, rows=50), (torch.rand(1000, 13), ids)))
