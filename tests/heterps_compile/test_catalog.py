"""The catalog of resource types: what it holds, how a cluster file borrows from it, and spot prices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from heterps_compile.catalog import CATALOG
from heterps_compile.cluster import Cluster, ResourceType, closest
from heterps_compile.costs import CostTable
from heterps_compile.errors import FileFormatError

CORES = ("cpu", "cpu-aws", "cpu-gcp", "cpu-azure")
CARDS = ("t4", "v100", "a10g", "l4", "a100-40", "a100-80", "h100", "h200", "mi300x", "kunlun")


def one(**entry: Any) -> ResourceType:
    return Cluster.from_dict({"resources": [{"limit": 1, **entry}]}).resources[0]


@pytest.mark.parametrize("name", [*CORES, *CARDS, "sim"])
def test_an_entry_has_rates_memory_and_a_price_and_says_where_they_are_from(name: str) -> None:
    resource = one(name=name)
    assert resource.price_usd_per_h > 0
    assert resource.balance_flop_per_byte > 1
    assert resource.memory_bytes > 0
    assert resource.network_bytes_per_s > 0
    assert resource.source
    assert resource.price_source
    assert resource.date or name == "sim"
    assert resource.price_date or "not confirmed" in resource.price_source or name == "sim"
    assert resource.spot_price_usd_per_h < resource.price_usd_per_h
    assert (resource.unit, resource.device == "cpu") == (("core", True) if name in CORES else ("card", False))
    assert resource.tensor_flops_per_s >= resource.flops_per_s or name in CORES


def test_the_catalog_holds_nothing_else() -> None:
    assert set(CATALOG) == {*CORES, *CARDS, "sim"}


def test_prices_of_cards_are_their_share_of_the_machine() -> None:
    assert one(name="a100-40").price_usd_per_h == pytest.approx(21.957642 / 8, abs=1e-5)
    assert one(name="h200").price_usd_per_h == pytest.approx(63.296 / 8)
    assert one(name="cpu-aws").price_usd_per_h == pytest.approx(8.568 / 96)


def test_any_field_can_be_overridden_and_borrowed() -> None:
    fields = {"memory_bytes": 16e9, "interconnect_bytes_per_s": 1.6e10}
    entry = one(name="old", like="v100", price_usd_per_h=0.9, **fields)
    assert (entry.price_usd_per_h, entry.memory_bytes, entry.flops_per_s) == (0.9, 16e9, 15.7e12)
    assert (entry.interconnect_bytes_per_s, entry.tensor_flops_per_s) == (1.6e10, 1.25e14)


def test_the_source_of_a_price_goes_with_the_price() -> None:
    assert one(name="h100", price_usd_per_h=6.88).price_source == CATALOG["h100"]["price_source"]
    mine = one(name="h100", price_usd_per_h=2.1)
    assert (mine.price_source, mine.price_date) == ("", "")
    assert mine.source == CATALOG["h100"]["source"]
    assert one(name="h100", price_usd_per_h=2.1, price_source="our contract").price_source == "our contract"


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "a10g"},
        {"name": "a10g", "spot": True},
        {"name": "a10g", "price_usd_per_h": 0.7, "price_date": "2026-01"},
        {"name": "mine", "like": "h100", "spot": True, "spot_price_usd_per_h": 1.5, "tensor_flops_per_s": 1e15},
        {"name": "h100", "spot": True, "price_usd_per_h": 9.0},
        {"name": "a10g", "source": "", "spot_price_usd_per_h": 0.0},
    ],
)
def test_an_entry_is_saved_and_read_back_equal(entry: dict[str, Any], tmp_path: Path) -> None:
    cluster = Cluster.from_dict({"resources": [{**entry, "limit": 3}]})
    cluster.save(tmp_path / "fleet.yaml")
    assert Cluster.load(tmp_path / "fleet.yaml") == cluster


def test_spot_is_priced_at_the_spot_price() -> None:
    assert one(name="a10g").price_usd_per_h == 1.006
    assert one(name="a10g", spot=True).price_usd_per_h == 0.4591
    assert one(name="a10g", spot=False).price_usd_per_h == 1.006
    assert one(name="a10g", spot=True, spot_price_usd_per_h=0.3).price_usd_per_h == 0.3
    assert one(name="a10g", spot=True, price_usd_per_h=0.9).price_usd_per_h == 0.4591


def test_spot_reaches_a_table_of_costs() -> None:
    table = {
        "batch_size": 1,
        "resources": [{"name": "t4", "limit": 2, "spot": True}],
        "layers": [{"name": "fc"}],
        "costs": {"fc": {"t4": {"compute_s": 1.0}}},
    }
    assert CostTable.from_dict(table).resources[0].price_usd_per_h == 0.2069


@pytest.mark.parametrize("entry", ["{name: kunlun, limit: 2, spot: true}", "{name: my-card, limit: 2, spot: true}"])
def test_spot_without_a_spot_price_says_what_to_give(entry: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(f"version: 1\nresources:\n  - {{name: cpu, limit: 4}}\n  - {entry}\n")
    name = entry[7 : entry.index(",")]
    message = (
        rf"fleet.yaml:4: resources\[1\].spot is true \(allowed: true where the spot price is known; "
        rf"give spot_price_usd_per_h of {name}, or leave spot out\)$"
    )
    with pytest.raises(FileFormatError, match=message):
        Cluster.load(path)


@pytest.mark.parametrize(
    ("written", "read"), [("2026-01-31", "2026-01-31"), ("2026", "2026"), ("'2026-01'", "2026-01")]
)
def test_dates_need_no_quotes(written: str, read: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(f"resources:\n  - {{name: cpu, limit: 4, date: {written}}}\n")
    assert Cluster.load(path)["cpu"].date == read


@pytest.mark.parametrize(
    ("name", "entry"),
    [("NVIDIA A100-SXM4-80GB", "a100-80"), ("Tesla V100-SXM2-16GB", "v100"), ("NVIDIA H100 80GB HBM3", "h100")],
)
def test_a_card_is_recognised(name: str, entry: str) -> None:
    assert closest(name) == entry
