"""``heterps plan`` beyond one plan: what-if, frontier, comparison, spot prices; stdout, files and exit codes."""

from __future__ import annotations

import io
import json
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from heterps_compile import cli
from heterps_compile.cli.progress import steps, working

COSTS = {
    "batch_size": 1000,
    "resources": [
        {"name": "cpu", "price_usd_per_h": 0.04, "limit": 480},
        {"name": "v100", "price_usd_per_h": 2.42, "limit": 32, "spot_price_usd_per_h": 0.80},
    ],
    "layers": [{"name": "emb"}, {"name": "mlp"}],
    "costs": {
        "emb": {"cpu": {"compute_s": 0.1}},
        "mlp": {"cpu": {"compute_s": 2.0}, "v100": {"compute_s": 0.002}},
    },
}
"""By hand: 50 cores look emb up for 500,000 samples/s and one card computes mlp: 4.42 USD/h. The 480 cores reach 9.6
times that, 4,800,000 samples/s. Without cards, 105 cores reach 50,000 samples/s for 4.20 USD/h."""

FLEET = """
version: 1
resources:
  - {name: cpu, price_usd_per_h: 0.04, limit: 64}
  - {name: v100, price_usd_per_h: 2.42, limit: 4}
"""

MODEL = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)), (torch.ones(32, 64),)
"""
ASK = ["plan", "--costs", "costs.json", "--min-throughput", "5e4"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working directory with a table of costs, a fleet and a model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("costs.json").write_text(json.dumps(COSTS))
    Path("fleet.yaml").write_text(FLEET)
    Path("small_model.py").write_text(MODEL)
    yield
    sys.modules.pop("small_model", None)


def test_what_if_prints_both_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ASK, "--what-if", "limit.v100=0"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "rent 105 cpu for $4.20/h" in printed.out.splitlines()[0]
    assert "mlp  v100  ->  cpu" in printed.out
    assert cli.main([*ASK, "--what-if", "price.v100=5", "--what-if", "floor=4e5", "--json", "-"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["changes"] == {"price.v100": 5.0, "floor": 4e5}
    assert shown["base"]["price_usd_per_h"] == pytest.approx(4.42)
    assert shown["changed"]["price_usd_per_h"] == pytest.approx(0.04 * 50 + 5)
    assert shown["moved"] == {}


def test_what_if_returns_1_when_the_changed_case_has_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ASK, "--what-if", "floor=1e8"]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith("With floor=100000000 no plan reaches 100,000,000 samples/s; the best reaches 4,")
    assert printed.err.startswith("heterps: no plan reaches 100,000,000 samples/s; the best reaches 4,")
    assert cli.main([*ASK, "--what-if", "limit.cpu=0"]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("heterps: no plan with limit.cpu=0: layer 'emb' can run on no resource type")
    assert cli.main(["plan", "--costs", "costs.json", "--min-throughput", "1e7", "--what-if", "floor=5e4"]) == 0


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (["--what-if", "limt.v100=1"], "(allowed: limit.TYPE=units, price.TYPE=USD/h, memory.TYPE=bytes, floor="),
        (["--what-if", "limit.tpu=1"], "'tpu' is no resource type (allowed: cpu, v100)"),
        (["--html", "page.html"], "give --frontier as well"),
        (["--frontier", "--policy", "greedy"], "--frontier plans by exact, not by greedy"),
        (["--microbatches", "4"], "give --mode full as well"),
    ],
)
def test_a_wrong_question_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], question: list[str], words: str
) -> None:
    assert cli.main([*ASK, *question]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert len(printed.err.splitlines()) == 1


def test_a_frontier_needs_no_floor_and_writes_its_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--costs", "costs.json", "--frontier", "--svg", "f.svg", "--html", "f.html", "--json", "f.json"]
    assert cli.main(command) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [f"heterps: wrote {name}" for name in ("f.svg", "f.html", "f.json")]
    assert printed.out.startswith("Cheapest per sample: 50 cpu and 1 v100 for $4.42/h, 500,000 samples/s")
    assert "throughput reached, samples/s (log scale)" in printed.out
    ElementTree.parse("f.svg")
    assert "<svg" in Path("f.html").read_text()
    shown = json.loads(Path("f.json").read_text())
    reached = [entry["throughput_samples_per_s"] for entry in shown["points"]]
    assert reached[0] == pytest.approx(5e5)
    assert reached[-1] == pytest.approx(4.8e6, rel=1e-5)
    assert shown["end"]["binds"] == ["limit of cpu (480)"]


def test_a_frontier_below_the_floor_returns_1(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--costs", "costs.json", "--frontier", "--json", "-"]
    assert cli.main([*command, "--min-throughput", "1e6"]) == 0
    within = json.loads(capsys.readouterr().out)
    assert any(point["floor_samples_per_s"] == 1e6 for point in within["points"])
    assert cli.main([*command, "--min-throughput", "1e7"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["points"]
    assert "no plan reaches 10,000,000 samples/s; the best reaches 4," in printed.err
    assert "limit of cpu (480)" in printed.err


def test_compare_sets_all_policies_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ASK, "--compare"]) == 0
    out = capsys.readouterr().out
    assert "above optimum" in out
    for policy in ("rl", "rl-rnn", "exact", "brute-force", "greedy", "genetic", "cpu-only", "gpu-only", "heuristic"):
        assert any(line.startswith(f"{policy} ") for line in out.splitlines())


def test_a_model_is_compared_and_asked_about_as_a_table_is(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["plan", "small_model:make", "--cluster", "fleet.yaml", "--min-throughput", "1e5"]
    assert cli.main([*model, "--compare", "--samples", "1e9"]) == 0
    compared = capsys.readouterr().out
    assert "full cost model" in compared
    assert "The whole training of 1,000,000,000 samples: $" in compared
    assert "above optimum" in compared
    assert cli.main([*model, "--optimizer", "sgd", "--json", "-"]) == 0
    light = json.loads(capsys.readouterr().out)
    assert cli.main([*model, "--json", "-"]) == 0
    heavy = json.loads(capsys.readouterr().out)
    assert 0 < light["stages"][0]["memory_bytes"] < heavy["stages"][0]["memory_bytes"]
    assert cli.main([*model, "--mode", "paper", "--what-if", "limit.cpu=32"]) == 0
    assert capsys.readouterr().out.startswith("With limit.cpu=32 ")


def test_spot_prices_are_paid_and_a_type_without_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert cli.main([*ASK, "--spot", "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["price_usd_per_h"] == pytest.approx(0.04 * 50 + 0.80)
    assert printed.err.startswith("heterps: warning: --spot: no spot price is known of cpu; the price on demand is")
    without = [{k: v for k, v in r.items() if k == "name" or "price" in k or k == "limit"} for r in COSTS["resources"]]
    for resource in without:
        resource["spot_price_usd_per_h"] = 0
    Path("costs.json").write_text(json.dumps({**COSTS, "resources": without}))
    assert cli.main([*ASK, "--spot"]) == 2
    assert "no spot price is known of cpu, v100" in capsys.readouterr().err


def test_units_can_be_forced(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ASK, "--replicas", "v100=3", "--replicas", "cpu=60", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["provision"] == {"cpu": 60, "v100": 3}
    assert cli.main([*ASK, "--replicas", "v100=3", "--replicas", "v100=4"]) == 2
    assert "--replicas v100=... is given more than once" in capsys.readouterr().err


class Terminal(io.StringIO):
    """Standard error as a terminal, which says when something has been written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


def test_progress_is_shown_on_a_terminal_and_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with working("planning"):
        assert terminal.written.wait(30)
    assert "planning: " in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\033[K")
    with steps("frontier", 2) as step:
        step()
    assert "frontier" in terminal.getvalue()


def test_without_a_terminal_there_is_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with working("planning"), steps("frontier", 2) as step:
        step()
    assert capsys.readouterr().err == ""
