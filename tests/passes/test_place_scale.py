"""Placement of long chains: bounds that hold whenever the search ends, and programmes against their definitions."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from random_costs import long_table, random_floor, random_table

from heterps_compile.cost_model import CostModel, cost_usd_per_million_samples, fewest_units, units_needed
from heterps_compile.costs import CostTable
from heterps_compile.passes.place import POLICIES, intervals, limits
from heterps_compile.passes.place.dynamic import cheapest
from heterps_compile.passes.place.improve import LONG_CHAIN, improve, joined, stage_moves
from heterps_compile.passes.place.incumbent import Incumbent, usage_at
from heterps_compile.passes.place.intervals import IntervalSearch
from heterps_compile.passes.place.limits import Wanted, cheapest_within_limits
from heterps_compile.passes.place.search import all_placements, random_placements
from heterps_compile.provision import provision

exact_module = importlib.import_module("heterps_compile.passes.place.exact")  # its name is also the function's
exact = exact_module.exact


def long_model(num_layers: int, num_types: int, seed: int) -> CostModel:
    table, floor = long_table(num_layers, num_types, seed)
    return CostModel.of(CostTable.from_dict(table), None, floor)


def small_model(seed: int) -> CostModel:
    return CostModel.of(CostTable.from_dict(random_table(seed)), None, random_floor(seed))


def least_sum(model: CostModel, units_of: Any, time_s: float) -> float:
    """The recurrence of ``dynamic.py`` as it stands, start by start."""
    best = {(0, -1): 0.0}
    for end in range(1, model.num_layers + 1):
        for t in range(model.num_types):
            for begin in range(end):
                entered = [cost for (cut, last), cost in best.items() if cut == begin and last != t]
                units = float(units_of(model.terms[begin:end, t].sum(axis=0), time_s))
                if entered and units <= model.limit[t] and model.allowed[begin:end, t].all():
                    cost = min(entered) + float(model.price_usd_per_h[t]) * units
                    best[end, t] = min(best.get((end, t), np.inf), cost)
    return min((cost for (cut, _), cost in best.items() if cut == model.num_layers), default=np.inf)


@pytest.mark.parametrize("seed", range(2))
def test_starts_that_are_left_out_never_win(seed: int) -> None:
    """50 layers are more than two blocks of ends; the times make stages short and long."""
    model = long_model(50, 3, seed)
    model = model.restricted(np.random.default_rng(seed).random(model.allowed.shape) < (1.0, 0.9, 0.9))
    model = model.with_limits(np.array([6.0, 2.0, 2.0]))  # of one stage, here
    price = model.price_usd_per_h
    for factor in (4.0, 1.0, 0.3):
        found = cheapest(model, model.prefix, model.slowest_s * factor, price, price)
        expected = least_sum(model, fewest_units, model.slowest_s * factor)
        assert found.value == pytest.approx(expected, rel=1e-12)
        if found.chosen is not None:
            assert price @ usage_at(model, found.chosen, model.slowest_s * factor) == pytest.approx(expected, rel=1e-12)
            fractional = least_sum(model, units_needed, model.slowest_s * factor)
            assert found.fractional == pytest.approx(fractional, rel=1e-12)


@pytest.mark.parametrize("thorough", [False, True])
def test_prices_within_limits_against_all_placements(thorough: bool) -> None:
    """What is proven without reaching it is below the least price; what is called exact is it."""
    proven = 0
    for seed in range(0, 90, 3):
        model = small_model(seed)
        time_s = model.slowest_s
        usages = [usage_at(model, row, time_s) for block in all_placements(model) for row in block]
        prices = [float(model.price_usd_per_h @ u) for u in usages if (u <= model.limit).all()]
        least = min(prices, default=np.inf)
        start = np.random.default_rng(seed).uniform(0, 2, model.num_types) * model.price_usd_per_h
        free = CostModel(**{**_fields(model), "bound": ()})
        wanted = Wanted(price=np.inf, thorough=thorough, multipliers=start, deadline=np.inf)
        limited = cheapest_within_limits(free, free.prefix, time_s, wanted)
        assert limited.bound <= least * (1 + 1e-9)
        for placement in limited.fitting:
            assert (usage_at(model, placement, time_s) <= model.limit).all()
        if limited.exact and not model.bound:
            assert limited.bound == pytest.approx(least, rel=1e-9)
            proven += 1
        if thorough and not model.bound:
            assert limited.exact == np.isfinite(least)
            assert np.isfinite(limited.bound) == np.isfinite(least)
    assert proven > 3


def _fields(model: CostModel) -> dict[str, Any]:
    return {name: getattr(model, name) for name in model.__dataclass_fields__}


def test_a_wanted_price_is_the_bound_where_nothing_is_below_it() -> None:
    model = long_model(30, 3, 1)
    none = np.zeros(model.num_types)
    wanted = Wanted(price=np.inf, thorough=True, multipliers=none, deadline=np.inf)
    least = cheapest_within_limits(model, model.prefix, model.slowest_s, wanted)
    assert least.exact
    below = Wanted(price=least.bound * 0.7, thorough=True, multipliers=none, deadline=np.inf)
    limited = cheapest_within_limits(model, model.prefix, model.slowest_s, below)
    assert least.bound * 0.7 * (1 - 1e-9) <= limited.bound <= least.bound * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_a_bound_is_proven_when_no_time_is_left(seed: int) -> None:
    model = long_model(100, 4, seed)
    hurried, patient = exact(model, time_limit_s=0.0), exact(model, time_limit_s=60.0)
    assert 0 < hurried.lower_bound <= patient.cost * (1 + 1e-9)
    assert hurried.lower_bound < hurried.cost
    assert "the time limit ended the search before the optimum was proven" in hurried.notes


def test_the_bound_of_every_cut_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each step of the search the lowest bound is below the optimum, and at the end it is the optimum."""
    monkeypatch.setattr(intervals, "PATIENT_WORK", 10**9)
    for seed in range(6):
        model = long_model(24, 4, seed)
        optimum = exact(model).cost
        bounds: list[float] = []
        original = IntervalSearch._cut

        def cut(self: Any, interval: Any, cut_s: float, bound: float, seen: list[float] = bounds) -> None:
            seen.append(bound)
            original(self, interval, cut_s, bound)  # noqa: B023

        monkeypatch.setattr(IntervalSearch, "_cut", cut)
        last = IntervalSearch(model, Incumbent(), np.inf).run()
        monkeypatch.setattr(IntervalSearch, "_cut", original)
        assert len(bounds) > 3
        assert max(bounds) <= optimum * (1 + 1e-9)
        assert last == pytest.approx(optimum, rel=1e-9)


