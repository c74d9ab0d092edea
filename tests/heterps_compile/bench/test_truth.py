"""``heterps bench truth``: stages that run alone do what they do together, and the table says what was measured."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
import torch

from heterps_compile import cli
from heterps_compile.bench import truth
from heterps_compile.bench.stage_steps import stage_steps
from heterps_compile.bench.truth import Case, Outcome, Round, Sizes, cases, in_turns, run
from heterps_compile.bench.truth_text import closing_text, table, to_dict
from heterps_compile.capture import capture
from heterps_compile.devices import sim
from heterps_compile.models import DLRM, WideDeep
from heterps_compile.passes.trace import Trace
from heterps_compile.plans import Plan

SMALL = Sizes(rows=50, dim=8, batch_size=16, rounds=2, steps=1)


def outcome(layers_s: float, stages_s: float, model: str = "dlrm") -> Outcome:
    """Measured 10 ms for 100 samples in every round."""
    rounds = (Round(layers_s, stages_s, 0.010), Round(layers_s, stages_s, 0.010), Round(1.0, 1.0, 0.010))
    return Outcome(case=Case(model=model, cores=1, types="cpu"), batch_size=100, num_stages=1, rounds=rounds)


def test_errors_are_of_throughput_and_the_median_round_counts() -> None:
    found = outcome(0.008, 0.0125)
    assert found.measured_samples_per_s == pytest.approx(10_000)
    assert found.layers_error == pytest.approx(0.25)  # promised 12,500
    assert found.stages_error == pytest.approx(-0.20)  # promised 8,000


def test_the_table_and_its_summary() -> None:
    outcomes = [outcome(0.008, 0.0100), outcome(0.0100, 0.0101, model="dcn")]
    text = table(outcomes)
    assert re.search(r"dlrm +1 +cpu +1 +10,000 +12,500 +\+25.0% +10,000 +[+-]0.0% +3", text)
    closing = closing_text(outcomes, 1.25)
    assert "from layers: 1 of 2 within 15%, between +0.0% and +25.0%" in closing
    assert "from stages: 2 of 2 within 15%" in closing
    assert "load average of the last minute: 1.2" in closing
    assert json.loads(json.dumps(to_dict(outcomes)))["cases"][0]["layers_error"] == pytest.approx(0.25)


def test_every_model_runs_on_every_number_of_cores_and_both_kinds_of_cluster() -> None:
    assert [(c.model, c.cores, c.types) for c in cases(["a", "b"], [1, 2])][:5] == [
        ("a", 1, "cpu"), ("a", 1, "cpu+sim"), ("a", 2, "cpu"), ("a", 2, "cpu+sim"), ("b", 1, "cpu"),
    ]  # fmt: skip


def test_steps_take_turns_and_their_first_one_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = iter([0, 50, 90, 91, 91, 93])  # warming up from 0 and from 50, then 1 s and 2 s
    monkeypatch.setattr(truth.time, "perf_counter", lambda: next(clock))
    assert in_turns([lambda: order.append("a"), lambda: order.append("b")], 1) == [1, 2]
    assert order == ["a", "b"] * 2


def two_stages(names: tuple[str, ...]) -> Plan:
    """Look-ups on cpu, the rest on sim."""
    tables = tuple(name for name in names if name.startswith("emb"))
    rest = tuple(name for name in names if name not in tables)
    return Plan.from_dict(
        {
            "stages": [{"resource": "cpu", "layers": list(tables)}, {"resource": "sim", "layers": list(rest)}],
            "resources": [{"name": "cpu", "price_usd_per_h": 0.04, "limit": 1}, {"name": "sim", "limit": 1}],
        }
    )


def test_stages_that_run_alone_train_every_parameter_where_it_is_placed() -> None:
    sim.install()
    model = DLRM([50] * 26, 8, bottom=(8,), top=(8,), sparse=True)
    inputs = (torch.randn(16, 13), torch.randint(0, 50, (16, 26)))
    (captured,) = capture(model, inputs)
    graph = Trace()(captured.gm, captured.example_inputs)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    made: list[int] = []

    def make(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        made.append(len(parameters))
        return torch.optim.SGD(parameters, lr=0.5)

    steps = stage_steps(captured.gm, captured.example_inputs, graph, two_stages(graph.names()), make)
    assert made == [26, 8]
    for step in steps:
        step()
    for name, parameter in model.named_parameters():
        assert parameter.device.type == ("cpu" if "tables" in name else "sim"), name
        assert not torch.equal(parameter.detach().cpu(), before[name]), name
        assert parameter.grad is None


def test_gradients_cross_to_the_stage_before_as_in_the_whole_step() -> None:
    """A stage alone gets gradients of ones: its first-order tables, which only a sum follows, get what eager gets."""
    sim.install()
    model = WideDeep([50] * 26, 8, deep=(8,), sparse=True)
    dense, ids = torch.randn(16, 13), torch.randint(0, 50, (16, 26))
    table: Any = model.wide.tables[3]
    expected = table.weight.detach().clone()
    expected.index_put_((ids[:, 3],), torch.tensor(-0.5), accumulate=True)  # SGD on the sum of the logits
    (captured,) = capture(model, (dense, ids))
    graph = Trace()(captured.gm, captured.example_inputs)
    plan = two_stages(graph.names())
    for step in stage_steps(captured.gm, captured.example_inputs, graph, plan, lambda p: torch.optim.SGD(p, lr=0.5)):
        step()
    torch.testing.assert_close(table.weight.detach(), expected)


def test_both_kinds_of_cluster_give_positive_times(monkeypatch: pytest.MonkeyPatch) -> None:
    small = functools.partial(DLRM, bottom=(8,), top=(8,))
    monkeypatch.setitem(truth.MODELS, "dlrm", small)
    before = torch.get_num_threads()
    one, two = run(cases(["dlrm"], [1]), SMALL)
    assert torch.get_num_threads() == before
    assert (one.num_stages, two.num_stages) == (1, 2)
    for found in (one, two):
        assert len(found.rounds) == 2
        assert all(t > 0 for r in found.rounds for t in (r.layers_s, r.stages_s, r.measured_s))


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--models", "bert"], "--models names no model 'bert' (allowed: dlrm,"), (["--cores", "0"], "--cores names 0")],
)
def test_wrong_usage_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "truth", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_command_prints_table_and_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(truth, "run", lambda wanted, sizes: iter([outcome(0.01, 0.01)]))
    assert cli.main(["bench", "truth", "--models", "dlrm", "--cores", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("model")
    assert "torch" in out.splitlines()[-1]
