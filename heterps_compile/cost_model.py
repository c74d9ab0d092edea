"""The equations of the cost model, each once; nothing else computes time, throughput or money.

Enters: a cost table and a cluster. Leaves: a :class:`CostModel`, the same facts as arrays, and functions on arrays of
stages. Refused: tables that share no resource type with the cluster. Source of ``paper`` mode: HeterPS (arXiv
2111.10635), section on the cost model. ``full`` mode adds what a real fleet pays for, each term with its source below.

Letters: ``k`` units of a stage. ``serial`` and ``parallel`` are the two parts of Amdahl's law in seconds per sample on
one unit, so that ``OCT/B * (1 - alpha + alpha/k)`` is ``serial + parallel/k``. Since a stage's alpha is the mean of its
layers' weighted by their OCT, both parts of a stage are the sums of its layers' parts. The last axis of ``terms`` has
the four columns ``TERMS``, or the eight ``FULL_TERMS``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from heterps_compile.cluster import Cluster
from heterps_compile.cost_terms import (
    FULL_TERMS,
    TERMS,
    Bools,
    Boundaries,
    Floats,
    FullMode,
    Ints,
    boundaries,
    full_terms,
    joined_groups,
    layer_features,
    paid_at_least_s,
    paper_terms,
    pinned,
)
from heterps_compile.costs import CostTable
from heterps_compile.errors import OptionError, PlanError
from heterps_compile.spans import MAX_SPANS, Spans, num_spans, spans_of

__all__ = ["FULL_TERMS", "TERMS", "Bools", "CostModel", "Floats", "FullMode", "Ints"]

FLOOR_TOLERANCE = 1e-9
"""A throughput within this fraction of the floor reaches it: a floor that 12 units meet exactly is met by 12."""
TIME_TOLERANCE = 1e-12
MEMORY_TOLERANCE = 1e-9
"""Memory may be overrun by this fraction: what fills it exactly fits, however the sums were rounded."""
FREE_USD_PER_H = 1e-12
"""What is free is planned with as good as nothing, so that no number of units is worth infinitely many."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Everything the planner needs, as arrays: L layers in execution order, T resource types.

    ``terms`` (L, T, 4 or 8) in seconds per sample; ``allowed`` (L, T); ``price_usd_per_h`` and ``limit`` (T,);
    ``bound`` are disjoint groups of layer indices that must share a type; ``min_throughput`` in samples per second, or
    None. ``billed_s`` (T,) is the least time per sample that is paid for. ``full`` and ``between`` are None in paper
    mode.
    """

    layers: tuple[str, ...]
    types: tuple[str, ...]
    devices: tuple[str, ...]
    terms: Floats
    allowed: Bools
    price_usd_per_h: Floats
    limit: Floats
    bound: tuple[tuple[int, ...], ...] = ()
    features: Floats | None = None
    min_throughput: float | None = None
    billed_s: Floats | None = None
    full: FullMode | None = None
    between: Boundaries | None = None

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @property
    def num_types(self) -> int:
        """T."""
        return len(self.types)

    @property
    def slowest_s(self) -> float:
        """The longest time per sample the pipeline may take: the floor's, or one unit's doing it all slowly."""
        if self.min_throughput is not None:
            return (1.0 + FLOOR_TOLERANCE) / self.min_throughput
        worst = self.terms[..., :6].sum(axis=2).max(axis=1).sum() if self.num_layers else 0.0
        if self.between is not None:
            worst = (worst + self.between.most_s()) * self.stretch(self.num_layers)
        return float(worst) or 1.0

    @property
    def prefix(self) -> Floats:
        """(L + 1, T, 4 or 8): sums of the terms of the layers before each cut."""
        sums = np.concatenate([np.zeros((1, *self.terms.shape[1:])), np.cumsum(self.terms, axis=0)])
        columns = np.ascontiguousarray(np.moveaxis(sums, 2, 0))
        return np.moveaxis(columns, 0, 2)  # every formula reads one column: keep each contiguous

    @property
    def few_spans(self) -> bool:
        """Whether full mode's exact programme is small enough; paper mode has none, its stages stand alone."""
        return self.between is not None and num_spans(self.num_layers, self.num_types) <= MAX_SPANS

    @cached_property
    def spans(self) -> Spans:
        """Every stage there can be, in full mode."""
        assert self.between is not None, "stages have no neighbours to speak of in paper mode"
        return spans_of(self.prefix, self.allowed, self.between)

    def restricted(self, allowed: Bools) -> CostModel:
        """The same problem with fewer choices."""
        return replace(self, allowed=self.allowed & allowed)

    def with_limits(self, limit: Floats) -> CostModel:
        """The same problem with other limits, to ask what binds."""
        return replace(self, limit=limit)

    def relief(self, multipliers: Floats) -> float:
        """What ``multipliers`` (T,) of the limits add to the price of a placement that uses every limited type up."""
        return float(multipliers @ np.where(multipliers > 0, self.limit, 0.0))  # without a limit there is no multiplier

    def with_memory(self, types: Bools) -> CostModel:
        """The same problem with all the memory one may want on the marked ``types`` (T,)."""
        terms = self.terms.copy()
        terms[:, types, len(TERMS) + 2 :] = 0.0
        return replace(self, terms=terms)

    def stretch(self, num_stages: Floats | float) -> Floats:
        """Time per sample of a pipeline over that of its slowest stage; 1 in paper mode."""
        stages = np.asarray(num_stages, dtype=np.float64)
        if self.full is None or not self.full.has("fill-drain"):
            return np.ones_like(stages)
        return pipeline_stretch(stages, self.full.microbatches)

    def paid_s(self, pipeline_s: Floats | float) -> Floats | float:
        """At least so many seconds per sample are paid for, whatever is rented."""
        return pipeline_s if self.billed_s is None else np.maximum(pipeline_s, self.billed_s.min())

    def bill(self, usage: Floats, pipeline_s: Floats | float) -> Floats:
        """USD per million samples of ``usage`` (..., T) units for ``pipeline_s`` (...), or what is paid at least."""
        if self.billed_s is None:
            return cost_usd_per_million_samples(usage @ self.price_usd_per_h, pipeline_s)
        paid_s = np.maximum(np.asarray(pipeline_s)[..., None], self.billed_s)
        return cost_usd_per_million_samples(1.0, (usage * paid_s) @ self.price_usd_per_h)

    def indices(self, placement: Mapping[str, str]) -> Ints:
        """A placement as type indices (L,). Raises :class:`PlanError` for a layer that cannot run where it is."""
        chosen = np.zeros(self.num_layers, dtype=np.int64)
        for position, name in enumerate(self.layers):
            kind = placement.get(name)
            if kind not in self.types or not self.allowed[position, self.types.index(kind)]:
                can = [t for t, ok in zip(self.types, self.allowed[position], strict=True) if ok]
                raise PlanError(f"layer {name!r} is placed on {kind!r} but can run on {', '.join(can) or 'nothing'}")
            chosen[position] = self.types.index(kind)
        return chosen

    def named(self, chosen: Ints) -> dict[str, str]:
        """Type indices (L,) as a placement."""
        return {name: self.types[kind] for name, kind in zip(self.layers, chosen.tolist(), strict=True)}

    @classmethod
    def of(
        cls,
        costs: CostTable,
        cluster: Cluster | None = None,
        min_throughput: float | None = None,
        pin: Mapping[str, str] | None = None,
        full: FullMode | None = None,
    ) -> CostModel:
        """``paper`` mode, or ``full`` mode if given; prices and limits as in ``cluster`` (or the table).

        Raises :class:`OptionError` for a floor that is not positive or a pin that matches nothing, :class:`PlanError`
        for a layer that no type of the cluster can run.
        """
        if min_throughput is not None and not 0 < min_throughput < float("inf"):
            raise OptionError(f"min_throughput is {min_throughput} (allowed: a number of samples per second > 0)")
        resources = cluster or costs.cluster()
        types = tuple(r.name for r in resources)
        terms, allowed = full_terms(costs, resources, full) if full else paper_terms(costs, resources)
        bound = joined_groups(costs.bound, costs.names())
        return cls(
            layers=costs.names(),
            types=types,
            devices=tuple(r.device for r in resources),
            terms=terms,
            allowed=pinned(allowed, costs.names(), types, pin or {}, bound),
            price_usd_per_h=np.array([max(r.price_usd_per_h, FREE_USD_PER_H) for r in resources]),
            limit=np.array([float(r.limit) for r in resources]),
            bound=bound,
            features=layer_features(costs),
            min_throughput=min_throughput,
            billed_s=paid_at_least_s(resources, full) if full else None,
            full=full,
            between=boundaries(costs, resources, full) if full else None,
        )


