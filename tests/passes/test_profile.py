"""Costs of layers: estimates follow the rates, measurements say that they are, disturb nothing and are remembered."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from heterps_compile.cluster import Cluster
from heterps_compile.costs import CostTable
from heterps_compile.fx.run import LayerRun
from heterps_compile.models import DLRM
from heterps_compile.passes.lower import Lower
from heterps_compile.passes.profile import Profile, device_of, estimate, parallel_part
from heterps_compile.passes.trace import Trace
from heterps_compile.stage_graph import StageGraph

FLEET = Cluster.from_dict(
    {
        "resources": [
            {"name": "cpu", "price_usd_per_h": 0.04, "limit": 4},
            {"name": "v100", "price_usd_per_h": 2.4, "limit": 4},
        ]
    }
)
BATCH = 32


@pytest.fixture
def dlrm(record: Any) -> tuple[Any, ...]:
    model = DLRM([40] * 26, 8, bottom=(16, 16), top=(16,), sparse=True)
    ((gm, inputs),) = record(model, torch.randn(BATCH, 13), torch.randint(0, 40, (BATCH, 26)))
    return model, gm, Trace()(gm, inputs)


def test_every_layer_has_a_cost_on_every_type_and_says_where_it_is_from(dlrm: tuple[Any, ...]) -> None:
    _, gm, graph = dlrm
    costs = Profile(mode="measure", remember=False)(gm, graph, FLEET)
    assert costs.names() == graph.names()
    assert costs.batch_size == BATCH
    assert costs.sources() == {"cpu": "measured", "v100": "estimated"}
    assert CostTable.from_json(json.dumps(costs.to_dict())) == costs


@pytest.mark.parametrize(("mode", "types", "source"), [("estimate", 2, "estimated"), ("auto", 1, "estimated"),
                                                       ("auto", 2, "measured")])  # fmt: skip
def test_auto_measures_when_there_is_a_choice(mode: Any, types: int, source: str, dlrm: tuple[Any, ...]) -> None:
    _, gm, graph = dlrm
    fleet = Cluster(resources=FLEET.resources[:types])
    assert Profile(mode=mode, remember=False)(gm, graph, fleet).sources()["cpu"] == source


def test_measuring_disturbs_nothing(dlrm: tuple[Any, ...]) -> None:
    model, gm, graph = dlrm
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with torch.inference_mode():
        Profile(mode="measure", remember=False)(gm, graph, FLEET)
        assert torch.is_inference_mode_enabled()
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_num_threads() == threads
    torch.testing.assert_close(model.state_dict(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_buffers_are_not_the_users(record: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    ((gm, inputs),) = record(model, torch.randn(BATCH, 6))
    before = {name: value.clone() for name, value in model.named_buffers()}
    costs = Profile(mode="measure", remember=False)(gm, Trace()(gm, inputs), FLEET)
    assert costs.sources()["cpu"] == "measured"
    torch.testing.assert_close(dict(model.named_buffers()), before)


def test_layers_of_equal_content_are_measured_once(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ((gm, inputs),) = record(nn.Sequential(*(nn.Linear(6, 6) for _ in range(5))), torch.randn(BATCH, 6))
    graph = Trace()(gm, inputs)
    measured: list[str] = []

    def fit(self: Profile, run: LayerRun, *rest: Any) -> tuple[float, float]:
        measured.append(run.key)
        return 1.0, 0.5

    monkeypatch.setattr(Profile, "_fit", fit)
    costs = Profile(mode="measure", remember=False)(gm, graph, FLEET)
    assert len(graph) == 5
    assert len(measured) == 2  # the first, whose input wants no gradient, and the others
    assert all(costs[name]["cpu"].compute_s == 1.0 for name in graph.names())


def test_measurements_are_remembered_and_a_torn_file_is_made_anew(
    dlrm: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, gm, graph = dlrm
    monkeypatch.setenv("HETERPS_CACHE_DIR", str(tmp_path))
    first = Profile(mode="measure")(gm, graph, FLEET)
    assert Profile(mode="measure")(gm, graph, FLEET) == first
    files = sorted((tmp_path / "profiles").iterdir())
    assert {file.suffix for file in files} == {".json"}
    for file in files:
        file.write_text(file.read_text()[:7])
    assert Profile(mode="measure")(gm, graph, FLEET).sources()["cpu"] == "measured"
    assert all("compute_s" in json.loads(file.read_text()) for file in files)


def test_a_layer_that_cannot_run_alone_is_estimated(record: Any, composed: type) -> None:
    table = nn.Parameter(torch.randn(5, 4))
    model = composed(lambda m, x: m.table.index_select(0, x.view(-1) // 1000), table=table)
    ((gm, inputs),) = record(model, torch.full((BATCH,), 4000))
    graph = Trace()(gm, inputs)
    runs = LayerRun(gm, graph.layers[0])
    runs.module.forward = None  # type: ignore[assignment, method-assign]
    assert Profile()._fit(runs, BATCH, torch.device("cpu"), 1, 0.9) is None


def test_layers_run_as_they_are_lowered_with_their_update(dlrm: tuple[Any, ...]) -> None:
    _, gm, graph = dlrm
    lowered: list[str] = []
    stepped: list[int] = []

    def runs_as(stage: StageGraph) -> Any:
        made = Lower()(stage)
        lowered.append(made.how[stage.cut.name])
        return made.run

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            stepped.append(sum(parameter.grad is not None for parameter in self.param_groups[0]["params"]))
            return super().step(closure)

    costs = Profile(mode="measure", remember=False, runs_as=runs_as, make_optimizer=lambda p: Counting(p, lr=0.1))(
        gm, graph, FLEET
    )
    assert costs.sources()["cpu"] == "measured"
    assert "26 look-ups in 1 generated C++ call" in lowered
    assert "torch eager on cpu" in lowered
    assert set(stepped) == {2, 26}  # weight and bias of a linear layer; every table of the group


def test_the_simulated_accelerator_is_measured_only_on_request() -> None:
    (sim,) = Cluster.from_dict({"resources": [{"name": "sim", "limit": 1}]})
    assert device_of(sim) is None
    assert str(device_of(sim, simulated=True)) == "sim:0"


def test_rows_are_estimated_by_the_lines_of_memory_they_take(dlrm: tuple[Any, ...]) -> None:
    """26 rows of 32 bytes take a line of 64 bytes each at 0.5e9 byte/s; the rest streams at 0.7 of the rate."""
    _, _, graph = dlrm
    layer, cpu = graph.layers[0], FLEET["cpu"]
    slope_s = (estimate(layer, cpu, 2000).compute_s - estimate(layer, cpu, 1000).compute_s) / 1000
    streamed = layer.forward_bytes_per_sample + layer.backward_bytes_per_sample - layer.touched_bytes_per_sample
    assert slope_s == pytest.approx(26 * 64 / 5e8 + streamed / (0.7 * cpu.memory_bytes_per_s))
    wide = replace(layer, touched_bytes_per_sample=26 * 6400.0, forward_bytes_per_sample=1e5)
    assert estimate(wide, cpu, 1000).compute_s > 1000 * 26 * 6400 / 5e8


def test_an_estimate_follows_the_rates_and_the_batch(dlrm: tuple[Any, ...]) -> None:
    _, _, graph = dlrm
    layer, card = graph["top.0"], FLEET["v100"]
    fast = replace(card, flops_per_s=2 * card.flops_per_s, memory_bytes_per_s=2 * card.memory_bytes_per_s)
    at = {
        (kind.flops_per_s, batch): estimate(layer, kind, batch).compute_s
        for kind in (card, fast)
        for batch in (0, 1000)
    }
    fixed = at[card.flops_per_s, 0]
    assert fixed == at[fast.flops_per_s, 0] > 0
    assert at[card.flops_per_s, 1000] - fixed == pytest.approx(2 * (at[fast.flops_per_s, 1000] - fixed))


def test_communication_is_rows_and_inputs_over_the_network(dlrm: tuple[Any, ...]) -> None:
    _, _, graph = dlrm
    layer, cpu = graph.layers[0], FLEET["cpu"]
    assert layer.touched_bytes_per_sample == 26 * 8 * 4
    cost = estimate(layer, cpu, 1000)
    moved_s = 1000 * (26 * 8 * 4 + 26 * 8) / cpu.network_bytes_per_s
    assert cost.communication_s == pytest.approx(moved_s + 5e-5)
    assert cost.communication_parallel == pytest.approx(moved_s / cost.communication_s)


def test_alpha_of_exact_observations() -> None:
    alpha = 0.8
    points = [(1 / cores, 1 - alpha + alpha / cores) for cores in (2, 4, 8)]
    assert parallel_part(points, prior=alpha) == pytest.approx(alpha)
    assert parallel_part([], prior=alpha) == pytest.approx(alpha)
    assert parallel_part([(0.5, 2.0)] * 9, prior=alpha) == 0.0
