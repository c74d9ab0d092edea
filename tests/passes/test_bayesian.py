"""The policy ``bayesian``: what it finds, that it heeds pins, shared tables and the clock, and what it says without
scikit-learn."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import pytest

from heterps_compile.cost_model import CostModel
from heterps_compile.costs import CostTable
from heterps_compile.errors import MissingPackageError
from heterps_compile.passes.place.bayesian import available, bayesian, expected_improvement, features, normal_scores
from heterps_compile.passes.place.search import brute_force, random_placements
from heterps_compile.provision import provision

module = importlib.import_module("heterps_compile.passes.place.bayesian")  # the package's attribute is the function
needs_sklearn = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn: pip install 'heterps-compile[bayesian]'"
)
TYPES = (("cpu", "cpu", 0.04, 4000), ("v100", "cuda", 2.42, 64), ("l4", "cuda", 0.8, 64))


def fleet_problem(num_layers: int, seed: int, floor: float = 20_000.0, **more: Any) -> CostModel:
    """Layers of which some gain much and some little from a card; a batch is 1,000 samples."""
    rng = np.random.default_rng(seed)
    costs: dict[str, dict[str, dict[str, float]]] = {}
    for index in range(num_layers):
        speed = (1, 40, 15) if rng.random() < 0.6 else (1, 2, 1.5)
        time = rng.uniform(0.02, 0.5)
        costs[f"l{index}"] = {
            name: {"compute_s": time / fast, "communication_s": rng.uniform(0, 0.05), "compute_parallel": 0.98}
            for (name, *_), fast in zip(TYPES, speed, strict=True)
        }
    table = CostTable.from_dict(
        {
            "batch_size": 1000,
            "resources": [
                {"name": name, "device": device, "price_usd_per_h": price, "limit": limit}
                for name, device, price, limit in TYPES
            ],
            "layers": [{"name": name} for name in costs],
            "costs": costs,
            "bound": more.pop("bound", []),
        }
    )
    return CostModel.of(table, None, floor, **more)


@needs_sklearn
@pytest.mark.parametrize("seed", [0, 1])
def test_it_comes_within_a_hundredth_of_the_optimum_of_small_problems(seed: int) -> None:
    model = fleet_problem(9, seed)
    found = bayesian(model, seed)
    assert found.chosen is not None
    made = provision(model, found.chosen)
    assert made is not None
    assert found.cost == made.cost_usd_per_million_samples <= brute_force(model).cost * 1.01
    assert found.lower_bound == 0.0


@needs_sklearn
def test_it_finds_more_than_as_many_random_placements() -> None:
    model = fleet_problem(16, 3)
    scored = module.FIRST + module.ROUNDS * module.BATCH
    at_random = module.loss(model, random_placements(model, scored, np.random.default_rng(0))).min()
    assert bayesian(model, 0).cost < 0.7 * at_random


@needs_sklearn
def test_equal_seeds_give_equal_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUNDS", 2)  # long before they meet at the optimum
    model = fleet_problem(20, 5)
    first, again = bayesian(model, 7), bayesian(model, 7)
    assert first.chosen is not None
    assert again.chosen is not None
    assert first.chosen.tolist() == again.chosen.tolist()


@needs_sklearn
def test_pins_and_shared_tables_are_heeded() -> None:
    model = fleet_problem(8, 2, bound=[["l1", "l6"], ["l2", "l4"]], pin={"l0": "v100", "l4": "cpu"})
    found = bayesian(model, 1)
    assert found.chosen is not None
    placement = model.named(found.chosen)
    assert (placement["l0"], placement["l4"], placement["l2"]) == ("v100", "cpu", "cpu")
    assert placement["l1"] == placement["l6"]


@needs_sklearn
def test_a_problem_with_few_placements_is_searched_through() -> None:
    model = fleet_problem(2, 4)
    assert bayesian(model, 0).cost == pytest.approx(brute_force(model).cost)


@needs_sklearn
def test_it_has_none_where_the_floor_is_out_of_reach() -> None:
    assert bayesian(fleet_problem(4, 0, floor=1e9), 0).chosen is None


@needs_sklearn
def test_it_stops_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    fits: list[int] = []
    clock = iter(range(10_000))
    fitted = module._fitted
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(module, "_fitted", lambda *given: (fits.append(1), fitted(*given))[1])
    assert bayesian(fleet_problem(10, 0), 0, time_limit_s=3.0).chosen is not None
    assert len(fits) == 3  # the clock is read once before the first round and once a round


def test_without_the_library_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert not available()
    with pytest.raises(MissingPackageError, match=r"needs scikit-learn, .*\nhint: pip install 'heterps-compile\[bay"):
        bayesian(fleet_problem(4, 0))


def test_a_placement_is_bits_of_types_and_boundaries() -> None:
    model = fleet_problem(3, 0)
    assert features(model, np.array([[0, 0, 2]])).tolist() == [[1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1]]


@needs_sklearn
def test_normal_scores_keep_the_order_and_nothing_else() -> None:
    assert normal_scores(np.array([3.0, 1e30, -2.0])) == pytest.approx([0.0, 0.96742157, -0.96742157])


@needs_sklearn
def test_expected_improvement_is_that_of_the_normal_distribution() -> None:
    mean, deviation = np.array([0.0, 1.0, -1.0]), np.array([1.0, 2.0, 0.0])
    draws = mean[:2] + deviation[:2] * np.random.default_rng(0).standard_normal((400_000, 2))
    expected = np.maximum(0.5 - draws, 0).mean(axis=0)
    gain = expected_improvement(mean, deviation, 0.5)
    assert gain[:2] == pytest.approx(expected, rel=0.01)
    assert gain[2] == pytest.approx(1.5)
