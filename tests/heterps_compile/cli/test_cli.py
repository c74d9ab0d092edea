"""The command line: what goes to stdout, exit codes, and errors that are one line and name the place."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from heterps_compile import cli
from heterps_compile.cli.factory import UsageError, load
from heterps_compile.errors import HeterpsWarning
from heterps_compile.models import WideDeep
from heterps_compile.plans import Plan

COSTS = {
    "version": 1,
    "batch_size": 1000,
    "resources": [
        {"name": "cpu", "price_usd_per_h": 0.04, "limit": 480, "memory_bytes": 4e9},
        {"name": "v100", "price_usd_per_h": 2.42, "limit": 32, "memory_bytes": 1.6e10},
    ],
    "layers": [
        {"name": "emb", "kind": "embedding", "parameter_bytes": 1e9},
        {"name": "mlp", "kind": "linear", "parameter_bytes": 1e6},
    ],
    "costs": {
        "emb": {
            "cpu": {"compute_s": 0.1, "communication_s": 0.02, "compute_parallel": 1.0, "communication_parallel": 1.0},
            "v100": {"compute_s": 0.09, "communication_s": 0.5, "compute_parallel": 1.0, "communication_parallel": 1.0},
        },
        "mlp": {
            "cpu": {"compute_s": 2.0, "communication_s": 0.01, "compute_parallel": 1.0, "communication_parallel": 1.0},
            "v100": {
                "compute_s": 0.002,
                "communication_s": 0.001,
                "compute_parallel": 1.0,
                "communication_parallel": 1.0,
            },
        },
    },
}
"""By hand: one card computes mlp for 500,000 samples/s, and 50 cores look emb up at that rate: 4.42 USD/h, the least
per sample. On cores alone mlp takes 20 times the cores of emb; on cards alone emb takes 250 times the cards of mlp."""

FACTORIES = """
import torch
from torch import nn

def make():
    return nn.Linear(3, 1), (torch.ones(2, 3),)

def bare():
    return nn.Linear(3, 1), torch.ones(2, 3)

def only_model():
    return nn.Linear(3, 1)

def fails():
    raise ValueError("no such table")

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a table of costs and a module of factories."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("costs.json").write_text(json.dumps(COSTS))
    Path("factories.py").write_text(FACTORIES)
    Path("broken.py").write_text("import not_installed_anywhere\n")
    yield tmp_path
    for name in ("factories", "broken"):
        sys.modules.pop(name, None)


def test_plan_from_costs_prints_json_and_nothing_else(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["plan", "--costs", "costs.json", "--min-throughput", "50000", "--json", "-"])
    shown = json.loads(capsys.readouterr().out)
    assert code == 0
    assert shown["placement"] == {"emb": "cpu", "mlp": "v100"}
    assert shown["provision"] == {"cpu": 50, "v100": 1}
    assert shown["price_usd_per_h"] == pytest.approx(0.04 * 50 + 2.42)
    assert shown["throughput_samples_per_s"] == pytest.approx(500_000)


def test_plan_reads_costs_from_stdin(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(COSTS)))
    assert cli.main(["plan", "--costs", "-", "--min-throughput", "5e4", "--policy", "cpu-only"]) == 0
    assert "cpu" in capsys.readouterr().out


def test_a_saved_plan_loads_and_explains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--costs", "costs.json", "--min-throughput", "50000", "--json", "plan.json", "--pin", "mlp=cpu"]
    assert cli.main(command) == 0
    printed = capsys.readouterr()
    assert Plan.load("plan.json").placement["mlp"] == "cpu"
    assert "plan.json" in printed.err
    assert cli.main(["explain", "plan.json"]) == 0
    explained = capsys.readouterr().out
    assert printed.out.startswith(explained)
    assert printed.out[len(explained) :].strip().startswith("simulated event by event: 50,000")


