"""StaRatio and StaPSRatio on a fleet whose numbers can be done in the head.

A core does a layer of 0.1 s a batch of 1,000 in 1e-4 s a sample, so 100,000 samples/s take 10 cores, and so on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from heterps_compile.cost_model import CostModel, Ints
from heterps_compile.costs import CostTable
from heterps_compile.errors import OptionError
from heterps_compile.provision import provision
from heterps_compile.static_ratio import parameter_server_units, shared_out, sta_ps_ratio, sta_ratio

FLOOR = 100_000.0
CPU = {"name": "cpu", "price_usd_per_h": 0.04, "limit": 480, "memory_bytes": 4e9, "network_bytes_per_s": 2.5e8}
CARD = {"name": "card", "device": "cuda", "price_usd_per_h": 2.0, "limit": 32}


def table(*seconds: tuple[str, float], cpu: dict[str, Any] | None = None, serial: float = 0.0) -> CostTable:
    """Layers l0, l1, ... each on one type with its seconds a batch; l0 reads a table of 8 GB."""
    layers: list[dict[str, Any]] = [{"name": f"l{index}"} for index in range(len(seconds))]
    layers[0] |= {"parameter_bytes": 8e9, "state_bytes": 8e9, "touched_bytes_per_sample": 1000}
    costs = {
        f"l{index}": {kind: {"compute_s": time, "compute_parallel": 1 - serial}}
        for index, (kind, time) in enumerate(seconds)
    }
    resources = [{**CPU, **(cpu or {})}, CARD]
    return CostTable.from_dict({"batch_size": 1000, "resources": resources, "layers": layers, "costs": costs})


def problem(costs: CostTable, floor: float | None = FLOOR) -> tuple[CostModel, Ints]:
    model = CostModel.of(costs, None, floor)
    return model, model.allowed.argmax(axis=1)


def test_a_fleet_that_has_the_shape_of_the_need_costs_what_the_balanced_one_does() -> None:
    model, chosen = problem(table(("cpu", 0.3), ("card", 0.02)))
    made, balanced = sta_ratio(model, chosen), provision(model, chosen)
    assert made is not None
    assert balanced is not None
    assert made.units.tolist() == balanced.units.tolist() == [30, 2]
    assert made.price_usd_per_h == pytest.approx(30 * 0.04 + 2 * 2.0)
    assert made.cost_usd_per_million_samples == pytest.approx(5.2 / 3600 * 1e6 * 1e-5)


def test_a_box_brings_cores_that_nothing_needs() -> None:
    model, chosen = problem(table(("cpu", 0.1), ("card", 0.02)))
    made, balanced = sta_ratio(model, chosen), provision(model, chosen)
    assert made is not None
    assert balanced is not None
    assert balanced.units.tolist() == [10, 2]
    assert made.units.tolist() == [30, 2]  # 480 cores to 32 cards are 15 to 1
    assert made.stage_s == pytest.approx([1e-4 / 30, 1e-5])
    assert made.cost_usd_per_million_samples > balanced.cost_usd_per_million_samples


def test_units_of_a_type_go_to_its_stages_in_proportion_to_their_need() -> None:
    model, chosen = problem(table(("cpu", 0.1), ("card", 0.02), ("cpu", 0.05)))
    made = sta_ratio(model, chosen)
    assert made is not None
    assert made.units.tolist() == [20, 2, 10]


def test_the_box_can_be_given() -> None:
    model, chosen = problem(table(("cpu", 0.1), ("card", 0.02)))
    made = sta_ratio(model, chosen, {"cpu": 8, "card": 1})
    assert made is not None
    assert made.units.tolist() == [16, 2]
    with pytest.raises(OptionError, match=r"box holds 0 units of card, which the placement uses \(allowed: >= 1\)"):
        sta_ratio(model, chosen, {"cpu": 8})


def test_a_type_that_is_not_used_is_not_rented() -> None:
    model, chosen = problem(table(("cpu", 0.1), ("cpu", 0.06)))
    made = sta_ratio(model, chosen)
    assert made is not None
    assert made.units.tolist() == [16]


@pytest.mark.parametrize(("cores", "cards"), [(47, 10), (48, 7), (7, 3), (480, 32)])
def test_the_boxes_are_the_fewest_that_suffice_and_never_over_the_limit(cores: int, cards: int) -> None:
    costs = table(("cpu", 0.1), ("card", 0.02), cpu={"limit": cores})
    for floor in np.linspace(1e4, 4e5, 40):
        model, chosen = problem(costs, float(floor))
        model = model.with_limits(np.array([float(cores), float(cards)]))
        fewest = np.ceil(floor * np.array([1e-4, 2e-5]) * (1 - 1e-9))
        suffices = [m for m in range(1, cards + 1) if np.ceil(m * cores / cards - 1e-9) >= fewest[0] and m >= fewest[1]]
        made = sta_ratio(model, chosen)
        assert (made is not None) == bool(suffices)
        if made is not None:
            assert made.units.tolist() == [np.ceil(suffices[0] * cores / cards - 1e-9), suffices[0]]


def test_there_is_none_over_the_limits_or_past_what_units_can_do() -> None:
    assert sta_ratio(*problem(table(("cpu", 0.1), ("card", 0.33)))) is None
    assert sta_ratio(*problem(table(("cpu", 0.1), ("card", 0.32)))) is not None
    costs = table(("cpu", 0.1), ("card", 0.02), serial=0.5)
    assert sta_ratio(*problem(costs)) is None
    assert sta_ps_ratio(*problem(costs), costs, costs.resources[0]) is None


def test_servers_hold_the_tables_and_serve_their_rows() -> None:
    costs = table(("cpu", 0.1), ("card", 0.02))
    cpu = costs.resources[0]
    assert parameter_server_units(costs, cpu, 1e5) == 4  # 16 GB over 4 GB; 2 * 1000 B * 1e5/s over 250 MB/s are 0.8
    assert parameter_server_units(costs, cpu, 1e6) == 8
    assert parameter_server_units(costs, costs.resources[1], 1e6) == 1  # a type that states neither
    none = CostTable.from_dict({**costs.to_dict(), "layers": [{"name": "l0"}, {"name": "l1"}]})
    assert parameter_server_units(none, cpu, 1e6) == 0


def test_servers_come_in_proportion_to_the_workers() -> None:
    costs = table(("cpu", 0.1), ("card", 0.02))
    made = sta_ps_ratio(*problem(costs), costs, costs.resources[0])
    assert made is not None
    assert (made.workers.units.tolist(), made.server_units) == ([10, 2], 12)
    assert made.price_usd_per_h == pytest.approx(10 * 0.04 + 2 * 2.0 + 12 * 0.04)
    assert made.cost_usd_per_million_samples == pytest.approx(4.88 / 3600 * 1e6 * 1e-5)


def test_too_few_servers_bring_more_workers() -> None:
    costs = table(("cpu", 0.1), ("card", 0.02))
    made = sta_ps_ratio(*problem(costs), costs, costs.resources[0], 0.25)  # 12 workers have 3 servers, 4 are needed
    assert made is not None
    assert (made.workers.units.tolist(), made.server_units) == ([11, 2], 4)
    assert made.price_usd_per_h == pytest.approx(11 * 0.04 + 2 * 2.0 + 4 * 0.04)


def test_the_pipeline_is_no_faster_than_its_servers() -> None:
    costs = table(("cpu", 0.095), ("card", 0.015), cpu={"memory_bytes": 1e11, "network_bytes_per_s": 1e8})
    made = sta_ps_ratio(*problem(costs), costs, costs.resources[0], 2 / 12)
    assert made is not None
    assert (made.workers.units.tolist(), made.server_units) == ([10, 2], 2)
    assert made.workers.slowest_s == pytest.approx(0.95e-5)
    assert made.cost_usd_per_million_samples == pytest.approx(4.48 / 3600 * 1e6 * 1e-5)


def test_servers_count_towards_the_limit() -> None:
    costs = table(("cpu", 0.1), ("card", 0.02))
    model, chosen = problem(costs)
    assert sta_ps_ratio(model.with_limits(np.array([22.0, 32.0])), chosen, costs, costs.resources[0]) is not None
    assert sta_ps_ratio(model.with_limits(np.array([21.0, 32.0])), chosen, costs, costs.resources[0]) is None
    with pytest.raises(OptionError, match=r"servers_per_worker is 0 \(allowed: a number > 0\)"):
        sta_ps_ratio(model, chosen, costs, costs.resources[0], 0)


@pytest.mark.parametrize(
    ("count", "need", "expected"),
    [(15, [10.0, 5.0], [10, 5]), (1, [10.0, 2.0], [1, 0]), (0, [3.0], [0]), (5, [1.0, 1.0, 1.0], [2, 2, 1])],
)
def test_whole_units_are_shared_out_by_largest_remainder(count: int, need: list[float], expected: list[int]) -> None:
    assert shared_out(count, np.array(need)).tolist() == expected
