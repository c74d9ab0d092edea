"""An order of groups in which little crosses the cuts between neighbours: skip connections and branches kept short.

Enters: groups in an order that works, who reads whom, and the tensors between them. Leaves: a topological order whose
crossing bytes, summed over all cuts, are no more than those of the order that came in. Finding the least is NP-hard
(directed optimal linear arrangement), so it is the greedy one: of the groups that are ready, the one after which the
fewest bytes are alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tensor:
    """What one group makes and others read."""

    maker: int
    readers: frozenset[int]
    num_bytes: float


def crossing_bytes(order: Sequence[int], tensors: Iterable[Tensor]) -> float:
    """Bytes that cross a cut, summed over the cuts: each tensor crosses those from its maker to its last reader."""
    place = {group: index for index, group in enumerate(order)}
    return sum(t.num_bytes * (max(place[reader] for reader in t.readers) - place[t.maker]) for t in tensors)


def shorter(order: Sequence[int], predecessors: Mapping[int, set[int]], tensors: Sequence[Tensor]) -> list[int]:
    """The greedy order where it crosses fewer bytes, else ``order``; ties are broken by ``order``."""
    found = _greedy(order, predecessors, tensors)
    return found if crossing_bytes(found, tensors) < crossing_bytes(order, tensors) else list(order)


def _greedy(order: Sequence[int], predecessors: Mapping[int, set[int]], tensors: Sequence[Tensor]) -> list[int]:
    inside = set(order)
    waiting = {group: predecessors[group] & inside for group in order}
    unread = [set(tensor.readers) for tensor in tensors]
    done: list[int] = []
    while waiting:
        ready = [group for group in order if group in waiting and not waiting[group]]
        group = min(ready, key=lambda g: _growth(g, tensors, unread))
        done.append(group)
        del waiting[group]
        for readers in unread:
            readers.discard(group)
        for before in waiting.values():
            before.discard(group)
    return done


def _growth(group: int, tensors: Sequence[Tensor], unread: Sequence[set[int]]) -> float:
    """Bytes alive after ``group`` less those before it."""
    grown = 0.0
    for tensor, readers in zip(tensors, unread, strict=True):
        if tensor.maker == group:
            grown += tensor.num_bytes
        elif readers == {group}:
            grown -= tensor.num_bytes
    return grown
