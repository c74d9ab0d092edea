"""``heterps simulate``: a plan and its costs in, predicted beside simulated out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from heterps_compile import cli

COSTS = {
    "batch_size": 1000,
    "resources": [
        {"name": "cpu", "price_usd_per_h": 0.04, "limit": 480},
        {"name": "v100", "price_usd_per_h": 2.42, "limit": 32},
    ],
    "layers": [{"name": "emb"}, {"name": "mlp"}],
    "costs": {"emb": {"cpu": {"compute_s": 0.1}}, "mlp": {"v100": {"compute_s": 0.008}}},
}
PLAN = {
    "stages": [
        {"resource": "cpu", "layers": ["emb"], "replicas": 50},
        {"resource": "v100", "layers": ["mlp"], "replicas": 2},
    ]
}
"""By hand: 1000 samples in 0.1 s / 50 = 2 ms and in 0.008 s / 2 = 4 ms, so 250,000 samples/s once it is full."""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    (tmp_path / "costs.json").write_text(json.dumps(COSTS))
    return [str(tmp_path / "plan.json"), "--costs", str(tmp_path / "costs.json")]


def test_text_shows_prediction_simulation_and_where_time_goes(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", *files, "--microbatches", "500"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"pipeline full +250,000 +250,000 +[+-]0.0%", out)
    assert re.search(r"filled and drained +249,501 +249,\d{3} +[+-]0.\d%", out)  # 250,000 * 500 / 501
    assert "500 microbatches of 1,000 samples on 52 replicas (split dispatch, jitter 0%)" in out
    assert re.search(r"0 +cpu +50 +49.9%", out)
    assert re.search(r"1 +v100 +2 +99.9%", out)


def test_json_holds_the_same_and_the_seed_decides(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    runs = []
    for seed in ("1", "1", "2"):
        assert cli.main(["simulate", *files, "--jitter", "0.2", "--seed", seed, "--json", "-"]) == 0
        runs.append(json.loads(capsys.readouterr().out))
    assert runs[0] == runs[1] != runs[2]
    assert runs[0]["predicted_samples_per_s"] == pytest.approx(250_000)
    assert abs(runs[0]["error"]) < 0.05
    assert len(runs[0]["busy"]) == 2


def test_json_goes_to_a_file_beside_the_text(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.json"
    assert cli.main(["simulate", *files, "--dispatch", "whole", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["throughput_samples_per_s"] == pytest.approx(250_000, rel=0.02)
    assert "whole dispatch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--jitter", "2"], 2, "jitter is 2 (allowed: from 0 to 1, such as 0.1 for 10 %)"),
        (["--microbatches", "1"], 2, "microbatches is 1 (allowed: a whole number >= 2)"),
        (["--seed", "-1"], 2, "--seed is -1 (allowed: a whole number >= 0)"),
        (["--cluster", "nowhere.yaml"], 2, "nowhere.yaml"),
    ],
)
def test_errors_are_one_line(
    files: list[str], words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", *files, *words]) == code
    error = capsys.readouterr().err
    assert error.startswith("heterps: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_a_plan_of_other_layers_is_one_line(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"stages": [{"resource": "cpu", "layers": ["other"]}]}))
    assert cli.main(["simulate", *files]) == 1
    assert "the stages do not hold the layers of the graph" in capsys.readouterr().err
