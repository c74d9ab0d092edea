"""Every stage there can be in full mode, with what stands before and after it, as flat arrays.

Enters: a cost model of L layers and T types. Leaves: one entry per (layers from cut i to cut j, type t, type s before,
type u after), sorted by what the dynamic programme minimises over. ``s`` or ``u`` is T at the ends of the chain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from heterps_compile.cost_terms import Bools, Boundaries, Floats, Ints

MAX_SPANS = 400_000
"""More than these take too long for the many passes of an exact search."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """N stages: ``terms`` (N, 8) with their boundaries in; ``enter`` and ``leave`` (N,) are the states a
    stage begins and ends in.

    A state is a number for (cut, type that ends there, type that begins there). Entries that end in one state are
    neighbours: ``first`` (G,) says where each such run begins and ``states`` (G,) which state it is. ``starts`` and
    ``ends`` are the states of the first and the last cut.
    """

    begin: Ints
    end: Ints
    types: Ints
    terms: Floats
    enter: Ints
    leave: Ints
    first: Ints
    states: Ints
    starts: Ints
    ends: Ints
    num_states: int


def num_spans(num_layers: int, num_types: int) -> int:
    """About how many entries there are: all pairs of cuts, all triples of types."""
    return num_layers * (num_layers + 1) // 2 * num_types * max(num_types - 1, 1) ** 2


def spans_of(prefix: Floats, allowed: Bools, between: Boundaries) -> Spans:
    """All of them; ``prefix`` (L + 1, T, 8) are the sums of the layers' terms before each cut."""
    length, types = allowed.shape
    begin, end, kind, before, after = _every(length, types, earliest(allowed))
    terms = (prefix[end, kind] - prefix[begin, kind]).T.copy()
    for cut, other in ((begin, before), (end, after)):
        inner = np.flatnonzero(other < types)
        serial, parallel = between.terms(cut[inner], kind[inner], other[inner])
        terms[2, inner] += serial
        terms[3, inner] += parallel
    enter = (begin * (types + 1) + before) * (types + 1) + kind
    leave = (end * (types + 1) + kind) * (types + 1) + after
    first = np.flatnonzero(np.diff(leave, prepend=-1))
    return Spans(
        begin=begin,
        end=end,
        types=kind,
        terms=terms.T,
        enter=enter,
        leave=leave,
        first=first,
        states=leave[first],
        starts=types * (types + 1) + np.arange(types),
        ends=(length * (types + 1) + np.arange(types)) * (types + 1) + types,
        num_states=(length + 1) * (types + 1) ** 2,
    )


def earliest(allowed: Bools) -> Ints:
    """(L + 1, T): a stage on t that ends at cut j may start at ``earliest[j, t]`` or later; ``allowed`` (L, T)."""
    positions = np.where(allowed, 0, np.arange(1, len(allowed) + 1)[:, None])
    return np.concatenate([np.zeros((1, allowed.shape[1]), np.int64), np.maximum.accumulate(positions, axis=0)])


def _every(length: int, types: int, starting: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """(begin, end, type, before, after), sorted by (end, type, after)."""
    each = np.arange(types + 1)
    parts = []
    for end in range(1, length + 1):
        afters = each[:types] if end < length else each[types:]
        for kind in range(types):
            begin, before = np.meshgrid(np.arange(starting[end, kind], end), each, indexing="ij")
            fits = np.where(begin == 0, before == types, (before < types) & (before != kind))
            starts = np.stack([begin[fits], before[fits]])
            follow = afters[afters != kind]
            count = starts.shape[1]
            begins, befores = np.tile(starts, (1, len(follow)))
            fixed = (np.full(count * len(follow), end), np.full(count * len(follow), kind))
            parts.append(np.stack([begins, *fixed, befores, np.repeat(follow, count)]))
    begin, ends, kinds, before, after = np.concatenate(parts, axis=1)
    return begin, ends, kinds, before, after
