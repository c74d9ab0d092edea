"""The cheapest stages at a fixed time per sample when limits bind: several stages share the units of one type.

Enters: a cost model, a time and what is wanted. Leaves: the least price per hour, or a proven lower bound of it, and
placements. Three methods, each used only if the one before did not prove what is wanted: Lagrange multipliers on the
limits (a bound, often a placement), labels (price and units used per type; exact, as long as few labels survive), and
the mixed-integer programme of ``milp.py`` if scipy is installed. The last two see only stages that, completed at the
least Lagrangian price, could still be part of something cheap enough.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from heterps_compile.cost_model import Bools, CostModel, Floats, Ints, fewest_units
from heterps_compile.passes.place.dynamic import other_minimum
from heterps_compile.passes.place.incumbent import usage_at
from heterps_compile.passes.place.milp import Solved, milp_within_limits
from heterps_compile.passes.place.staged import cheapest
from heterps_compile.passes.place.staged_milp import milp_staged
from heterps_compile.spans import earliest

FIRST_ROUNDS, ROUNDS = 40, 12
"""Rounds of the multipliers while no plan is known, and after that, when they start from those of a time nearby."""
SETTLED = 1e-4
"""Steps that aim at less than this part of the bound end the ascent."""
FEW_LABELS, MANY_LABELS = 150, 3000
"""Labels kept per (cut, type), before the mixed-integer programme is asked and when there is none."""
MAX_LABEL_LAYERS = 250
EQUAL = 1 - 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the caller needs: a price per hour below ``price``, or the proof that there is none.

    ``thorough`` allows labels and the mixed-integer programme. ``multipliers`` (T,) are where to start.
    """

    price: float
    thorough: bool
    multipliers: Floats
    deadline: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Limited:
    """``bound`` USD/h that no placement at this time undercuts (inf: none fits); ``exact`` if ``chosen`` reaches it.

    Where nothing is below the price that was wanted, that price is the bound. ``fitting`` are placements within the
    limits, and ``rounds`` counts runs of the dynamic programme.
    """

    chosen: Ints | None
    bound: float
    exact: bool
    multipliers: Floats
    fitting: tuple[Ints, ...]
    rounds: int


@dataclass(slots=True)
class _Search:
    """Best placement within the limits and the best bound so far, at one time per sample."""

    multipliers: Floats
    cutoff: float
    chosen: Ints | None = None
    price: float = float("inf")
    bound: float = 0.0
    fitting: tuple[Ints, ...] = ()
    rounds: int = 0

    @property
    def below(self) -> float:
        """A price per hour that is still worth to undercut."""
        return min(self.price, self.cutoff)

    @property
    def done(self) -> bool:
        """Whether the bound proves the placement cheapest, or that nothing is cheap enough."""
        return self.bound >= self.below * EQUAL

    def result(self) -> Limited:
        bound = self.price if self.price * EQUAL <= self.bound else self.bound
        return Limited(
            chosen=self.chosen,
            bound=bound,
            exact=self.chosen is not None and bound == self.price,
            multipliers=self.multipliers,
            fitting=self.fitting,
            rounds=self.rounds,
        )


def cheapest_within_limits(model: CostModel, prefix: Floats, time_s: float, wanted: Wanted) -> Limited:
    """The least price per hour of stages at most ``time_s`` slow, with the units of each type within its limit."""
    search = _relax(model, prefix, time_s, wanted)
    late = time.monotonic() > wanted.deadline
    if search.done or not wanted.thorough or late or model.num_layers > MAX_LABEL_LAYERS:
        return search.result()
    if model.between is not None:  # what follows knows a stage by its layers and type, not by its neighbours
        solved = milp_staged(model, prefix, time_s, search.below, search.multipliers, wanted.deadline)
        return search.result() if solved is None else _settled(search, solved)
    units = promising(model, stage_units(model, prefix, time_s), search)
    if _labels(model, units, search, wanted.deadline, FEW_LABELS):
        return search.result()
    solved = milp_within_limits(model, units, wanted.deadline)
    if solved is None:
        _labels(model, units, search, wanted.deadline, MANY_LABELS)
        return search.result()
    return _settled(search, solved)


