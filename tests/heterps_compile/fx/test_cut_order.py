"""Orders of groups with few bytes over their cuts."""

from __future__ import annotations

import networkx as nx
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from heterps_compile.fx import cut_order
from heterps_compile.fx.cut_order import crossing_bytes, shorter
from heterps_compile.planner import model_graph


def test_a_wide_branch_is_not_carried_past_another() -> None:
    #   0 -> 1 -> 4 and 0 -> 2 -> 3 -> 4: the branch through 1 is wide, so it comes just before its reader
    tensors = [
        cut_order.Tensor(0, frozenset({1, 2}), 10.0),
        cut_order.Tensor(1, frozenset({4}), 1000.0),
        cut_order.Tensor(2, frozenset({3}), 20.0),
        cut_order.Tensor(3, frozenset({4}), 5.0),
    ]
    predecessors = {0: set(), 1: {0}, 2: {0}, 3: {2}, 4: {1, 3}}
    assert shorter([0, 1, 2, 3, 4], predecessors, tensors) == [0, 2, 3, 1, 4]
    assert crossing_bytes([0, 1, 2, 3, 4], tensors) == 10 * 2 + 1000 * 3 + 20 + 5
    assert crossing_bytes([0, 2, 3, 1, 4], tensors) == 10 * 3 + 1000 + 20 + 5 * 2


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), st.data())
def test_the_order_is_topological_and_never_worse(num_groups: int, data: st.DataObject) -> None:
    edges = data.draw(st.lists(st.tuples(st.integers(0, num_groups - 1), st.integers(0, num_groups - 1)), max_size=16))
    edges = [(a, b) for a, b in edges if a < b]
    sizes = data.draw(st.lists(st.floats(0, 100), min_size=len(edges), max_size=len(edges)))
    tensors = [cut_order.Tensor(a, frozenset({b}), size) for (a, b), size in zip(edges, sizes, strict=True)]
    predecessors: dict[int, set[int]] = {group: {a for a, b in edges if b == group} for group in range(num_groups)}
    found = shorter(range(num_groups), predecessors, tensors)
    graph = nx.DiGraph(edges)
    assert sorted(found) == list(range(num_groups))
    assert all(found.index(a) < found.index(b) for a, b in graph.edges)
    assert crossing_bytes(found, tensors) <= crossing_bytes(range(num_groups), tensors) * (1 + 1e-12)


class TwoBranches(nn.Module):
    """The wide hidden layer is written first and read last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 64)
        self.wide, self.wide_end = nn.Linear(8, 512), nn.Linear(512, 4)
        self.deep, self.deep_end = nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x)
        wide = self.wide(x)
        deep: Tensor = self.deep_end(self.deep(stem))
        return deep + self.wide_end(wide)


def test_trace_puts_a_wide_layer_next_to_its_reader() -> None:
    names = model_graph(TwoBranches(), (torch.rand(16, 8),)).names()
    assert names == ("stem", "deep", "deep_end", "wide", "wide_end")