def test_an_infeasible_request_prints_the_best_plan_and_returns_1(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "--costs", "costs.json", "--min-throughput", "1e9", "--json", "-"]
    assert cli.main(command) == 1
    printed = capsys.readouterr()
    shown = json.loads(printed.out)
    assert shown["feasible"] is False
    assert shown["throughput_samples_per_s"] > 1e6
    assert "no plan reaches 1,000,000,000 samples/s" in printed.err
    assert len(printed.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["plan", "--min-throughput", "1"], ["nothing to plan", "MODULE:FACTORY"]),
        (["plan", "--costs", "costs.json"], ["--min-throughput R"]),
        (["plan", "--costs", "costs.json", "--min-throughput", "1", "--svg", "a.svg"], ["--svg", "--frontier"]),
        (["plan", "--costs", "costs.json", "--min-throughput", "1", "--replicas", "tpu=2"], ["'tpu'", "cpu, v100"]),
        (["plan", "--costs", "costs.json", "--min-throughput", "1", "--replicas", "v100=99"], ["99", "limit 32"]),
        (["plan", "m:f", "--costs", "costs.json", "--min-throughput", "1"], ["both m:f and --costs"]),
        (["plan", "--costs", "absent.json", "--min-throughput", "1"], ["absent.json", "No such file"]),
        (["plan", "--costs", "bad.json", "--min-throughput", "1"], ["bad.json", "batch_size", "-3"]),
        (["plan", "--costs", "text.json", "--min-throughput", "1"], ["text.json", "JSON"]),
        (["plan", "--costs", "costs.json", "--min-throughput", "1", "--json", "no/dir.json"], ["no/dir.json"]),
        (["plan", "factories:make", "--cluster", "absent.yaml", "--min-throughput", "1"], ["absent.yaml"]),
        (["plan", "--costs", "costs.json", "--min-throughput", "1", "--pin", "a=cpu", "--pin", "a=v100"], ["--pin a="]),
        (["plan", "--costs", "costs.json", "--min-throughput", "1", "--pin", "emb=tpu"], ["tpu", "v100"]),
        (["plan", "factories", "--min-throughput", "1"], ["'factories'", "MODULE:FACTORY"]),
        (["explain", "absent.json"], ["absent.json"]),
        (["profile"], ["MODULE:FACTORY", "--merge"]),
        (["profile", "--merge", "costs.json", "absent.json"], ["absent.json"]),
        (["profile", "nowhere:make"], ["no module 'nowhere'"]),
    ],
    ids=lambda value: " ".join(value) if value[0] in ("plan", "explain", "profile") else "",
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str], command: list[str], words: list[str]
) -> None:
    Path("bad.json").write_text(json.dumps({**COSTS, "batch_size": -3}))
    Path("text.json").write_text("{")
    assert cli.main(command) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert printed.err.startswith("heterps: error: ")
    for word in words:
        assert word in printed.err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["plan", "--costs", "c", "--min-throughput", "-1"], "allowed: a number > 0"),
        (["plan", "--costs", "c", "--min-throughput", "nan"], "allowed: a number > 0"),
        (["plan", "--costs", "c", "--min-throughput", "1", "--replicas", "v100=0"], "allowed: TYPE=N with N >= 1"),
        (["plan", "--costs", "c", "--min-throughput", "1", "--time-limit", "0"], "allowed: a number > 0"),
        (["plan", "--costs", "c", "--min-throughput", "1", "--frontier", "--compare"], "not allowed with argument"),
        (["plan", "--costs", "c", "--min-throughput", "1", "--pin", "emb"], "allowed: GLOB=TYPE"),
        (["plan", "--costs", "c", "--min-throughput", "1", "--policy", "magic"], "invalid choice"),
        (["plant"], "invalid choice: 'plant'"),
        (["explain", "plan.json", "--loud"], "unrecognized arguments: --loud"),
        (["train", "--epoch", "2"], "heterps train: error: unrecognized arguments: --epoch 2"),
        (["demo", "--sample", "2"], "heterps demo: error: unrecognized arguments: --sample 2"),
    ],
)
def test_argparse_refuses_with_code_2(capsys: pytest.CaptureFixture[str], command: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(command)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err


def test_without_a_command_the_help_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    for name in ("demo", "plan", "explain", "profile", "train", "doctor"):
        assert f"\n    {name} " in printed.err


def test_train_says_how_good_the_model_is_and_saves_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--samples", "512", "--rows", "50", "--dim", "4", "--batch-size", "128"]
    assert cli.main(["train", *sizes, "--model", "widedeep", "--optimizer", "adam", "--save", "state.pt"]) == 0
    printed = capsys.readouterr()
    assert re.search(r"widedeep, adam lr 0.001, 512 samples, 1 epochs\n[\d,]+ samples/s in steps of 128\n", printed.out)
    assert re.search(r"AUC 0\.\d{4} \(the planted signal allows 0\.\d{4}\), log-loss [\d.]+, 102 held-out", printed.out)
    eager = WideDeep((50,) * 26, 4)
    eager.load_state_dict(torch.load("state.pt")["model"])


def test_train_reads_click_files(folder: Path, shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rows", "50", "--dim", "4", "--batch-size", "533", "--model", "widedeep"]
    assert cli.main(["train", "--train", str(shared_data / "criteo_train.tiny.csv"), *sizes]) == 0
    assert "1,599 samples" in capsys.readouterr().out
    assert cli.main(["train", "--train", "absent.csv", *sizes]) == 2
    assert capsys.readouterr().err.startswith("heterps: error: absent.csv")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "heterps-compile 0.1.0\n"


def test_our_warnings_are_one_line_on_stderr(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def explain(arguments: object) -> int:
        warnings.warn("emb runs slower", HeterpsWarning, stacklevel=1)
        return 0

    monkeypatch.setattr("heterps_compile.cli.planning.explain", explain)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert cli.main(["explain", "plan.json"]) == 0
    assert capsys.readouterr().err == "heterps: warning: emb runs slower\n"


def test_a_reader_that_stops_early_is_no_error(folder: Path) -> None:
    command = f"{sys.executable} -m heterps_compile.cli --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: heterps")
    assert done.stderr == ""


def test_factory_returns_model_and_inputs(folder: Path) -> None:
    model, inputs = load("factories:make")
    assert (type(model).__name__, [tuple(x.shape) for x in inputs]) == ("Linear", [(2, 3)])
    assert [tuple(x.shape) for x in load("factories:bare")[1]] == [(2, 3)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("factories", r"'factories' is not MODULE:FACTORY, such as my_models:make"),
        (":make", r"':make' is not MODULE:FACTORY"),
        ("factories.py:make", r"'factories.py' is a path\nhint: write the module with dots: factories:\.\.\."),
        ("nowhere:make", r"no module 'nowhere' in .* or among the installed packages"),
        ("nowhere.deep:make", r"no module 'nowhere' in "),
        (
            "broken:make",
            r"importing broken raised ModuleNotFoundError: No module named 'not_installed_anywhere' \(.*broken.py:1\)",
        ),
        ("factories:mak", r"module factories \(.*factories.py\) has no 'mak'\nhint: did you mean make\?"),
        ("factories:number", r"number is a int, not a function"),
        ("factories:only_model", r"returned a Linear \(allowed: \(model, example_inputs\) with an nn.Module first\)"),
        ("factories:fails", r"factories:fails raised ValueError: no such table \(.*factories.py:15\)"),
    ],
)
def test_a_wrong_factory_is_named(folder: Path, spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(spec)


def test_profiles_merge(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("cpu", "v100"):
        one = {
            **COSTS,
            "resources": [resource for resource in COSTS["resources"] if resource["name"] == kind],
            "costs": {layer: {kind: row[kind]} for layer, row in COSTS["costs"].items()},
        }
        Path(f"{kind}.json").write_text(json.dumps(one))
    assert cli.main(["profile", "--merge", "cpu.json", "v100.json", "--out", "both.json"]) == 0
    assert capsys.readouterr().out == ""
    commands = [["plan", "--costs", name, "--min-throughput", "50000"] for name in ("both.json", "costs.json")]
    assert [cli.main(command) for command in commands] == [0, 0]