def _settled(search: _Search, solved: Solved) -> Limited:
    """The search with what a programme found and proved."""
    if solved.chosen is not None and solved.price < search.price:
        search.chosen, search.price = solved.chosen, solved.price
        search.fitting = (*search.fitting, solved.chosen)
    proven = search.below if solved.infeasible or solved.optimal else min(solved.bound, search.below)
    search.bound = max(search.bound, proven)
    return search.result()


def stage_units(model: CostModel, prefix: Floats, time_s: float) -> Floats:
    """(L + 1, L + 1, T): whole units of a stage from cut i to cut j; inf where there is no such stage."""
    cuts = model.num_layers + 1
    units = np.full((cuts, cuts, model.num_types), np.inf)
    blocked = earliest(model.allowed)
    for end in range(1, cuts):
        needed = fewest_units(prefix[end] - prefix[:end], time_s)
        needed[blocked[end] > np.arange(end)[:, None]] = np.inf
        units[:end, end] = np.where(needed <= model.limit, needed, np.inf)
    return units


def promising(model: CostModel, units: Floats, search: _Search) -> Floats:
    """``units`` without the stages that no placement cheap enough contains, by the multipliers' bound."""
    weights = (model.price_usd_per_h + search.multipliers)[None]
    relief = model.relief(search.multipliers)
    after = _to_go(units, weights)[:, 0]
    before = _to_go(units[::-1, ::-1].transpose(1, 0, 2), weights)[::-1, 0]
    with np.errstate(invalid="ignore"):
        through = before[:, None] + weights[0] * units + after[None] - relief
    return np.where(through < search.below, units, np.inf)


def _relax(model: CostModel, prefix: Floats, time_s: float, wanted: Wanted) -> _Search:
    """Subgradient ascent on the multipliers of the limits, deterministic; a unit of each type is measured in its price.

    Each step aims at a bound ``reach`` above the best (Polyak's step); a step that does not get half of it is taken
    back and ``reach`` halved, one that does doubles it (Goffin and Kiwiel's level method).
    """
    price = np.maximum(model.price_usd_per_h, 1e-9)
    search = _Search(multipliers=wanted.multipliers, cutoff=wanted.price)
    current, over, reach = wanted.multipliers, _look(model, prefix, time_s, search, wanted.multipliers), 0.0
    if wanted.multipliers.any() and not search.done:
        current, over = _better(model, prefix, time_s, search, over)
    rounds = ROUNDS if np.isfinite(wanted.price) else FIRST_ROUNDS
    while not search.done and search.rounds < rounds and time.monotonic() < wanted.deadline:
        step = price * np.where((over < 0) & (search.multipliers == 0), 0.0, over)  # a multiplier stays above zero
        norm = float(step @ step)
        if norm == 0:
            break
        most = min(search.below - search.bound, float(np.maximum(step, 0).sum()) or float(np.abs(step).sum()))
        reach = min(reach, search.below - search.bound) or most
        current = np.maximum(search.multipliers + reach / norm * price * step, 0.0)
        before = search.bound
        seen = _look(model, prefix, time_s, search, current)
        if search.bound > before:
            over = seen
        reach *= 2.0 if search.bound > before + reach / 2 else 0.5
        if reach < search.bound * SETTLED:
            break
    return search


def _better(model: CostModel, prefix: Floats, time_s: float, search: _Search, over: Floats) -> tuple[Floats, Floats]:
    """Without multipliers, if that bounds more than those that the search came with."""
    before = search.bound
    none = np.zeros(model.num_types)
    without = _look(model, prefix, time_s, search, none)
    return (none, without) if search.bound > before else (search.multipliers, over)


