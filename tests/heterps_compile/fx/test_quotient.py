"""Groups over random graphs stay acyclic, and ranks stay a topological order, whatever is contracted."""

from __future__ import annotations

import random

import networkx as nx
import pytest

from heterps_compile.fx.quotient import Quotient, components


def random_dag(seed: int, num_nodes: int = 24) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    return [(a, b) for b in range(num_nodes) for a in range(b) if draw.random() < 0.12]


def check(quotient: Quotient, edges: list[tuple[int, int]]) -> None:
    graph = nx.DiGraph(
        (quotient.owner[a], quotient.owner[b]) for a, b in edges if quotient.owner[a] != quotient.owner[b]
    )
    assert nx.is_directed_acyclic_graph(graph)
    assert all(quotient.rank[a] < quotient.rank[b] for a, b in graph.edges)
    assert set(graph.edges) == {(a, b) for a, after in quotient.successors.items() for b in after}
    assert set(graph.edges) == {(a, b) for b, before in quotient.predecessors.items() for a in before}
    ranked = quotient.ranked()
    assert [quotient.beside(group) for group in ranked] == [
        ranked[max(0, i - 1) : i] + ranked[i + 1 : i + 2] for i in range(len(ranked))
    ]


@pytest.mark.parametrize("seed", range(20))
def test_contractions_never_make_a_cycle(seed: int) -> None:
    edges, draw = random_dag(seed), random.Random(seed)
    quotient = Quotient([[node] for node in range(24)], edges)
    while len(quotient) > 1:
        group = draw.choice(quotient.ranked())
        choices = [quotient.last_predecessor(group), quotient.first_successor(group), *quotient.beside(group)]
        keep = draw.choice([other for other in choices if other is not None])
        quotient.contract(keep, group)
        check(quotient, edges)
    assert sorted(next(iter(quotient.members.values()))) == list(range(24))


def test_components_hold_each_set_whole_and_whatever_lies_between() -> None:
    # 0 -> 1 -> 2 -> 3: keeping 0 and 2 together draws in 1
    assert components(5, [(0, 1), (1, 2), (2, 3)], [[0, 2]]) == [[0, 1, 2], [3], [4]]


def test_order_takes_the_lowest_priority_that_is_ready() -> None:
    quotient = Quotient([[0], [1], [2], [3]], [(0, 3), (1, 2)])
    assert quotient.order(lambda group: -group) == [1, 2, 0, 3]
