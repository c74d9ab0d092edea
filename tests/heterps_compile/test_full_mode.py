"""Full mode against equations written out here, unit by unit, and against trying every placement and every fleet."""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import numpy as np
import pytest

from heterps_compile import cost_model
from heterps_compile.cluster import Cluster, Link
from heterps_compile.cost_model import CostModel, FullMode, Ints
from heterps_compile.cost_terms import cut_bytes
from heterps_compile.costs import CostTable
from heterps_compile.errors import OptionError, PlanError
from heterps_compile.passes.place import POLICIES, coarse
from heterps_compile.passes.place.staged import cheapest
from heterps_compile.planning import Request, check_predictions, plan_costs
from heterps_compile.plans import Plan
from heterps_compile.provision import Stages, score

MICROBATCHES = 4
FLOORS = (500.0, 2000.0, 5000.0)


def random_table(seed: int, num_layers: int = 4, num_types: int = 2, most_units: int = 5) -> dict[str, Any]:
    """Tables and dense layers with bytes, a graph with skip connections, and units whose memory is often too small."""
    rng = np.random.default_rng(seed)
    resources = [
        {
            "name": f"t{t}",
            "device": "cuda" if t else "cpu",
            "price_usd_per_h": float(rng.uniform(0.5, 3)),
            "limit": int(rng.integers(1, most_units + 1)),
            "memory_bytes": float(rng.uniform(2e9, 1.6e10)),
            "network_bytes_per_s": float(10 ** rng.uniform(7, 9.5)),
            "interconnect_bytes_per_s": float(10 ** rng.uniform(8, 10)),
            "units_per_host": int(rng.integers(1, 5)),
            "billing_minimum_s": 60.0,
        }
        for t in range(num_types)
    ]
    layers, costs = [], {}
    for name in (f"l{i}" for i in range(num_layers)):
        table = bool(rng.random() < 0.4)
        size = float(10 ** rng.uniform(8, 10) if table else 10 ** rng.uniform(5, 8))
        layers.append(
            {
                "name": name,
                "kind": "embedding" if table else "linear",
                "parameter_bytes": size,
                "state_bytes": 2 * size,
                "touched_bytes_per_sample": float(rng.uniform(500, 4000)) if table else 0.0,
                "input_bytes_per_sample": float(rng.uniform(2000, 9000)),
                "output_bytes_per_sample": float(rng.uniform(100, 4000)),
            }
        )
        costs[name] = {
            f"t{t}": {"compute_s": float(rng.uniform(0.02, 0.4)), "compute_parallel": float(rng.uniform(0.9, 1))}
            for t in range(num_types)
        }
    pairs = [(i, j) for i in range(num_layers) for j in range(i + 1, num_layers) if j == i + 1 or rng.random() < 0.3]
    return {
        "batch_size": 1000,
        "resources": resources,
        "links": [],
        "layers": layers,
        "costs": costs,
        "edges": [[f"l{i}", f"l{j}", float(rng.uniform(100, 1000))] for i, j in pairs],
    }


def table_of(values: dict[str, Any]) -> CostTable:
    return CostTable.from_dict({name: value for name, value in values.items() if name != "links"})


def by_hand(table: dict[str, Any], placement: tuple[int, ...], units: tuple[int, ...]) -> tuple[float, float] | None:
    """(seconds per sample, USD per million samples) from the table alone; None where memory is too small."""
    runs = [list(run) for _, run in itertools.groupby(range(len(placement)), key=lambda i: placement[i])]
    layers, batch = table["layers"], table["batch_size"]
    position = {layer["name"]: i for i, layer in enumerate(layers)}
    edges = [(position[a], position[b], size) for a, b, size in table["edges"]]
    rate = [r["network_bytes_per_s"] for r in table["resources"]]
    slowest = 0.0
    for index, (run, k) in enumerate(zip(runs, units, strict=True)):
        t = placement[run[0]]
        compute = communicate = held = 0.0
        replicated = shared = 0.0
        for i in run:
            cost = table["costs"][layers[i]["name"]][f"t{t}"]
            alpha = cost["compute_parallel"]
            compute += cost["compute_s"] / batch * (1 - alpha + alpha / k)
            made = sum(size for _, b, size in edges if b == i)
            communicate += max(0.0, layers[i]["input_bytes_per_sample"] - made) / rate[t] / k
            communicate += 2 * layers[i]["touched_bytes_per_sample"] / rate[t] / k * (k - 1) / k
            trained = layers[i]["parameter_bytes"] + layers[i]["state_bytes"]
            held += layers[i]["output_bytes_per_sample"] * batch
            if layers[i]["kind"] == "embedding":
                shared += trained
            else:
                host = table["resources"][t]
                copies = 1 / host["units_per_host"] if host["device"] == "cpu" else 1
                replicated += copies * trained
                shared += (1 - copies) * trained
                gradients = 2 * (k - 1) / k * layers[i]["parameter_bytes"] / batch
                communicate += gradients / host["interconnect_bytes_per_s"]
                communicate += gradients / (rate[t] * host["units_per_host"])
        for cut, other in ((run[0], index - 1), (run[-1] + 1, index + 1)):
            if 0 <= other < len(runs):
                made_before = {a for a, b, _ in edges if a < cut <= b}
                crossing = sum(
                    min(
                        sum(size for a, b, size in edges if a == source and b >= cut),
                        max([layers[source]["output_bytes_per_sample"], *(s for a, _, s in edges if a == source)]),
                    )
                    for source in made_before
                )
                communicate += 2 * crossing / rate[t] / k + 2 * 5e-5 * MICROBATCHES / batch
        if replicated + (shared + held) / k > table["resources"][t]["memory_bytes"]:
            return None
        slowest = max(slowest, compute, communicate)
    time_s = slowest * (MICROBATCHES + len(runs) - 1) / MICROBATCHES
    prices = [table["resources"][placement[run[0]]]["price_usd_per_h"] for run in runs]
    return time_s, sum(p * k for p, k in zip(prices, units, strict=True)) / 3600 * 1e6 * time_s


