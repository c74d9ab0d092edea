"""Graphs become layers: what goes together, what is never torn apart, and the order of layers computes the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from heterps_compile.errors import GraphError, OptionError
from heterps_compile.graph import LayerGraph
from heterps_compile.models import DLRM, DeepFM
from heterps_compile.passes.trace import Trace

BATCH = 12


def in_layer_order(gm: fx.GraphModule, graph: LayerGraph) -> fx.GraphModule:
    """The same computation with the nodes layer after layer; ``lint`` refuses a node before what it reads."""
    nodes = {node.name: node for node in gm.graph.nodes}
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    for node in [*inputs, *(nodes[name] for layer in graph for name in layer.nodes), output]:
        copies[node] = made.node_copy(node, copies.__getitem__)
    made.lint()
    return fx.GraphModule(gm, made)


def run_in_layer_order(model: nn.Module, *inputs: Any, dynamic: bool = False, **options: Any) -> list[LayerGraph]:
    """Outputs, gradients, buffers and written inputs of the model run layer by layer equal eager's."""
    graphs: list[LayerGraph] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        state = torch.get_rng_state()
        versions = [value._version for value in example_inputs if isinstance(value, Tensor)]
        graph = Trace(**options)(gm, example_inputs)
        assert torch.equal(state, torch.get_rng_state())
        assert versions == [value._version for value in example_inputs if isinstance(value, Tensor)]
        compute = [node.name for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
        assert sorted(name for layer in graph for name in layer.nodes) == sorted(compute)
        graphs.append(graph)
        return in_layer_order(gm, graph).forward

    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    results = []
    for run in (eager, compiled):
        given = tree_map(lambda value: value.clone(), inputs)
        torch.manual_seed(1)
        outputs = [value for value in tree_leaves(run(*given)) if isinstance(value, Tensor)]
        sum(value.float().sum() for value in outputs if value.requires_grad).backward()
        results.append((outputs, given))
    torch.testing.assert_close(results[1], results[0])
    for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
    return graphs


def ids(*sizes: int, rows: int = 40) -> Tensor:
    return torch.randint(0, rows, sizes)


def autocast_inside(m: nn.Module, x: Tensor) -> Tensor:
    y = m.a(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m.b(F.relu(m.b(y)))
    return m.c(y.float())


def no_grad_inside(m: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = m.b(m.a(x))
    return m.c(m.b(m.a(x)) + target)


def writes_inside(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    y = m.a(x)
    before = F.relu(y)
    y.view(-1).mul_(2)
    copied = m.b(y).clone()
    copied[:, 0] = 1
    copied += before
    logit = x.new_zeros((len(x), 1))
    logit += m.c(copied)
    logit += m.c(y)
    copied = copied.detach().clone()
    return logit, copied[:, 1:3].add_(1)


def draws_ids(m: nn.Module, x: Tensor) -> Tensor:
    dropped = F.dropout(m.a(x))
    return dropped + m.table(torch.randint(0, 40, (len(x),)))


def looks_up_what_it_wrote(m: nn.Module, x: Tensor) -> Tensor:
    before = m.a(x.clone())
    x.fill_(3)
    return before + m.table(x[:, 0].long())


def writes_input(m: nn.Module, x: Tensor) -> Tensor:
    before = x + 1
    x.mul_(2)
    return before + m.a(x.clone()) + x.sum()


def linear(*widths: int) -> dict[str, nn.Module]:
    return {name: nn.Linear(*widths) for name in "abc"}


X = torch.randn(BATCH, 6)
CASES: dict[str, tuple[Callable[[type], nn.Module], tuple[Tensor, ...]]] = {
    "batch norm": (
        lambda _: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.3)),
        (X,),
    ),
    "transformer": (
        lambda _: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1),
        (torch.randn(BATCH, 5, 8),),
    ),
    "cnn": (
        lambda _: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2)
        ),
        (torch.randn(BATCH, 3, 8, 8),),
    ),
    "autocast": (
        lambda c: c(autocast_inside, a=nn.Linear(6, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 1)),
        (X,),
    ),
    "no_grad": (lambda c: c(no_grad_inside, a=nn.Linear(6, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 1)), (X,)),
    "writes": (lambda c: c(writes_inside, a=nn.Linear(6, 6), b=nn.Linear(6, 6), c=nn.Linear(6, 1)), (X,)),
    "written input": (lambda c: c(writes_input, a=nn.Linear(6, 6)), (X,)),
    "random": (
        lambda c: c(lambda m, x: m.a(F.dropout(x)) + F.dropout(m.a(x + torch.rand_like(x)), 0.3), a=nn.Linear(6, 6)),
        (X,),
    ),
    "random ids": (lambda c: c(draws_ids, a=nn.Linear(6, 6), table=nn.Embedding(40, 6)), (X,)),
    "written ids": (lambda c: c(looks_up_what_it_wrote, a=nn.Linear(6, 6), table=nn.Embedding(40, 6)), (X,)),
    "two towers": (
        lambda c: c(
            lambda m, u, i: (m.a(m.table(u).mean(1)) * m.b(m.table(i).mean(1))).sum(-1),
            table=nn.Embedding(40, 6), a=nn.Linear(6, 4), b=nn.Linear(6, 4),
        ),
        (ids(BATCH, 3), ids(BATCH, 2)),
    ),
    "look-up of a look-up": (
        lambda c: c(lambda m, i: m.table((m.table(i).sum(-1) > 0).long()), table=nn.Embedding(40, 6)),
        (ids(BATCH, 3),),
    ),
    "max_norm": (
        lambda c: c(lambda m, i: m.table(i[:, 0]) + m.table(i[:, 1]), table=nn.Embedding(40, 6, max_norm=0.5)),
        (ids(BATCH, 3),),
    ),
    "checkpoint": (
        lambda c: c(
            lambda m, x: m.b(torch.utils.checkpoint.checkpoint(m.a, F.relu(x), use_reentrant=False)),
            a=nn.Linear(6, 6), b=nn.Linear(6, 1),
        ),
        (X,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_order_of_layers_computes_what_eager_does(name: str, dynamic: bool, composed: type) -> None:
    build, inputs = CASES[name]
    run_in_layer_order(build(composed), *inputs, dynamic=dynamic)


@pytest.mark.parametrize("max_layers", [1, 3])
def test_any_number_of_layers_computes_what_eager_does(max_layers: int) -> None:
    model = DLRM([40] * 26, 8, bottom=(8,), top=(8,))
    (graph,) = run_in_layer_order(model, torch.randn(BATCH, 13), ids(BATCH, 26), max_layers=max_layers)
    assert len(graph) == max_layers


@pytest.mark.parametrize("use_bag", [False, True])
def test_dlrm_is_a_look_up_two_mlps_and_an_interaction(use_bag: bool) -> None:
    model = DLRM([40] * 26, 8, bottom=(8,), top=(8,), use_bag=use_bag, sparse=True)
    (graph,) = run_in_layer_order(model, torch.randn(BATCH, 13), ids(BATCH, 26))
    kinds = {layer.name: layer.kind for layer in graph}
    assert list(kinds) == ["emb(26 tables x 8)", "bottom.0", "bottom.2", "interaction", "top.0", "output"]
    assert [kinds[name] for name in ("emb(26 tables x 8)", "bottom.0", "interaction")] == [
        "embedding", "linear", "matmul",
    ]  # fmt: skip
    lookups = graph["emb(26 tables x 8)"].lookups
    assert len({lookup.table for lookup in lookups}) == len(lookups) == 26
    assert {lookup.mode for lookup in lookups} == {"sum" if use_bag else "none"}
    assert all(lookup.sparse for lookup in lookups)


def test_small_tables_are_apart_from_large_ones(record: Any) -> None:
    ((gm, inputs),) = record(DeepFM([40] * 20 + [600] * 6, 8, deep=(8,)), torch.randn(BATCH, 13), ids(BATCH, 26))
    names = Trace(small_table_bytes=4000)(gm, inputs).names()
    assert [name for name in names if name.startswith("emb(")] == [
        "emb(20 tables x 8)", "emb(6 tables x 8)", "emb(26 tables x 1)",
    ]  # fmt: skip


def test_a_look_up_layer_holds_look_ups_and_what_prepares_their_ids(record: Any, composed: type) -> None:
    model = composed(
        lambda m, x: m.a(torch.cat([m.t(x[:, :1].long()).squeeze(1), m.u(x[:, 1].long()), x[:, 2:]], 1)),
        t=nn.Embedding(40, 3), u=nn.Embedding(40, 3), a=nn.Linear(10, 1),
    )  # fmt: skip
    ((gm, inputs),) = record(model, ids(BATCH, 6).float())
    graph = Trace()(gm, inputs)
    assert graph.names() == ("emb(2 tables x 3)", "a")
    assert set(graph["emb(2 tables x 3)"].nodes) == {
        "getitem",
        "long",
        "embedding",
        "getitem_1",
        "long_1",
        "embedding_1",
    }
    assert graph["emb(2 tables x 3)"].input_bytes_per_sample == 6 * 4


def test_arguments_of_a_bag_by_position_and_by_keyword(record: Any, composed: type) -> None:
    def call(m: nn.Module, values: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        first = F.embedding_bag(values, m.table, offsets, None, 2.0, False, "sum", True, weights)
        return first + F.embedding_bag(values, weight=m.table, offsets=offsets, mode="max", padding_idx=3)

    table = nn.Parameter(torch.randn(40, 4))
    ((gm, inputs),) = record(composed(call, table=table), ids(9), torch.tensor([0, 2, 2, 5]), torch.rand(9))
    graph = Trace()(gm, inputs)
    first, second = (lookup for layer in graph for lookup in layer.lookups)
    assert (first.mode, first.sparse, first.per_sample_weights, first.padding_idx) == ("sum", True, "l_inputs_2_", None)
    assert (second.mode, second.sparse, second.per_sample_weights, second.padding_idx) == ("max", False, None, 3)
    assert first.offsets == second.offsets == "l_inputs_1_"
    assert graph.batch_size == 4


def test_layers_that_read_one_parameter_are_bound(record: Any, composed: type) -> None:
    model = composed(lambda m, x: m.a(m.b(m.a(x))), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    ((gm, inputs),) = record(model, X)
    graph = Trace()(gm, inputs)
    assert graph.names() == ("a", "b", "a_1")
    assert graph.bound == (("a", "a_1"),)


def test_a_table_two_towers_share_is_one_layer(record: Any, composed: type) -> None:
    build, inputs = CASES["two towers"]
    ((gm, example_inputs),) = record(build(composed), *inputs)
    graph = Trace()(gm, example_inputs)
    assert graph.names() == ("emb(table)", "a", "b")
    assert len(graph["emb(table)"].lookups) == 2


def test_a_table_read_again_later_binds_no_other_table(record: Any, composed: type) -> None:
    def call(m: nn.Module, i: Tensor) -> Tensor:
        once = m.users(i[:, :2]).sum(1)
        again = m.items(m.items(i[:, 2:]).sum(1).topk(2, 1).indices).sum(1)
        return m.a(once) + m.a(again)

    model = composed(call, users=nn.Embedding(40, 4), items=nn.Embedding(40, 4), a=nn.Linear(4, 2))
    ((gm, inputs),) = record(model, ids(BATCH, 4))
    graph = Trace()(gm, inputs)
    assert [name for name in graph.names() if name.startswith("emb")] == ["emb(users)", "emb(items)", "emb(items)_1"]
    assert ("emb(items)", "emb(items)_1") in graph.bound


def test_an_autocast_region_is_not_cut(record: Any, composed: type) -> None:
    build, inputs = CASES["autocast"]
    ((gm, example_inputs),) = record(build(composed), *inputs)
    (region,) = (layer for layer in Trace()(gm, example_inputs) if "_enter_autocast" in layer.nodes)
    assert "_exit_autocast" in region.nodes
    assert sum(node.target is F.linear for node in gm.graph.nodes if node.name in region.nodes) == 2


def test_a_tuple_and_what_takes_it_apart_share_a_layer(record: Any, composed: type) -> None:
    def call(m: nn.Module, i: Tensor) -> Tensor:
        first, second = i.split([1, 2], 1)
        return torch.cat([m.t(first).sum(1), m.u(second).sum(1)], 1)

    ((gm, inputs),) = record(composed(call, t=nn.Embedding(40, 3), u=nn.Embedding(40, 5)), ids(BATCH, 3))
    graph = Trace()(gm, inputs)
    assert graph.names()[:2] == ("emb(t)", "emb(u)")
    assert {"split", "first", "second"} <= set(graph["emb(t)"].nodes)


def test_writes_stay_with_the_memory_they_write_to(record: Any, composed: type) -> None:
    def call(m: nn.Module, x: Tensor) -> Tensor:
        logit = m.a(x)
        other = m.b(x)
        logit += m.c(other)
        return logit

    ((gm, inputs),) = record(composed(call, **linear(6, 6)), X)
    graph = Trace()(gm, inputs)
    (home,) = (layer for layer in graph if "logit" in layer.nodes)
    assert "logit_1" in home.nodes
    assert graph.names() == ("b", "c", "a")


def test_amounts_of_a_linear_layer(record: Any) -> None:
    ((gm, inputs),) = record(nn.Sequential(nn.Linear(6, 4), nn.ReLU()), X)
    (layer,) = Trace()(gm, inputs)
    assert layer.parameter_bytes == 4 * (6 * 4 + 4)
    assert layer.forward_flops_per_sample == 2 * 6 * 4 + 4
    assert layer.backward_flops_per_sample == 2 * 6 * 4 + 4  # x wants no gradient: one product, not two
    assert (layer.input_bytes_per_sample, layer.output_bytes_per_sample) == (6 * 4, 4 * 4)


def test_amounts_of_a_look_up(record: Any) -> None:
    ((gm, inputs),) = record(nn.EmbeddingBag(40, 6, mode="sum", sparse=True), ids(BATCH, 3))
    (layer,) = Trace()(gm, inputs)
    assert layer.touched_bytes_per_sample == 3 * 6 * 4
    assert layer.parameter_bytes == 40 * 6 * 4
    assert layer.input_bytes_per_sample == 3 * 8
    assert layer.forward_bytes_per_sample == 3 * 6 * 4 + 3 * 8 + 6 * 4
    assert layer.forward_flops_per_sample == 3 * 6


def test_amounts_per_sample_hold_under_symbolic_sizes(record: Any) -> None:
    model = DLRM([40] * 26, 8, bottom=(8,), top=(8,))
    tables = []
    for dynamic in (False, True):
        ((gm, inputs),) = record(model, torch.randn(BATCH, 13), ids(BATCH, 26), dynamic=dynamic)
        symbols = [value for value in inputs if isinstance(value, torch.SymInt)]
        assert bool(symbols) is dynamic
        tables.append([(layer.name, layer.forward_flops_per_sample) for layer in Trace()(gm, inputs)])
    assert tables[0] == tables[1]


def test_same_graph_same_layers(record: Any) -> None:
    model = DLRM([40] * 26, 8, bottom=(8,), top=(8,))
    signatures = set()
    for _ in range(2):
        ((gm, inputs),) = record(copy.deepcopy(model), torch.randn(BATCH, 13), ids(BATCH, 26))
        signatures.add(Trace(max_layers=4)(gm, inputs).signature())
    assert len(signatures) == 1


def test_many_heavy_siblings_are_merged_in_balance(record: Any, composed: type) -> None:
    model = composed(
        lambda m, x: torch.cat([part(x) for part in m.parts], 1).sum(1),
        parts=nn.ModuleList(nn.Linear(6, 6) for _ in range(64)),
    )
    ((gm, inputs),) = record(model, X)
    graph = Trace(max_layers=8)(gm, inputs)
    sizes = [sum("linear" in name for name in layer.nodes) for layer in graph]
    assert sum(sizes) == 64
    assert len(graph) == 8
    assert max(sizes) <= 16


def test_a_graph_that_computes_nothing_is_refused() -> None:
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    with pytest.raises(GraphError, match="computes nothing"):
        Trace()(fx.GraphModule({}, graph), [X])


def test_no_layers_at_all_is_refused() -> None:
    with pytest.raises(OptionError, match="max_layers is 0"):
        Trace(max_layers=0)