def part_time_s(serial: Floats, parallel: Floats, units: Floats) -> Floats:
    """CT and DT: ``OCT/B * (1 - alpha + alpha/k)``, seconds per sample (HeterPS, computing and communication time)."""
    return serial + parallel / units


def stage_time_s(terms: Floats, units: Floats) -> Floats:
    """ET = max(CT, DT), seconds per sample of stages ``terms`` (..., 4 or 8) on ``units`` (...): the two overlap."""
    compute = part_time_s(terms[..., 0], terms[..., 1], units)
    communication = part_time_s(terms[..., 2], terms[..., 3], units)
    if terms.shape[-1] == len(FULL_TERMS):
        communication = communication + between_replicas_s(terms, units)
    return np.maximum(compute, communication)


def between_replicas_s(terms: Floats, units: Floats) -> Floats:
    """Seconds per sample that replicas spend on each other; none for a single one.

    Dense gradients: a ring all-reduce moves ``2 (k-1)/k`` of their bytes over each link once a batch (Patarasuk and
    Yuan 2009). Tables are shared row by row, so of the rows a replica's samples need, ``(k-1)/k`` are pulled from
    others and their gradients pushed back, and each replica has ``1/k`` of the samples.
    """
    apart = 1 - 1 / units
    return terms[..., 4] * apart + terms[..., 5] * apart / units