def _look(model: CostModel, prefix: Floats, time_s: float, search: _Search, multipliers: Floats) -> Floats:
    """Run the programme once, keep the bound and the placement, and return how far over the limits it is."""
    limited = np.isfinite(model.limit)
    limit = np.where(limited, model.limit, 0.0)
    result = cheapest(model, prefix, time_s, model.price_usd_per_h + multipliers, None)
    search.rounds += 1
    if result.chosen is None:
        search.bound = float("inf")
        return np.zeros(model.num_types)
    usage = usage_at(model, result.chosen, time_s)
    if not np.isfinite(usage).all():  # a chain without its boundaries may be a placement that is never so fast
        search.bound = max(search.bound, result.value - float(multipliers @ limit))
        return np.zeros(model.num_types)
    over: Floats = np.where(limited, usage - limit, 0.0)
    bound = result.value - float(multipliers @ limit)
    if bound > search.bound:
        search.bound, search.multipliers = bound, multipliers
    if (over <= 0).all():
        search.fitting = (*search.fitting, result.chosen)
        price = float(model.price_usd_per_h @ usage)
        if price < search.price:
            search.chosen, search.price = result.chosen, price
    return over


@dataclass(slots=True)
class _Labels:
    """Partial placements that end at one cut with one type: price, units used (n, T), and their origin (n, 3)."""

    price: Floats
    usage: Floats
    parent: Ints


def _labels(model: CostModel, units: Floats, search: _Search, deadline: float, most: int) -> bool:
    """Improve ``search`` to the optimum within the limits; False when too many labels survive or time runs out."""
    cuts, types = model.num_layers + 1, model.num_types
    price, lagrange = model.price_usd_per_h, search.multipliers
    weights = np.concatenate([(price + lagrange)[None], np.eye(types)])
    leave = _to_go(units, weights)
    relief = model.relief(lagrange)
    buckets: list[list[list[_Labels]]] = [[[] for _ in range(types)] for _ in range(cuts)]
    done: list[list[_Labels | None]] = [[None] * types for _ in range(cuts)]
    root = _Labels(np.zeros(1), np.zeros((1, types)), np.full((1, 3), -1))
    for cut in range(cuts - 1):
        for type_index in range(types) if cut else (-1,):
            labels = root if cut == 0 else _settle(buckets[cut][type_index], most)
            if labels is None:
                continue
            if len(labels.price) > most or time.monotonic() > deadline:
                return False
            if cut:
                done[cut][type_index] = labels
            for target in (t for t in range(types) if t != type_index):
                _extend(model, units, leave, labels, (cut, type_index, target), relief, search, buckets)
    finals = [(t, _settle(buckets[-1][t], most)) for t in range(types)]
    for type_index, labels in finals:
        if labels is not None and labels.price.min() < search.price:
            index = int(np.argmin(labels.price))
            search.price = float(labels.price[index])
            search.chosen = _trace_back(done, labels.parent[index], cuts - 1, type_index)
            search.fitting = (*search.fitting, search.chosen)
    search.bound = max(search.bound, search.below)
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
    cut, type_index, target = step
    added = units[cut, cut + 1 :, target]
    ends = np.flatnonzero(np.isfinite(added))
    if not len(ends):
        return
    price = labels.price[:, None] + model.price_usd_per_h[target] * added[ends]
    usage = np.repeat(labels.usage[:, None, :], len(ends), axis=1)
    usage[:, :, target] += added[ends]
    after = leave[ends + cut + 1, :, target]
    bound = price + usage @ search.multipliers + after[:, 0] - relief
    keep: Bools = (bound < search.below * EQUAL) & (usage + after[:, 1:] <= model.limit).all(axis=2)
    for column, end in enumerate(ends.tolist()):
        rows = np.flatnonzero(keep[:, column])
        if len(rows):
            parent = np.stack([np.full(len(rows), cut), np.full(len(rows), type_index), rows], axis=1)
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


def _trace_back(done: list[list[_Labels | None]], parent: Ints, end: int, type_index: int) -> Ints:
    chosen = np.zeros(end, dtype=np.int64)
    while end > 0:
        start, previous, index = (int(value) for value in parent)
        chosen[start:end] = type_index
        end, type_index = start, previous
        labels = done[end][type_index] if end > 0 else None
        parent = labels.parent[index] if labels is not None else parent
    return chosen