def best_by_hand(table: dict[str, Any], floor: float) -> float:
    """The least cost over every placement and all whole units within the limits."""
    limits = [r["limit"] for r in table["resources"]]
    best = math.inf
    for placement in itertools.product(range(len(limits)), repeat=len(table["layers"])):
        kinds = [kind for kind, _ in itertools.groupby(placement)]
        for units in itertools.product(*(range(1, limits[kind] + 1) for kind in kinds)):
            used = [sum(k for k, kind in zip(units, kinds, strict=True) if kind == t) for t in range(len(limits))]
            if all(u <= most for u, most in zip(used, limits, strict=True)):
                found = by_hand(table, placement, units)
                if found is not None and 1 / found[0] >= floor * (1 - 1e-9):
                    best = min(best, found[1])
    return best


@pytest.mark.parametrize("seed", range(24))
def test_exact_finds_the_best_fleet_there_is(seed: int) -> None:
    table, floor = random_table(seed, most_units=4), FLOORS[seed % 3]
    best = best_by_hand(table, floor)
    model = CostModel.of(table_of(table), None, floor, full=FullMode(microbatches=MICROBATCHES))
    found = POLICIES["exact"](model, 0, 20.0)
    assert found.cost == pytest.approx(best, rel=1e-9)
    assert found.lower_bound == pytest.approx(best, rel=1e-9)


def test_plans_say_what_their_equations_say() -> None:
    checked = 0
    for seed in range(30, 42):
        table = random_table(seed, num_layers=5, num_types=3, most_units=30)
        request = Request(min_throughput=1000.0, mode="full", microbatches=MICROBATCHES, policy="greedy")
        plan = plan_costs(table_of(table), None, request)
        placement = tuple(int(plan.placement[layer["name"]][1:]) for layer in table["layers"])
        found = by_hand(table, placement, tuple(stage.replicas for stage in plan.stages))
        assert found is not None
        assert plan.throughput_samples_per_s == pytest.approx(1 / found[0], rel=1e-9)
        assert plan.cost_usd_per_million_samples == pytest.approx(found[1], rel=1e-9)
        checked += len(plan.stages)
    assert checked > 12


def every_placement(model: CostModel) -> Ints:
    return np.array(list(itertools.product(range(model.num_types), repeat=model.num_layers)))


@pytest.mark.parametrize("seed", range(60, 68))
def test_the_dynamic_programme_is_exact_for_three_types(seed: int) -> None:
    table = random_table(seed, num_layers=5, num_types=3, most_units=40)
    model = CostModel.of(table_of(table), None, 1500.0, full=FullMode(microbatches=MICROBATCHES))
    price = model.price_usd_per_h
    prices = []
    for placement in every_placement(model):
        stages = Stages.of(model, placement[None])
        units = stages.fewest(model.slowest_s)
        prices.append(float(price[stages.kind] @ units) if (units <= model.limit[stages.kind]).all() else np.inf)
    found = cheapest(model, model.prefix, model.slowest_s, price, price)
    assert found.value == pytest.approx(min(prices), rel=1e-9)
    assert found.fractional <= min(prices) * (1 + 1e-12)