def test_a_long_search_is_content_with_a_small_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = 0
    for seed in range(4):
        model = long_model(24, 4, seed)
        optimum, patient = (result := exact(model)).cost, result.points
        with monkeypatch.context() as patch:
            patch.setattr(intervals, "PATIENT_WORK", 0)
            found = exact(model)
        saved += patient - found.points
        assert found.lower_bound <= optimum * (1 + 1e-9)
        assert optimum * (1 - 1e-9) <= found.cost <= found.lower_bound / (1 - intervals.ENOUGH_GAP) * (1 + 1e-9)
    assert saved > 0


def test_limits_of_a_long_chain_are_proven_by_multipliers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without labels and programme, what is proven stays below the optimum that they prove."""
    for seed in (1, 4):
        model = long_model(40, 4, seed)
        optimum = exact(model)
        assert optimum.lower_bound == pytest.approx(optimum.cost, rel=1e-9)
        with monkeypatch.context() as patch:
            patch.setattr(limits, "MAX_LABEL_LAYERS", 0)
            relaxed = exact(model)
        assert optimum.cost * 0.8 < relaxed.lower_bound <= optimum.cost * (1 + 1e-9)
        assert relaxed.cost >= optimum.cost * (1 - 1e-9)


def test_improving_a_long_chain_keeps_what_is_given() -> None:
    table, floor = long_table(LONG_CHAIN + 16, 4, 3)
    table["bound"] = [["l3", "l40"], ["l10", "l11", "l70"]]
    costs = CostTable.from_dict(table)
    model = CostModel.of(costs, None, floor, {"l2?": "t2"})
    start = random_placements(model, 1, np.random.default_rng(0))[0]
    placement, cost = improve(model, start, np.inf)
    made = provision(model, placement)
    assert made is not None
    assert cost == pytest.approx(made.cost_usd_per_million_samples)
    assert model.allowed[np.arange(model.num_layers), placement].all()
    assert (placement[20:30] == 2).all()
    assert placement[3] == placement[40]
    assert placement[10] == placement[11] == placement[70]
    before = provision(model, start)
    assert before is None or cost < before.cost_usd_per_million_samples


def test_moves_made_together_touch_different_stages() -> None:
    placement = np.array([0, 0, 0, 1, 1, 1, 0, 0])
    first, second, third = placement.copy(), placement.copy(), placement.copy()
    first[:2], second[2], third[6:] = 1, 1, 1
    together = joined(placement, np.array([first, second, third]))
    assert together.tolist() == [[1, 1, 0, 1, 1, 1, 0, 0], [1, 1, 0, 1, 1, 1, 1, 1]]


def test_stage_moves_grow_merge_and_split() -> None:
    model = long_model(10, 3, 0)
    moves = {tuple(row) for row in stage_moves(model, np.array([0] * 5 + [1] * 5), 0).tolist()}
    assert (0,) * 10 in moves  # the second stage joins the first
    assert (0, 0, 0, 0, 0, 0, 0, 1, 1, 1) in moves  # the first grows by two
    assert (0, 0, 2, 0, 0, 1, 1, 1, 1, 1) in moves  # one layer moves alone
    assert (2,) * 10 in moves  # both change


def test_rl_is_near_the_optimum_of_twenty_layers() -> None:
    model = long_model(20, 4, 2)
    optimum = exact(model)
    assert optimum.lower_bound == pytest.approx(optimum.cost, rel=1e-9)
    assert optimum.cost * (1 - 1e-9) <= POLICIES["rl"](model, 0, 60.0).cost <= optimum.cost * 1.001


def test_a_cost_is_at_least_time_times_price() -> None:
    """What every interval's bound rests on, for units bought at one time and used at a shorter one."""
    model = long_model(30, 3, 2)
    price = model.price_usd_per_h
    for factor in (1.0, 0.9, 0.7, 0.5):
        slow = cheapest(model, model.prefix, model.slowest_s, price, None).value
        fast = cheapest(model, model.prefix, model.slowest_s * factor, price, None)
        assert fast.value >= slow
        if fast.chosen is not None:
            made = provision(model, fast.chosen)
            assert made is None or made.cost_usd_per_million_samples >= cost_usd_per_million_samples(
                slow, made.slowest_s
            ) * (1 - 1e-9)
