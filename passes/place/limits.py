"""The cheapest stages at a fixed time per sample when limits bind: several stages share the units of one type.

Enters: a cost model and a time. Leaves: the least price per hour, or a proven lower bound of it, and a placement. Three
methods, each used only if the one before did not prove its answer: Lagrange multipliers on the limits (a bound, often a
placement), labels (price and units used per type; exact, as long as few labels survive), and the mixed-integer
programme of ``milp.py`` if scipy is installed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from heterps_compile.cost_model import Bools, CostModel, Floats, Ints, fewest_units
from heterps_compile.passes.place.dynamic import blocked_before, cheapest, other_minimum
from heterps_compile.passes.place.milp import milp_within_limits
from heterps_compile.provision import Stages

MULTIPLIER_ROUNDS = 40
FEW_LABELS, MANY_LABELS = 150, 3000
"""Labels kept per (cut, type), before the mixed-integer programme is asked and when there is none."""
MAX_LABEL_LAYERS = 120
EQUAL = 1 - 1e-12


@dataclass(frozen=True, slots=True)
class Limited:
    """``bound`` USD/h that no placement at this time undercuts (inf: none fits); ``exact`` if ``chosen`` reaches it."""

    chosen: Ints | None
    bound: float
    exact: bool
    multipliers: Floats


@dataclass(slots=True)
class _Search:
    """Best placement within the limits and the best bound so far, at one time per sample."""

    chosen: Ints | None
    price: float
    bound: float
    multipliers: Floats

    def result(self, bound: float, exact: bool) -> Limited:
        return Limited(self.chosen, bound, exact, self.multipliers)


def cheapest_within_limits(model: CostModel, prefix: Floats, time_s: float, deadline: float) -> Limited:
    """The least price per hour of stages at most ``time_s`` slow, with the units of each type within its limit."""
    search = _relax(model, prefix, time_s, deadline)
    if search.price * EQUAL <= search.bound or not np.isfinite(search.bound):
        return search.result(search.bound, exact=search.chosen is not None)
    if model.num_layers > MAX_LABEL_LAYERS:
        return search.result(search.bound, exact=False)
    units = stage_units(model, prefix, time_s)
    if _labels(model, units, search, deadline, FEW_LABELS):
        return search.result(search.price, exact=search.chosen is not None)
    solved = milp_within_limits(model, units, deadline)
    if solved is None:
        proven = _labels(model, units, search, deadline, MANY_LABELS)
        return search.result(search.price if proven else search.bound, exact=proven and search.chosen is not None)
    if solved.infeasible:
        return search.result(float("inf"), exact=False)
    if solved.chosen is not None and solved.price < search.price:
        search.chosen, search.price = solved.chosen, solved.price
    if solved.optimal:
        return search.result(search.price, exact=True)
    return search.result(max(search.bound, solved.bound), exact=False)


def usage_of(model: CostModel, chosen: Ints, time_s: float) -> Floats:
    """Whole units of each type that ``chosen`` needs to be at most ``time_s`` slow."""
    stages = Stages.of(model, chosen[None])
    units = stages.fewest(time_s)
    usage: Floats = np.bincount(stages.kind, units, model.num_types).astype(float)
    return usage


def stage_units(model: CostModel, prefix: Floats, time_s: float) -> Floats:
    """(L + 1, L + 1, T): whole units of a stage from cut i to cut j; inf where there is no such stage."""
    cuts = model.num_layers + 1
    units = np.full((cuts, cuts, model.num_types), np.inf)
    blocked = blocked_before(model)
    for end in range(1, cuts):
        needed = fewest_units(prefix[end] - prefix[:end], time_s)
        needed[blocked[end] > np.arange(end)[:, None]] = np.inf
        units[:end, end] = np.where(needed <= model.limit, needed, np.inf)
    return units


def _relax(model: CostModel, prefix: Floats, time_s: float, deadline: float) -> _Search:
    """Subgradient ascent on the multipliers of the limits; deterministic."""
    price = model.price_usd_per_h
    search = _Search(None, float("inf"), 0.0, np.zeros(model.num_types))
    current = np.zeros(model.num_types)
    limited = np.isfinite(model.limit)
    limit = np.where(limited, model.limit, 0.0)
    scale = float(price.max()) or 1.0
    for turn in range(MULTIPLIER_ROUNDS):
        result = cheapest(model, prefix, time_s, price + current, price)
        if result.chosen is None:
            search.bound = float("inf")
            return search
        usage = usage_of(model, result.chosen, time_s)
        over = np.where(limited, usage - limit, 0.0)
        bound = result.value - float(current @ limit)
        if bound > search.bound or turn == 0:
            search.bound, search.multipliers = bound, current.copy()
        if (over <= 0).all() and float(price @ usage) < search.price:
            search.chosen, search.price = result.chosen, float(price @ usage)
        if search.price * EQUAL <= search.bound or time.monotonic() > deadline:
            return search
        norm = float(over @ over)
        if norm == 0:
            return search
        target = search.price if np.isfinite(search.price) else bound + scale * float(np.maximum(over, 0).sum())
        current = np.maximum(current + max(target - bound, 1e-9 * scale) * over / norm * 0.95**turn, 0.0)
    return search


@dataclass(slots=True)
class _Labels:
    """Partial placements that end at one cut with one type: price, units used (n, T), and their origin (n, 3)."""

    price: Floats
    usage: Floats
    parent: Ints


def _labels(model: CostModel, units: Floats, search: _Search, deadline: float, most: int) -> bool:
    """Improve ``search`` to the optimum within the limits; False when too many labels survive or time runs out."""
    cuts, types = model.num_layers + 1, model.num_types
    price, limit, lagrange = model.price_usd_per_h, model.limit, search.multipliers
    weights = np.concatenate([(price + lagrange)[None], np.eye(types)])
    leave = _to_go(units, weights)
    relief = float(lagrange @ np.where(lagrange > 0, limit, 0.0))  # a type without a limit has no multiplier
    buckets: list[list[list[_Labels]]] = [[[] for _ in range(types)] for _ in range(cuts)]
    done: list[list[_Labels | None]] = [[None] * types for _ in range(cuts)]
    root = _Labels(np.zeros(1), np.zeros((1, types)), np.full((1, 3), -1))
    for cut in range(cuts - 1):
        for kind in range(types) if cut else (-1,):
            labels = root if cut == 0 else _settle(buckets[cut][kind], most)
            if labels is None:
                continue
            if len(labels.price) > most or time.monotonic() > deadline:
                return False
            if cut:
                done[cut][kind] = labels
            for target in (t for t in range(types) if t != kind):
                _extend(model, units, leave, labels, (cut, kind, target), relief, search, buckets)
    finals = [(t, _settle(buckets[-1][t], most)) for t in range(types)]
    for kind, labels in finals:
        if labels is not None and labels.price.min() < search.price:
            index = int(np.argmin(labels.price))
            search.price = float(labels.price[index])
            search.chosen = _trace_back(done, labels.parent[index], cuts - 1, kind)
    search.bound = search.price
    return True


def _extend(
    model: CostModel,
    units: Floats,
    leave: Floats,
    labels: _Labels,
    step: tuple[int, int, int],
    relief: float,
    search: _Search,
    buckets: list[list[list[_Labels]]],
) -> None:
    """Add every stage of type ``target`` that starts at ``cut`` to every label, dropping what cannot end well."""
    cut, kind, target = step
    added = units[cut, cut + 1 :, target]
    ends = np.flatnonzero(np.isfinite(added))
    if not len(ends):
        return
    price = labels.price[:, None] + model.price_usd_per_h[target] * added[ends]
    usage = np.repeat(labels.usage[:, None, :], len(ends), axis=1)
    usage[:, :, target] += added[ends]
    after = leave[ends + cut + 1, :, target]
    bound = price + usage @ search.multipliers + after[:, 0] - relief
    keep: Bools = (bound < search.price * EQUAL) & (usage + after[:, 1:] <= model.limit).all(axis=2)
    for column, end in enumerate(ends.tolist()):
        rows = np.flatnonzero(keep[:, column])
        if len(rows):
            parent = np.stack([np.full(len(rows), cut), np.full(len(rows), kind), rows], axis=1)
            buckets[cut + 1 + end][target].append(_Labels(price[rows, column], usage[rows, column], parent))


def _to_go(units: Floats, weights: Floats) -> Floats:
    """(L + 1, Q, T): the least weighted units after a cut when the last stage had type t, for Q weight vectors."""
    cuts, types = units.shape[0], units.shape[2]
    begin = np.full((cuts, len(weights), types), np.inf)
    leave = np.zeros((cuts, len(weights), types))
    for cut in range(cuts - 2, -1, -1):
        with np.errstate(invalid="ignore"):
            stage = units[cut, cut + 1 :, None, :] * weights
        stage = np.where(np.isfinite(units[cut, cut + 1 :, None, :]), stage, np.inf)
        begin[cut] = np.min(stage + leave[cut + 1 :], axis=0)
        leave[cut] = other_minimum(begin[cut])
    return leave


def _settle(parts: list[_Labels], most: int) -> _Labels | None:
    """Join labels and drop those that another undercuts in price and in every type's units."""
    if not parts:
        return None
    price = np.concatenate([part.price for part in parts])
    usage = np.concatenate([part.usage for part in parts])
    parent = np.concatenate([part.parent for part in parts])
    _, unique = np.unique(usage, axis=0, return_index=True)
    order = unique[np.argsort(price[unique], kind="stable")]
    price, usage, parent = price[order], usage[order], parent[order]
    if len(price) > 4 * most:
        return _Labels(price, usage, parent)  # too many to prove anything with; the caller gives up
    keep = np.ones(len(price), dtype=bool)
    for index in range(len(price)):
        if keep[index]:
            worse = (usage[index + 1 :] >= usage[index]).all(axis=1)
            keep[index + 1 :] &= ~worse
    return _Labels(price[keep], usage[keep], parent[keep])


def _trace_back(done: list[list[_Labels | None]], parent: Ints, end: int, kind: int) -> Ints:
    chosen = np.zeros(end, dtype=np.int64)
    while end > 0:
        start, previous, index = (int(value) for value in parent)
        chosen[start:end] = kind
        end, kind = start, previous
        labels = done[end][kind] if end > 0 else None
        parent = labels.parent[index] if labels is not None else parent
    return chosen