def test_a_link_given_between_types_is_what_their_boundary_takes() -> None:
    table = random_table(5, num_layers=2, num_types=2, most_units=9)
    costs, resources = table_of(table), table_of(table).resources
    slow = Cluster(resources=resources, links=(Link(between=("t0", "t1"), bandwidth_bytes_per_s=1e6, latency_s=0.0),))
    model = CostModel.of(costs, slow, None, full=FullMode(microbatches=MICROBATCHES))
    alone = CostModel.of(costs, slow, None, full=FullMode(microbatches=MICROBATCHES, without=("transfer",)))
    apart = np.array([[0, 1]])
    added = Stages.of(model, apart).terms - Stages.of(alone, apart).terms
    crossing = 2 * cut_bytes(costs)[1] / 1e6
    np.testing.assert_allclose(added[:, 3], [crossing, crossing])
    np.testing.assert_allclose(added[:, 2], 0.0, atol=1e-18)


def test_without_its_terms_full_mode_is_paper_mode() -> None:
    table = random_table(3, num_layers=5, num_types=3, most_units=40)
    table["edges"] = []  # then communication is as the table says, in both
    off = ("transfer", "all-reduce", "pull-push", "memory", "fill-drain", "billing")
    full = CostModel.of(table_of(table), None, 1000.0, full=FullMode(without=off))
    paper = CostModel.of(table_of(table), None, 1000.0)
    placements = every_placement(paper)
    np.testing.assert_allclose(
        score(full, placements).cost_usd_per_million_samples, score(paper, placements).cost_usd_per_million_samples
    )


@pytest.mark.parametrize("term", ["transfer", "all-reduce", "pull-push", "memory", "fill-drain"])
def test_every_term_can_only_add_to_the_cost(term: str) -> None:
    dearer = 0
    for seed in range(6):
        costs = table_of(random_table(seed, num_layers=4, num_types=2, most_units=60))
        with_it = CostModel.of(costs, None, 800.0, full=FullMode(microbatches=2))
        without = CostModel.of(costs, None, 800.0, full=FullMode(microbatches=2, without=(term,)))
        more, less = (score(m, every_placement(m)).cost_usd_per_million_samples for m in (with_it, without))
        assert (more >= less * (1 - 1e-12)).all()
        dearer += int((more > less * (1 + 1e-9)).sum())
    assert dearer > 0


def test_a_short_training_pays_the_billing_minimum() -> None:
    table = random_table(1)
    for resource in table["resources"]:
        resource.update(limit=60, memory_bytes=1e12)
    costs = table_of(table)
    long, short = (
        plan_costs(costs, None, Request(min_throughput=500.0, mode="full", samples=samples, policy="exact"))
        for samples in (1e9, 1e3)
    )
    paid_usd = short.price_usd_per_h / 3600 * 60
    assert short.cost_usd_per_million_samples * 1e3 / 1e6 == pytest.approx(paid_usd, rel=1e-9)
    assert short.price_usd_per_h <= long.price_usd_per_h  # to be faster than a minute gains nothing


def test_tables_too_large_for_one_unit_are_shared_by_several() -> None:
    table = random_table(2)
    for layer in table["layers"]:
        layer.update(kind="linear", parameter_bytes=1e6, state_bytes=3e6, touched_bytes_per_sample=0.0)
    table["layers"][0].update(kind="embedding", parameter_bytes=20e9, state_bytes=20e9, touched_bytes_per_sample=100.0)
    for resource in table["resources"]:
        resource.update(limit=30, memory_bytes=8e9, network_bytes_per_s=1e10)
    plan = plan_costs(table_of(table), None, Request(min_throughput=100.0, mode="full"))
    stage = plan.stages[0]
    assert stage.replicas >= 5
    assert stage.memory_bytes <= 8e9
    assert stage.bound_by == "memory"
    assert any("hold and serve its tables" in note for note in plan.notes)


def test_a_floor_that_memory_rules_out_says_so() -> None:
    table = random_table(2)
    for layer in table["layers"]:
        layer.update(kind="linear", parameter_bytes=1e6, state_bytes=3e6)
    table["layers"][1].update(parameter_bytes=3e9, state_bytes=9e9)
    for name, resource in zip(("cpu", "card"), table["resources"], strict=True):
        resource.update(limit=40, memory_bytes=8e9 if name == "cpu" else 16e9, network_bytes_per_s=1e10)
    table["costs"]["l1"] = {  # the only type with the memory is slow
        "t0": {"compute_s": 0.01, "compute_parallel": 1.0},
        "t1": {"compute_s": 10.0, "compute_parallel": 0.5},
    }
    plan = plan_costs(table_of(table), None, Request(min_throughput=1000.0, mode="full", policy="exact"))
    assert not plan.feasible
    assert "memory of t0" in plan.binds