def memory_share(terms: Floats, units: Floats) -> Floats:
    """Part of a unit's memory that is taken: what each replica keeps, and its share of what they divide.

    Each keeps dense parameters with gradients and optimizer state; they divide the tables with theirs, and the
    activations of the batch, all of which are in flight when a schedule runs forwards first (GPipe, Huang et al. 2019).
    """
    return terms[..., 6] + terms[..., 7] / units


def pipeline_stretch(num_stages: Floats, num_microbatches: int) -> Floats:
    """``(m + S - 1) / m``: time of a batch over a full pipeline's, for filling and draining (GPipe, section 2)."""
    return (num_microbatches + num_stages - 1) / num_microbatches


def units_needed(terms: Floats, time_s: Floats | float) -> Floats:
    """The fewest units, not rounded and not below any minimum, for which ET <= ``time_s``; inf where none is enough.

    Solved from ``serial + parallel/k <= time``; times ``time_s`` it never rises with ``time_s``, which bounds costs.
    What replicas spend on each other, and memory, are left out: with them it would be no bound.
    """
    slack_s = time_s * (1 + TIME_TOLERANCE)
    with np.errstate(divide="ignore", invalid="ignore"):
        compute = np.where(terms[..., 0] < slack_s, terms[..., 1] / (slack_s - terms[..., 0]), np.inf)
        communication = np.where(terms[..., 2] < slack_s, terms[..., 3] / (slack_s - terms[..., 2]), np.inf)
    return np.maximum(compute, communication)


def whole_units(units: Floats) -> Floats:
    """Units one can rent: whole numbers, at least one per stage."""
    return np.maximum(np.ceil(units * (1 - TIME_TOLERANCE)), 1.0)


def fewest_units(terms: Floats, time_s: Floats | float) -> Floats:
    """The fewest whole units one can rent that fit in memory and for which ET <= ``time_s``; inf where none is enough.

    Communication is ``f(x) = A x**0 + B x - P x**2`` of ``x = 1/k``, concave: if it is too long for the units that
    computing and memory need, then the next fewest are at the smaller root of ``f(x) = time``, or none are.
    """
    if terms.shape[-1] == len(TERMS):
        return whole_units(units_needed(terms, time_s))
    with np.errstate(divide="ignore", invalid="ignore"):
        free = 1 + MEMORY_TOLERANCE - terms[..., 6]
        held = np.where(terms[..., 7] > 0, terms[..., 7] / np.where(free > 0, free, 0.0), np.where(free > 0, 0, np.inf))
        units = whole_units(np.maximum(units_needed(terms, time_s), held))
        slack_s = time_s * (1 + TIME_TOLERANCE)
        late = terms[..., 2] + terms[..., 3] / units + between_replicas_s(terms, units) > slack_s
        late &= np.isfinite(units)
        if not late.any():
            return units
        rest = slack_s - terms[..., 2] - terms[..., 4]
        slope = terms[..., 3] - terms[..., 4] + terms[..., 5]
        root = np.sqrt(np.maximum(slope**2 - 4 * terms[..., 5] * rest, 0.0))
        more = whole_units(np.where(rest > 0, (slope + root) / (2 * rest), np.inf))
    return np.where(late, more, units)


def throughput_samples_per_s(slowest_stage_s: float) -> float:
    """A pipeline is as fast as its slowest stage: ``min_i 1/ET_i``; finite (1e15) for stages that take no time."""
    return 1.0 / max(slowest_stage_s, 1e-15)


def time_worth_s(cost_usd_per_million: Floats | float, price_usd_per_h: Floats | float) -> Floats:
    """Seconds per sample at which a fleet costs so much; the same function gives the price at which a time does."""
    return np.asarray(cost_usd_per_million) * 3600.0 / 1e6 / price_usd_per_h


def cost_usd_per_million_samples(price_usd_per_h: Floats | float, pipeline_s: Floats | float) -> Floats:
    """``T_train * sum_t price_t * units_t`` for a million samples, with ``T_train = samples / throughput``."""
    return np.asarray(price_usd_per_h) / 3600.0 * 1e6 * pipeline_s
