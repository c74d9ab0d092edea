"""What-if questions: both plans by hand, which layers move, and what no change can be."""

from __future__ import annotations

from typing import Any

import pytest

from heterps_compile.costs import CostTable
from heterps_compile.errors import OptionError
from heterps_compile.planning import Request
from heterps_compile.planning.what_if import Change, what_if


def table(rows: dict[str, dict[str, float]], limits: dict[str, int]) -> CostTable:
    """Compute seconds per sample on one unit; perfectly parallel; a core costs 0.04 USD/h, a card 2.42."""
    prices = {"cpu": 0.04, "v100": 2.42}
    values: dict[str, Any] = {
        "batch_size": 1,
        "resources": [{"name": n, "price_usd_per_h": prices[n], "limit": limit} for n, limit in limits.items()],
        "layers": [{"name": name} for name in rows],
        "costs": {name: {kind: {"compute_s": time} for kind, time in row.items()} for name, row in rows.items()},
    }
    return CostTable.from_dict(values)


def two_layers() -> CostTable:
    """By hand, at 500,000 samples/s: 50 cores look emb up and one card computes mlp, 4.42 USD/h. On cores alone the
    two take 2.1 ms a sample: 105 cores and 4.2 USD/h for 50,000 samples/s."""
    return table({"emb": {"cpu": 1e-4}, "mlp": {"cpu": 2e-3, "v100": 2e-6}}, {"cpu": 480, "v100": 32})


def test_a_limit_of_zero_moves_layers_off_the_type() -> None:
    found = what_if(two_layers(), None, Request(min_throughput=5e4, quick=True), ["limit.v100=0"])
    assert found.base.provision == {"cpu": 50, "v100": 1}
    assert found.changed is not None
    assert found.changed.provision == {"cpu": 105}
    assert found.changed.cost_usd_per_million_samples == pytest.approx(4.2 / 3600 * 1e6 / 5e4)
    assert [(move.layer, move.before, move.after) for move in found.moves] == [("mlp", "v100", "cpu")]
    saved = found.to_dict()
    assert saved["changes"] == {"limit.v100": 0.0}
    assert saved["moved"] == {"mlp": ["v100", "cpu"]}
    assert saved["changed"]["provision"] == {"cpu": 105}


@pytest.mark.parametrize(
    ("change", "provision", "price"),
    [
        pytest.param("floor=1e6", {"cpu": 100, "v100": 2}, 8.84, id="floor"),
        pytest.param("price.v100=1.10", {"cpu": 50, "v100": 1}, 3.1, id="price"),
        pytest.param("price.v100=100", {"cpu": 105}, 4.2, id="dear"),
    ],
)
def test_each_number_can_be_changed(change: str, provision: dict[str, int], price: float) -> None:
    found = what_if(two_layers(), None, Request(min_throughput=5e4, quick=True), [change])
    assert found.changed is not None
    assert found.changed.provision == provision
    assert found.changed.price_usd_per_h == pytest.approx(price)
    assert found.base.price_usd_per_h == pytest.approx(4.42)


def test_memory_reaches_the_cluster() -> None:
    found = what_if(two_layers(), None, Request(min_throughput=5e4, quick=True), ["memory.v100=6.4e10", "limit.cpu=60"])
    assert found.changed is not None
    changed = {resource.name: resource for resource in found.changed.resources}
    assert changed["v100"].memory_bytes == 6.4e10
    assert changed["cpu"].limit == 60
    assert found.moves == ()


def test_a_change_that_leaves_no_plan_is_an_answer() -> None:
    apart = table({"a": {"cpu": 1e-4}, "b": {"v100": 1e-4}, "c": {"cpu": 1e-4}}, {"cpu": 8, "v100": 8})
    request = Request(min_throughput=1e3, quick=True)
    two_stages = what_if(apart, None, request, ["limit.cpu=1"])
    assert two_stages.changed is None
    assert "no placement fits the limits at any throughput" in two_stages.refusal
    nowhere = what_if(apart, None, request, ["limit.v100=0"])
    assert nowhere.changed is None
    assert "layer 'b' can run on no resource type" in nowhere.refusal
    assert nowhere.to_dict()["changed"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("limt.v100=4", r"'limt.v100' is no key \(allowed: limit.TYPE=units, price.TYPE=USD/h"),
        ("limit=4", "'limit' is no key"),
        ("floor.cpu=4", "'floor.cpu' is no key"),
        ("limit.v100", r"'' is no value of limit.v100 \(allowed: a whole number of units >= 0\)"),
        ("limit.v100=2.5", r"'2.5' is no value of limit.v100 \(allowed: a whole number"),
        ("price.v100=-1", r"'-1' is no value of price.v100 \(allowed: USD per hour >= 0\)"),
        ("memory.v100=nan", r"'nan' is no value of memory.v100 \(allowed: bytes >= 0\)"),
        ("floor=0", r"'0' is no value of floor \(allowed: samples per second > 0\)"),
        ("limit.tpu=4", r"limit.tpu=4: 'tpu' is no resource type \(allowed: cpu, v100\)"),
    ],
)
def test_what_is_no_change_is_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        what_if(two_layers(), None, Request(min_throughput=5e4, quick=True), [text])


def test_a_change_reads_back() -> None:
    assert Change.parse("floor=2e5") == Change(key="floor", resource="", value=2e5)
    assert str(Change.parse("price.a100-40=1.10")) == "price.a100-40=1.1"
