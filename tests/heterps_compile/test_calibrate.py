"""Rates of this machine: plausible, remembered, and made anew when the cache cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from heterps_compile import cache, calibrate, plan
from heterps_compile.calibrate import Calibration
from heterps_compile.cluster import Cluster

FOUND = Calibration(flops_per_s=3e10, stream_bytes_per_s=1e10, gather_bytes_per_s=1e9, copy_bytes_per_s=5e9, cores=2)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HETERPS_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_rates_are_plausible_and_nothing_is_left_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "STREAM_BYTES", 2**20)
    monkeypatch.setattr(calibrate, "MATMUL_SIZE", 128)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    found = calibrate.calibrate()
    assert 1e8 < found.flops_per_s < 1e13
    assert all(
        1e7 < rate < 1e13 for rate in (found.stream_bytes_per_s, found.gather_bytes_per_s, found.copy_bytes_per_s)
    )
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_a_calibration_is_made_once(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    times: list[int] = []
    monkeypatch.setattr(calibrate, "_measure", lambda: times.append(1) or FOUND)
    assert calibrate.calibrate() == calibrate.calibrate() == FOUND
    assert len(times) == 1
    (file,) = (own_cache / "calibration").iterdir()
    file.write_text('{"flops_per_s": ')
    assert calibrate.calibrate() == FOUND
    file.write_text('{"flops_per_s": 1.0}')
    assert calibrate.calibrate() == FOUND
    assert len(times) == 3
    calibrate.calibrate(refresh=True)
    assert len(times) == 4


def test_rates_of_this_machine_in_a_cluster() -> None:
    cluster = Cluster.from_dict({"resources": [{"name": "cpu", "price_usd_per_h": 0.04, "limit": 2},
                                               {"name": "v100", "price_usd_per_h": 2.0, "limit": 1}]})  # fmt: skip
    applied = FOUND.applied(cluster)
    assert applied["cpu"].balance_flop_per_byte == 3.0
    assert applied["cpu"].network_bytes_per_s == 5e9
    assert applied["cpu"].price_usd_per_h == 0.04
    assert applied["v100"] == cluster["v100"]


def test_a_plan_without_a_cluster_reckons_with_these_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_measure", lambda: FOUND)
    found = plan(torch.nn.Linear(4, 2), (torch.ones(8, 4),), profile="estimate")
    (cpu,) = (resource for resource in found.resources if resource.name == "cpu")
    assert (cpu.flops_per_s, cpu.memory_bytes_per_s) == (FOUND.flops_per_s, FOUND.stream_bytes_per_s)


def test_a_folder_that_cannot_be_written_to_costs_only_the_saving(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HETERPS_CACHE_DIR", str(tmp_path / "file"))
    cache.save("profiles", "key", {"a": 1})
    assert cache.load("profiles", "key") is None
