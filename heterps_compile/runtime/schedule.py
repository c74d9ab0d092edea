"""Orders of work over microbatches: pure generators of clock cycles; who runs them is another file.

Letters, here and in ``local.py``: ``m`` microbatch, ``s`` stage, ``M`` number of microbatches, ``S`` number of stages.

GPipe (Huang et al. 2019), forward only, M = 4, S = 3; the cell is m, the row s, the column the clock::

    clock     0  1  2  3  4  5
    stage 0   0  1  2  3  .  .         (1) stage s starts m one clock after stage s - 1 finished it
    stage 1   .  0  1  2  3  .         (2) M + S - 1 clocks in all
    stage 2   .  .  0  1  2  3         (3) S - 1 of them are idle on every stage

1F1B (PipeDream, Narayanan et al. 2019; flushed after each batch), M = 4, S = 3, a forward as long as a backward::

    clock     0  1  2  3  4  5  6  7  8  9 10 11
    stage 0  F0 F1 F2  .  . B0 F3 B1  . B2  . B3    (1) stage s runs S - s forwards ahead, then one of each in turn
    stage 1   . F0 F1  . B0 F2 B1 F3 B2  . B3  .    (2) so at most S - s microbatches are in flight on stage s
    stage 2   .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .    (3) as many clocks as GPipe with its backwards, fewer activations
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple


class Action(NamedTuple):
    """One piece of work: forward ("F") or backward ("B") of microbatch ``m`` on stage ``s``."""

    kind: Literal["F", "B"]
    m: int
    s: int


Cycle = tuple[Action, ...]
"""What happens in one clock: at most one action per stage."""


def gpipe(num_microbatches: int, num_stages: int) -> Iterator[Cycle]:
    """Forwards only: in clock ``k`` stage ``s`` runs microbatch ``k - s``."""
    _check(num_microbatches, num_stages)
    for k in range(num_microbatches + num_stages - 1):
        first = max(0, k + 1 - num_microbatches)
        yield tuple(Action("F", k - s, s) for s in range(first, min(k + 1, num_stages)))


def one_f_one_b(num_microbatches: int, num_stages: int) -> Iterator[Cycle]:
    """Forwards and backwards: each stage keeps its own order and acts as soon as its neighbour has finished."""
    _check(num_microbatches, num_stages)
    waiting = [list(reversed(_order(num_microbatches, num_stages, s))) for s in range(num_stages)]
    done: set[Action] = set()
    while any(waiting):
        cycle = tuple(todo[-1] for todo in waiting if todo and _needs(todo[-1], num_stages) <= done)
        for action in cycle:
            waiting[action.s].pop()
        done.update(cycle)
        yield cycle


def stage_order(cycles: Iterator[Cycle], stage: int) -> tuple[Action, ...]:
    """What one stage does, in order."""
    return tuple(action for cycle in cycles for action in cycle if action.s == stage)


def draw(cycles: Iterator[Cycle], num_stages: int) -> str:
    """The grid of a schedule as in this file's docstring: one row per stage, one column per clock, ``.`` for idle."""
    rows: list[list[str]] = [[] for _ in range(num_stages)]
    for cycle in cycles:
        cells = {action.s: f"{action.kind}{action.m}" for action in cycle}
        for s, row in enumerate(rows):
            row.append(cells.get(s, "."))
    width = max((len(cell) for row in rows for cell in row), default=1)
    return "\n".join(" ".join(cell.rjust(width) for cell in row) for row in rows)


def _order(num_microbatches: int, num_stages: int, s: int) -> list[Action]:
    ahead = min(num_stages - s, num_microbatches)
    order = [Action("F", m, s) for m in range(ahead)]
    for m in range(num_microbatches):
        order.append(Action("B", m, s))
        if m + ahead < num_microbatches:
            order.append(Action("F", m + ahead, s))
    return order


def _needs(action: Action, num_stages: int) -> set[Action]:
    kind, m, s = action
    if kind == "F":
        return {Action("F", m, s - 1)} if s else set()
    return {Action("F", m, s)} | ({Action("B", m, s + 1)} if s + 1 < num_stages else set())


def _check(num_microbatches: int, num_stages: int) -> None:
    if num_microbatches < 1 or num_stages < 1:
        raise ValueError(f"a schedule needs a microbatch and a stage (M = {num_microbatches}, S = {num_stages})")
