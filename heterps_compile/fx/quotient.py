"""A graph of groups that stays acyclic: items fall into groups, and groups are contracted without making a cycle.

Every group has a rank, and the ranks are a topological order. Two contractions can never make a cycle, and need no
search: a group into its predecessor of highest rank (any other path would pass a higher one), keeping the
predecessor's rank; and a group into its successor of lowest rank, keeping the successor's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import networkx as nx


def components(num_items: int, edges: Iterable[tuple[int, int]], together: Iterable[Sequence[int]]) -> list[list[int]]:
    """Smallest groups that hold each set of ``together`` whole and have no cycle between them; items ascending."""
    graph: nx.DiGraph[int] = nx.DiGraph()
    graph.add_nodes_from(range(num_items))
    graph.add_edges_from(edges)
    for group in together:  # a ring of edges is a strongly connected set
        graph.add_edges_from(zip(group, [*group[1:], group[0]], strict=True))
    return sorted((sorted(group) for group in nx.strongly_connected_components(graph)), key=lambda group: group[0])


class Quotient:
    """Groups of items with edges and ranks; groups are known by an int that never changes."""

    def __init__(self, groups: Sequence[Sequence[int]], edges: Iterable[tuple[int, int]]) -> None:
        self.members: dict[int, list[int]] = {index: list(group) for index, group in enumerate(groups)}
        self.owner = {item: index for index, group in self.members.items() for item in group}
        self.predecessors: dict[int, set[int]] = {index: set() for index in self.members}
        self.successors: dict[int, set[int]] = {index: set() for index in self.members}
        for source, target in edges:
            if (a := self.owner[source]) != (b := self.owner[target]):
                self.successors[a].add(b)
                self.predecessors[b].add(a)
        self.rerank(lambda group: self.members[group][0])

    def __len__(self) -> int:
        return len(self.members)

    def rerank(self, priority: Callable[[int], Any]) -> None:
        """Rank the groups anew; where free, those of lower ``priority(group)`` come first."""
        order = self.order(priority)
        self.rank = {group: rank for rank, group in enumerate(order)}
        self._below: dict[int, int | None] = dict(zip(order, [None, *order], strict=False))
        self._above: dict[int, int | None] = dict(zip(order, [*order[1:], None], strict=True))

    def ranked(self) -> list[int]:
        """Groups by rank, as they are now."""
        return sorted(self.members, key=self.rank.__getitem__)

    def last_predecessor(self, group: int) -> int | None:
        """The predecessor of highest rank."""
        return max(self.predecessors[group], key=self.rank.__getitem__, default=None)

    def first_successor(self, group: int) -> int | None:
        """The successor of lowest rank."""
        return min(self.successors[group], key=self.rank.__getitem__, default=None)

    def beside(self, group: int) -> list[int]:
        """The groups next in rank, below and above."""
        return [other for other in (self._below[group], self._above[group]) if other is not None]

    def contract(self, keep: int, gone: int) -> None:
        """Move the members of ``gone`` into ``keep``, whose rank stays.

        Safe for ``keep == last_predecessor(gone)``, ``keep == first_successor(gone)``, and neighbours in rank.
        """
        self.owner.update(dict.fromkeys(self.members[gone], keep))
        self.members[keep] += self.members.pop(gone)
        for near, far in ((self.predecessors, self.successors), (self.successors, self.predecessors)):
            for other in near.pop(gone):
                far[other].discard(gone)
                if other != keep:
                    far[other].add(keep)
                    near[keep].add(other)
        del self.rank[gone]
        below, above = self._below.pop(gone), self._above.pop(gone)
        if below is not None:
            self._above[below] = above
        if above is not None:
            self._below[above] = below

    def order(self, priority: Callable[[int], Any]) -> list[int]:
        """A topological order that takes, of the groups that are ready, the one of lowest priority first."""
        waiting = {group: len(before) for group, before in self.predecessors.items()}
        ready = [(priority(group), group) for group, count in waiting.items() if not count]
        heapq.heapify(ready)
        done: list[int] = []
        while ready:
            _, group = heapq.heappop(ready)
            done.append(group)
            for after in self.successors[group]:
                waiting[after] -= 1
                if not waiting[after]:
                    heapq.heappush(ready, (priority(after), after))
        assert len(done) == len(self.members), "the groups have a cycle"
        return done