def test_a_plan_that_does_not_fit_in_memory_is_refused() -> None:
    table = random_table(2)
    for resource in table["resources"]:
        resource.update(limit=60, memory_bytes=2e12)
    plan = plan_costs(table_of(table), None, Request(min_throughput=500.0, mode="full"))
    for resource in table["resources"]:
        resource.update(memory_bytes=1e7)
    with pytest.raises(PlanError, match="bytes on each of its"):
        check_predictions(plan, table_of(table), table_of(table).cluster())


def test_a_full_plan_survives_json() -> None:
    request = Request(min_throughput=100.0, mode="full", microbatches=3, samples=1e9, without=("billing",))
    plan = plan_costs(table_of(random_table(8, most_units=40)), None, request)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert (again.mode, again.microbatches, again.samples, again.without) == ("full", 3, 1e9, ("billing",))


def test_a_tensor_read_twice_crosses_a_cut_once() -> None:
    layers = [{"name": n, "output_bytes_per_sample": 10.0} for n in "abcd"]
    costs = {n: {"cpu": {"compute_s": 1.0}} for n in "abcd"}
    edges = [["a", "b", 10.0], ["a", "d", 10.0], ["b", "c", 4.0], ["c", "d", 2.0]]
    table = {"batch_size": 1, "resources": [{"name": "cpu", "limit": 1}], "layers": layers, "costs": costs}
    assert cut_bytes(CostTable.from_dict({**table, "edges": edges})).tolist() == [0, 10, 14, 12, 0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"microbatches": 0}, "microbatches is 0"),
        ({"samples": -1.0}, "samples is -1.0"),
        ({"without": ("fill",)}, "without names 'fill'"),
    ],
)
def test_wrong_options_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        FullMode(**values)


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(OptionError, match="optimizer is 'lamb'"):
        table_of(random_table(0)).trained_with("lamb")


@pytest.mark.parametrize("seed", range(80, 92))
def test_faster_than_the_data_saves_nothing(seed: int) -> None:
    table, rate = random_table(seed, most_units=4), FLOORS[seed % 3] / 2
    limits = [r["limit"] for r in table["resources"]]
    best = math.inf
    for placement in itertools.product(range(2), repeat=4):
        kinds = [kind for kind, _ in itertools.groupby(placement)]
        for units in itertools.product(*(range(1, limits[kind] + 1) for kind in kinds)):
            used = [sum(k for k, kind in zip(units, kinds, strict=True) if kind == t) for t in range(2)]
            found = by_hand(table, placement, units) if used[0] <= limits[0] and used[1] <= limits[1] else None
            if found is not None and 1 / found[0] >= rate * (1 - 1e-9):
                prices = (table["resources"][kind]["price_usd_per_h"] for kind in kinds)
                best = min(best, sum(p * k for p, k in zip(prices, units, strict=True)) / 3600 * 1e6 / rate)
    full = FullMode(microbatches=MICROBATCHES, data_rate=rate)
    exact = POLICIES["exact"](CostModel.of(table_of(table), None, rate, full=full), 0, 20.0)
    assert exact.cost == pytest.approx(best, rel=1e-9)
    assert exact.lower_bound == pytest.approx(best, rel=1e-9)


def test_a_data_rate_is_a_floor_and_needs_full_mode() -> None:
    costs = table_of(random_table(8, most_units=40))
    plan = plan_costs(costs, None, Request(mode="full", data_rate=300.0))
    assert plan.min_throughput == 300.0
    assert plan.cost_usd_per_million_samples == pytest.approx(plan.price_usd_per_h / 3600 * 1e6 / 300.0)
    with pytest.raises(OptionError, match="data_rate is given in paper mode"):
        Request(data_rate=300.0)


@pytest.mark.parametrize("seed", range(4))
def test_a_chain_too_long_for_the_programme_is_placed_by_groups(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = random_table(seed, num_layers=8, num_types=2, most_units=60)
    table["bound"] = [["l0", "l1"], ["l1", "l7"]]
    model = CostModel.of(table_of(table), None, 400.0, full=FullMode(microbatches=MICROBATCHES))
    optimum = POLICIES["exact"](model, 0, 20.0)
    monkeypatch.setattr(cost_model, "MAX_SPANS", 40)
    monkeypatch.setattr(coarse, "FEW_SPANS", 40)
    monkeypatch.setattr(sys.modules["heterps_compile.passes.place.exact"], "PATIENCE_S", 0.2)
    assert not model.few_spans
    found = POLICIES["exact"](model, 0, 5.0)
    assert found.chosen is not None
    assert found.chosen[0] == found.chosen[1] == found.chosen[7]
    assert found.lower_bound <= optimum.cost * (1 + 1e-9)
    assert optimum.cost <= found.cost * (1 + 1e-9)
    assert any("a long chain" in note for note in found.notes)
