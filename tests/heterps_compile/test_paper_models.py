"""The paper's models: shapes, formulas, layers, and that compiling changes neither outputs nor gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

import heterps_compile
from heterps_compile.errors import PlanError
from heterps_compile.graph import LayerGraph
from heterps_compile.models import CTRDNN, NCE, PAPER_MODELS, MatchNet, TwoEmbeddings, ctrdnn
from heterps_compile.planner import model_graph

ROWS = 120
BIG_ROWS = 30_000  # more than Trace.small_table_bytes
FLEET = {
    "resources": [
        {"name": "cpu", "limit": 64},
        {"name": "sim", "limit": 4},
        {"name": "cpu-aws", "limit": 64},
    ]
}


def click_batch(size: int, seed: int = 0, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(size, 13, generator=generator), torch.randint(rows, (size, 26), generator=generator)


def nce_batch(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(ROWS, (size, count), generator=generator) for count in (26, 4))


Case = tuple[Callable[[], nn.Module], Callable[[int, int], tuple[Tensor, Tensor]]]
CASES: dict[str, Case] = {  # vectors of 8, for which other tests of a session need kernels as well
    "ctrdnn": (lambda: CTRDNN(6, rows=ROWS, dim=8, width=16), click_batch),
    "matchnet": (lambda: MatchNet(rows=ROWS, dim=8, widths=(16, 30)), click_batch),
    "matchnet sparse": (lambda: MatchNet(rows=ROWS, dim=8, widths=(16, 30), sparse=True), click_batch),
    "2emb": (lambda: TwoEmbeddings(rows=ROWS, small_rows=10, dim=8, widths=(16, 8), small_width=8), click_batch),
    "nce": (lambda: NCE(rows=ROWS, dim=8, widths=(16, 8), num_noise=3), nce_batch),
}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CASES)
def test_outputs_gradients_and_steps_equal_eager(name: str) -> None:
    build, make_batch = CASES[name]
    eager = build()
    ours = copy.deepcopy(eager)
    compiled = torch.compile(ours, backend="heterps")
    optimizers = [torch.optim.Adagrad(model.parameters(), lr=0.05) for model in (eager, ours)]
    for step in range(3):
        batch = make_batch(17, step)
        outputs = [model(*batch) for model in (eager, compiled)]
        torch.testing.assert_close(outputs[1], outputs[0])
        for output, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            output.square().mean().backward()
        torch.testing.assert_close(gradients(ours), gradients(eager))
        assert len(gradients(ours)) == len(list(ours.parameters()))
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours.state_dict(), eager.state_dict())
    assert heterps_compile.is_planned(compiled)


def test_matchnet_is_a_hinge_on_two_cosines() -> None:
    model = MatchNet(rows=ROWS, widths=(16, 30), num_negatives=4)
    with torch.no_grad():
        model.item_tower[-2].bias += 5.0  # nothing below the last ReLU: which of several zeros is taken is not defined
    dense, ids = click_batch(7)
    user = model.user_tower(model.users.weight[ids[:, :12]].flatten(1))
    item = model.item_tower(torch.cat([model.items.weight[ids[:, 12:]].flatten(1), dense], dim=1))
    least = torch.stack([row.argsort()[:4] for row in item])  # softmax keeps the order
    negative = model.negative_tower(model.items.weight[least].flatten(1))
    hinge = 0.8 - cosine_similarity(user, item) + cosine_similarity(user, negative)
    torch.testing.assert_close(model(dense, ids), torch.where(hinge > 0, hinge, 0.0))


def test_nce_is_the_log_likelihood_of_telling_data_from_uniform_noise() -> None:
    model = NCE(rows=ROWS, widths=(16, 8), num_noise=3)
    ids, candidates = nce_batch(7)
    context = model.tower(model.context(ids).flatten(1))
    odds = torch.einsum("bcd,bd->bc", model.candidates(candidates), context).exp() / (3 / ROWS)
    data = odds / (1 + odds)  # probability that a candidate was drawn from the data
    torch.testing.assert_close(model(ids, candidates), -data[:, 0].log() - (1 - data[:, 1:]).log().sum(dim=1))


def test_small_table_of_2emb_serves_the_first_five_slots() -> None:
    model = TwoEmbeddings(rows=ROWS, small_rows=10, widths=(16, 8), small_width=8)
    dense, ids = click_batch(7)
    model(dense, ids).sum().backward()
    read = model.small.weight.grad.abs().sum(dim=1).nonzero().flatten().tolist()
    assert set(read) == set((ids[:, :5] % 10).flatten().tolist())


@pytest.mark.parametrize("num_layers", [8, 12, 16, 20])
def test_layers_of_ctrdnn_are_counted_as_the_tracer_does(num_layers: int) -> None:
    model = CTRDNN(num_layers, rows=ROWS, width=16)
    layers = model_graph(model, click_batch(4))
    assert [layer.kind for layer in layers] == ["embedding"] + ["linear"] * (num_layers - 1)


def test_both_look_ups_of_the_item_table_are_bound() -> None:
    layers = model_graph(MatchNet(rows=ROWS), click_batch(4))
    first, again = readers_of(layers, "items")
    assert any({first, again} <= set(group) for group in layers.bound)
    model, batch = MatchNet(rows=ROWS), click_batch(500)
    wanted = {"cluster": FLEET, "min_throughput": 1e4, "policy": "exact", "profile": "estimate"}
    plan = heterps_compile.plan(model, batch, pin={first: "sim"}, **wanted)
    assert plan.feasible
    assert plan.placement[again] == "sim"
    with pytest.raises(PlanError, match="can run on no resource type"):
        heterps_compile.plan(model, batch, pin={first: "sim", again: "cpu"}, **wanted)


def test_tables_of_2emb_are_layers_that_can_be_placed_apart() -> None:
    model, batch = TwoEmbeddings(rows=BIG_ROWS), click_batch(500, rows=BIG_ROWS)
    layers = model_graph(model, batch)
    (big,), (small,) = readers_of(layers, "big"), readers_of(layers, "small")
    assert layers.bound == ()
    pin = {big: "cpu", small: "sim"}
    plan = heterps_compile.plan(
        model, batch, cluster=FLEET, min_throughput=1e4, policy="exact", pin=pin, profile="estimate"
    )
    assert plan.feasible
    assert (plan.placement[big], plan.placement[small]) == ("cpu", "sim")


def test_nce_has_five_layers() -> None:
    layers = model_graph(NCE(rows=ROWS), (torch.randint(ROWS, (4, 26)), torch.randint(ROWS, (4, 11))))
    assert [layer.kind for layer in layers] == ["embedding", "embedding", "linear", "linear", "matmul"]


def test_the_models_are_those_of_the_paper() -> None:
    assert list(PAPER_MODELS) == ["ctrdnn-8", "ctrdnn-12", "ctrdnn-16", "ctrdnn-20", "matchnet", "2emb", "nce"]
    model, inputs = ctrdnn(8, batch_size=3)
    assert model(*inputs).shape == (3, 2)
    shapes = [tuple(m.weight.shape[::-1]) for m in model.modules() if isinstance(m, nn.Linear)]
    assert shapes == [(273, 400), *[(400, 400)] * 5, (400, 2)]


def readers_of(layers: LayerGraph, table: str) -> list[str]:
    return [layer.name for layer in layers if any(table in lookup.table for lookup in layer.lookups)]
