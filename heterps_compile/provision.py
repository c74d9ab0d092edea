"""How many units of each type to rent for given stages: balanced first, then whole numbers, then the cheapest.

Enters: a cost model and placements as type indices. Leaves: units per stage, exact for the given stages: no other whole
numbers within the limits that reach the floor cost less. HeterPS balances the stages so that all are as slow as the
floor allows; with whole units a little faster can be cheaper per sample, so the realised times below the floor's are
swept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from heterps_compile.cost_model import (
    Bools,
    CostModel,
    Floats,
    Ints,
    cost_usd_per_million_samples,
    fewest_units,
    memory_share,
    stage_time_s,
    time_worth_s,
    units_needed,
)
from heterps_compile.cost_terms import Boundaries

STEP = 1 - 1e-11
"""Just below a time already tried: the next sweep point."""
ALL_STEPS = 20_000
"""More sweep points than rounding can use up with thousands of units per stage."""
EQUAL = 1 - 1e-10
"""Costs within this ratio are equal, and then the smaller fleet is taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Provision:
    """Units per stage of one placement; times in seconds per sample, ``starts`` the first layer of each stage.

    ``stretch`` is the pipeline's time over its slowest stage's, for filling and draining.
    """

    starts: Ints
    kinds: Ints
    units: Ints
    stage_s: Floats
    price_usd_per_h: float
    cost_usd_per_million_samples: float
    stretch: float = 1.0

    @property
    def slowest_s(self) -> float:
        """Time per sample of the pipeline."""
        return float(self.stage_s.max()) * self.stretch if len(self.stage_s) else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """What N placements cost after provisioning; ``violation`` is 0 where feasible, else how far off (log)."""

    cost_usd_per_million_samples: Floats
    violation: Floats


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of N placements, ragged: one entry per stage, ``first`` the first stage of each placement.

    ``stretch`` (N,) is each pipeline's time over its slowest stage's.
    """

    starts: Ints
    row: Ints
    kind: Ints
    terms: Floats
    first: Ints
    stretch: Floats

    @classmethod
    def of(cls, model: CostModel, placements: Ints) -> Stages:
        """Merge neighbours of equal type; ``placements`` (N, L) type indices."""
        num, length = placements.shape
        flat = placements.reshape(-1)
        begins = np.empty((num, length), dtype=bool)
        begins[:, 0] = True
        np.not_equal(placements[:, 1:], placements[:, :-1], out=begins[:, 1:])
        starts = np.flatnonzero(begins.reshape(-1))
        index = (np.arange(length) * model.num_types + placements).reshape(-1)
        columns = np.moveaxis(model.terms, 2, 0).reshape(model.terms.shape[2], -1)
        sums = np.stack([np.add.reduceat(column[index], starts) for column in columns])
        row = starts // length
        first = np.searchsorted(row, np.arange(num))
        starts, types = starts - row * length, flat[starts]
        if model.between is not None:
            add_boundaries(model.between, sums, starts, types)
        stretch = model.stretch(np.diff(first, append=len(row)))
        return cls(starts, row, types, sums.T, first, stretch)  # columns are contiguous: every formula reads one

    def keep(self, rows: Bools) -> Stages:
        """Only the placements marked in ``rows`` (N,)."""
        marked = rows[self.row]
        row = (np.cumsum(rows) - 1)[self.row[marked]]
        first = np.searchsorted(row, np.arange(int(rows.sum())))
        terms = self.terms.T[:, marked].T
        return Stages(self.starts[marked], row, self.kind[marked], terms, first, self.stretch[rows])

    def fewest(self, pipeline_s: Floats | float) -> Floats:
        """The fewest whole units of each stage for pipelines (N,) at most ``pipeline_s`` slow."""
        return fewest_units(self.terms, self.stage_limit_s(pipeline_s))

    def stage_limit_s(self, pipeline_s: Floats | float) -> Floats:
        """How slow each stage may be in a pipeline (N,) that is ``pipeline_s`` slow."""
        limit: Floats = (pipeline_s / self.stretch)[self.row]
        return limit

    def pipeline_s(self, units: Floats) -> Floats:
        """(N,) time per sample of each pipeline: its slowest stage, stretched."""
        slowest: Floats = np.maximum.reduceat(stage_time_s(self.terms, units), self.first)
        return slowest * self.stretch


def add_boundaries(between: Boundaries, columns: Floats, starts: Ints, types: Ints) -> None:
    """Add to the communication ``columns`` (C, stages) what each stage exchanges with its neighbours."""
    inner = np.flatnonzero(starts[1:] > 0) + 1  # stages that have one before them
    before, after = inner - 1, inner
    for here, there in ((after, before), (before, after)):
        serial, parallel = between.terms(starts[after], types[here], types[there])
        columns[2, here] += serial
        columns[3, here] += parallel


def provision(model: CostModel, chosen: Ints, steps: int = ALL_STEPS) -> Provision | None:
    """The cheapest whole units for one placement (L,), or None when the floor cannot be reached within the limits."""
    stages = Stages.of(model, chosen[None])
    kinds, terms = stages.kind, stages.terms
    time_s = model.slowest_s
    best: Provision | None = None
    for _ in range(steps):
        needed = units_needed(terms, stages.stage_limit_s(time_s))
        floor_cost = cost_usd_per_million_samples(float(model.price_usd_per_h[kinds] @ needed), model.paid_s(time_s))
        if best is not None and not floor_cost < best.cost_usd_per_million_samples * EQUAL:
            return best
        units = stages.fewest(time_s)
        if not np.isfinite(units).all():
            return best
        usage: Floats = np.bincount(kinds, units, model.num_types).astype(float)
        if (usage > model.limit).any():
            return best
        price = float(model.price_usd_per_h @ usage)
        realised_s = float(stages.pipeline_s(units)[0])
        cost = float(model.bill(usage, realised_s))
        if best is None or cost < best.cost_usd_per_million_samples * EQUAL:
            best = Provision(
                starts=stages.starts,
                kinds=kinds,
                units=units.astype(np.int64),
                stage_s=stage_time_s(terms, units),
                price_usd_per_h=price,
                cost_usd_per_million_samples=cost,
                stretch=float(stages.stretch[0]),
            )
        time_s = next_time_s(realised_s, price, best.cost_usd_per_million_samples)
        if time_s <= 0:
            break
    return best


def next_time_s(realised_s: float, price_usd_per_h: float, best_cost: float) -> float:
    """The longest time per sample at which something cheaper can exist, the price being the least at ``realised_s``.

    Faster pipelines cost at least this price per hour, so they must be faster by the ratio of the costs.
    """
    worth = float(time_worth_s(best_cost, price_usd_per_h)) if price_usd_per_h > 0 else 0.0
    return min(realised_s, worth) * STEP


def score(
    model: CostModel,
    placements: Ints,
    steps: int = ALL_STEPS,
    beat: float = float("inf"),
) -> Scores:
    """Provision N placements (N, L) in one vectorised sweep of at most ``steps`` times; exact if it ends before.

    A placement that cannot cost less than ``beat`` may be left at more than its true cost.
    """
    num = len(placements)
    best = np.full(num, np.inf)
    violation = np.zeros(num)
    stages = Stages.of(model, placements)
    rows = np.arange(num)
    time_s = np.full(num, model.slowest_s)
    for step in range(steps):
        units = stages.fewest(time_s)
        cell = stages.row * model.num_types + stages.kind
        usage: Floats = np.bincount(cell, units, len(rows) * model.num_types).reshape(len(rows), -1).astype(float)
        fits = (usage <= model.limit).all(axis=1)
        if step == 0:
            violation = _violation(model, stages, usage, stages.stage_limit_s(time_s))
        price = usage @ model.price_usd_per_h
        with np.errstate(invalid="ignore"):
            slowest = stages.pipeline_s(units)
            cost = np.where(fits, model.bill(usage, slowest), np.inf)
        best[rows] = np.minimum(best[rows], cost)
        if step + 1 == steps:
            break
        with np.errstate(invalid="ignore", divide="ignore"):
            worth = time_worth_s(best[rows], price)
            next_s = np.minimum(slowest, np.where(price > 0, worth, 0.0)) * STEP
        active = fits & (next_s > 0)
        if active.any():
            bound: Floats = np.bincount(
                stages.row,
                model.price_usd_per_h[stages.kind] * units_needed(stages.terms, stages.stage_limit_s(next_s)),
                len(rows),
            ).astype(float)
            with np.errstate(invalid="ignore"):
                active &= (
                    cost_usd_per_million_samples(bound, model.paid_s(next_s)) < np.minimum(best[rows], beat) * EQUAL
                )
        if not active.any():
            break
        stages, rows, time_s = stages.keep(active), rows[active], next_s[active]
    return Scores(cost_usd_per_million_samples=best, violation=violation)


def _violation(model: CostModel, stages: Stages, usage: Floats, stage_limit_s: Floats) -> Floats:
    """Per placement: 0 within the limits, else log of the worst excess, past 20 when more units cannot help."""
    with np.errstate(divide="ignore", invalid="ignore"):
        over = np.max(np.where(usage > model.limit, usage / np.maximum(model.limit, 0.5), 1.0), axis=1)
        serial = np.maximum(stages.terms[:, 0], stages.terms[:, 2]) / stage_limit_s
        if model.full is not None:
            serial = np.maximum(serial, memory_share(stages.terms, np.array(np.inf)))
    slowest = np.maximum.reduceat(serial, stages.first)
    return np.where(np.isfinite(over), np.minimum(np.log(over), 20.0), 20.0 + np.log(np.maximum(slowest, 1.0)))
