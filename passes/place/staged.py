"""The dynamic programme of full mode: a stage's time depends on its neighbours' types and on how many stages there are.

Enters: a cost model, a time per sample of the pipeline, weights. Leaves: what ``dynamic.py`` leaves; in paper mode it
is that. In full mode the programme is run for each number of stages n, since n says how slow a stage may be; s is the
type before, u the type after:

    best[n, j, t, u] = min over i < j and s of  best[n - 1, i, s, t] + weight_t * units(layers i..j-1 on t, s, u)

It ends at the n beyond which nothing can be cheaper: the chain without boundaries, at the time n stages have, says so.
"""

from __future__ import annotations

import numpy as np

from heterps_compile.cost_model import CostModel, Floats, Ints, fewest_units, units_needed
from heterps_compile.passes.place import dynamic
from heterps_compile.passes.place.dynamic import Cheapest
from heterps_compile.spans import Spans

MOST_STAGES = 16
"""Numbers of stages tried one by one; beyond, only the chain without boundaries bounds the cost."""


def cheapest(model: CostModel, prefix: Floats, time_s: float, weight: Floats, bound_weight: Floats | None) -> Cheapest:
    """The least weighted units of pipelines at most ``time_s`` slow; see :func:`dynamic.cheapest`.

    Of a model with too many possible stages it is the chain without boundaries: a lower bound, and a placement.
    """
    if not model.few_spans:
        return dynamic.cheapest(model, prefix, time_s, weight, bound_weight)
    least = Cheapest(np.inf, None, np.inf)
    for num_stages in range(1, model.num_layers + 1):
        stage_limit_s = time_s / float(model.stretch(num_stages))
        rest = dynamic.cheapest(model, prefix, stage_limit_s, weight, bound_weight)
        if rest.value >= least.value and rest.fractional >= least.fractional:
            break
        if num_stages > MOST_STAGES:
            return Cheapest(min(least.value, rest.value), least.chosen, min(least.fractional, rest.fractional))
        found = _exactly(model, num_stages, stage_limit_s, weight, bound_weight)
        better = found if found.value < least.value else least
        least = Cheapest(better.value, better.chosen, min(least.fractional, found.fractional))
    return least


def _exactly(
    model: CostModel, num_stages: int, stage_limit_s: float, weight: Floats, bound_weight: Floats | None
) -> Cheapest:
    """The same with exactly ``num_stages``, each at most ``stage_limit_s`` slow."""
    spans = model.spans
    fractional = 0.0
    if bound_weight is not None:
        needed = bound_weight[spans.types] * units_needed(spans.terms, stage_limit_s)
        fractional = float(_least(spans, needed, num_stages)[-1][spans.ends].min())
    units = fewest_units(spans.terms, stage_limit_s)
    weighted = np.where(units <= model.limit[spans.types], weight[spans.types] * units, np.inf)
    levels = _least(spans, weighted, num_stages)
    value = float(levels[-1][spans.ends].min())
    chosen = _backtrack(model.num_layers, spans, weighted, levels) if np.isfinite(value) else None
    return Cheapest(value, chosen, fractional)


def _least(spans: Spans, weighted: Floats, num_stages: int) -> list[Floats]:
    """``best`` of each number of stages from 0, by state."""
    start = np.full(spans.num_states, np.inf)
    start[spans.starts] = 0.0
    levels = [start]
    for _ in range(num_stages):
        best = np.full(spans.num_states, np.inf)
        best[spans.states] = np.minimum.reduceat(levels[-1][spans.enter] + weighted, spans.first)
        levels.append(best)
    return levels


def least_through(spans: Spans, weighted: Floats, num_stages: int) -> Floats:
    """(N,): the least weighted sum of ``num_stages`` that contain each span."""
    before = _least(spans, weighted, num_stages)
    after = np.full(spans.num_states, np.inf)
    after[spans.ends] = 0.0
    through = np.full(len(weighted), np.inf)
    for level in reversed(before[:-1]):
        onward = weighted + after[spans.leave]
        through = np.minimum(through, level[spans.enter] + onward)
        after = np.full(spans.num_states, np.inf)
        np.minimum.at(after, spans.enter, onward)
    return through


def _backtrack(length: int, spans: Spans, weighted: Floats, levels: list[Floats]) -> Ints:
    chosen = np.zeros(length, dtype=np.int64)
    state = spans.ends[int(np.argmin(levels[-1][spans.ends]))]
    for before in reversed(levels[:-1]):
        run = int(np.searchsorted(spans.states, state))
        begin = spans.first[run]
        end = spans.first[run + 1] if run + 1 < len(spans.first) else len(weighted)
        span = begin + int(np.argmin(before[spans.enter[begin:end]] + weighted[begin:end]))
        chosen[spans.begin[span] : spans.end[span]] = spans.types[span]
        state = spans.enter[span]
    return chosen
