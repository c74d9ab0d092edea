"""The equations of the cost model, each once; nothing else computes time, throughput or money.

Enters: a cost table and a cluster. Leaves: a :class:`CostModel`, the same facts as arrays, and functions on arrays of
stages. Refused: tables that share no resource type with the cluster. Source: HeterPS (arXiv 2111.10635), section on the
cost model; the forms are those of design section 5.

Letters: ``serial`` and ``parallel`` are the two parts of Amdahl's law in seconds per sample on one unit, so that
``OCT/B * (1 - alpha + alpha/k)`` is ``serial + parallel/k``. Since a stage's alpha is the mean of its layers' weighted
by their OCT, both parts of a stage are the sums of its layers' parts. Times have four columns (``TERMS``): compute
serial and parallel, communication serial and parallel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt

from heterps_compile.cluster import Cluster
from heterps_compile.costs import CostTable
from heterps_compile.errors import OptionError, PlanError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

TERMS = ("compute serial", "compute parallel", "communication serial", "communication parallel")
FLOOR_TOLERANCE = 1e-9
"""A throughput within this fraction of the floor reaches it: a floor that 12 units meet exactly is met by 12."""
TIME_TOLERANCE = 1e-12


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Everything the planner needs, as arrays: L layers in execution order, T resource types.

    ``terms`` (L, T, 4) in seconds per sample; ``allowed`` (L, T); ``price_usd_per_h`` and ``limit`` (T,); ``bound`` are
    disjoint groups of layer indices that must share a type; ``min_throughput`` in samples per second or None.
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
        """The longest time per sample a stage may take: that of the floor, or of one unit doing everything slowly."""
        if self.min_throughput is not None:
            return (1.0 + FLOOR_TOLERANCE) / self.min_throughput
        worst = self.terms.sum(axis=2).max(axis=1).sum() if self.num_layers else 0.0
        return float(worst) or 1.0

    @property
    def prefix(self) -> Floats:
        """(L + 1, T, 4): sums of the terms of the layers before each cut."""
        sums = np.concatenate([np.zeros((1, *self.terms.shape[1:])), np.cumsum(self.terms, axis=0)])
        columns = np.ascontiguousarray(np.moveaxis(sums, 2, 0))
        return np.moveaxis(columns, 0, 2)  # every formula reads one column: keep each contiguous

    def restricted(self, allowed: Bools) -> CostModel:
        """The same problem with fewer choices."""
        return replace(self, allowed=self.allowed & allowed)

    def with_limits(self, limit: Floats) -> CostModel:
        """The same problem with other limits, to ask what binds."""
        return replace(self, limit=limit)

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
    ) -> CostModel:
        """``paper`` mode: the terms as they stand in the table; prices and limits as in ``cluster`` (or the table).

        Raises :class:`OptionError` for a floor that is not positive or a pin that matches nothing, :class:`PlanError`
        for a layer that no type of the cluster can run.
        """
        if min_throughput is not None and not 0 < min_throughput < float("inf"):
            raise OptionError(f"min_throughput is {min_throughput} (allowed: a number of samples per second > 0)")
        resources = tuple(cluster or costs.cluster())
        types = tuple(r.name for r in resources)
        terms = np.zeros((len(costs), len(types), len(TERMS)))
        allowed = np.zeros((len(costs), len(types)), dtype=bool)
        for position, name in enumerate(costs.names()):
            for index, kind in enumerate(types):
                cost = costs[name].get(kind)
                if cost is None or resources[index].limit < 1:
                    continue
                allowed[position, index] = True
                compute, communication = cost.compute_s / costs.batch_size, cost.communication_s / costs.batch_size
                terms[position, index] = (
                    compute * (1 - cost.compute_parallel),
                    compute * cost.compute_parallel,
                    communication * (1 - cost.communication_parallel),
                    communication * cost.communication_parallel,
                )
        bound = joined_groups(costs.bound, costs.names())
        allowed = pinned(allowed, costs.names(), types, pin or {}, bound)
        return cls(
            layers=costs.names(),
            types=types,
            devices=tuple(r.device for r in resources),
            terms=terms,
            allowed=allowed,
            price_usd_per_h=np.array([r.price_usd_per_h for r in resources]),
            limit=np.array([float(r.limit) for r in resources]),
            bound=bound,
            features=layer_features(costs),
            min_throughput=min_throughput,
        )


def layer_features(costs: CostTable) -> Floats:
    """(L, F) for the learned policies (HeterPS): one-hot kind, log input bytes per sample, log parameter bytes."""
    kinds = sorted({layer.kind for layer in costs.layers})
    one_hot = np.array([[layer.kind == kind for kind in kinds] for layer in costs.layers], dtype=float)
    amounts = np.array([[layer.input_bytes_per_sample, layer.parameter_bytes] for layer in costs.layers])
    return np.concatenate([one_hot.reshape(len(costs), -1), np.log1p(amounts).reshape(len(costs), 2) / 10], axis=1)


def part_time_s(serial: Floats, parallel: Floats, units: Floats) -> Floats:
    """CT and DT: ``OCT/B * (1 - alpha + alpha/k)``, seconds per sample (HeterPS, computing and communication time)."""
    return serial + parallel / units


def stage_time_s(terms: Floats, units: Floats) -> Floats:
    """ET = max(CT, DT), seconds per sample of stages ``terms`` (..., 4) on ``units`` (...): the two overlap."""
    return np.maximum(
        part_time_s(terms[..., 0], terms[..., 1], units), part_time_s(terms[..., 2], terms[..., 3], units)
    )


def units_needed(terms: Floats, time_s: Floats | float) -> Floats:
    """The fewest units, not rounded and not below any minimum, for which ET <= ``time_s``; inf where none is enough.

    Solved from ``serial + parallel/k <= time``; times ``time_s`` it never rises with ``time_s``, which bounds costs.
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
    """The fewest whole units one can rent for which ET <= ``time_s``; inf where none is enough."""
    return whole_units(units_needed(terms, time_s))


def throughput_samples_per_s(slowest_stage_s: float) -> float:
    """A pipeline is as fast as its slowest stage: ``min_i 1/ET_i``; finite (1e15) for stages that take no time."""
    return 1.0 / max(slowest_stage_s, 1e-15)


def cost_usd_per_million_samples(price_usd_per_h: Floats | float, slowest_stage_s: Floats | float) -> Floats:
    """``T_train * sum_t price_t * units_t`` for a million samples, with ``T_train = samples / throughput``."""
    return np.asarray(price_usd_per_h) / 3600.0 * 1e6 * slowest_stage_s


def joined_groups(bound: Iterable[Iterable[str]], names: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Groups that share a layer become one; the result is disjoint groups of two or more layer indices."""
    position = {name: index for index, name in enumerate(names)}
    groups: list[set[int]] = []
    for names_of_group in bound:
        group = {position[name] for name in names_of_group}
        apart = [other for other in groups if not other & group]
        groups = [*apart, group.union(*(other for other in groups if other & group))]
    return tuple(sorted(tuple(sorted(group)) for group in groups if len(group) > 1))


def pinned(
    allowed: Bools,
    names: tuple[str, ...],
    types: tuple[str, ...],
    pin: Mapping[str, str],
    bound: tuple[tuple[int, ...], ...],
) -> Bools:
    """Apply ``pin`` (glob -> type; the last match wins) and spread what a bound group rules out over the group."""
    result = allowed.copy()
    for pattern, kind in pin.items():
        if kind not in types:
            raise OptionError(f"pin {pattern!r}: {kind!r} is no resource type (allowed: {', '.join(types)})")
        matched = [index for index, name in enumerate(names) if fnmatchcase(name, pattern)]
        if not matched:
            raise OptionError(f"pin {pattern!r} matches no layer (layers: {', '.join(names[:8])})")
        only = np.arange(len(types)) == types.index(kind)
        result[matched] = allowed[matched] & only
    for group in bound:
        result[list(group)] = result[list(group)].all(axis=0)
    for index in np.flatnonzero(~result.any(axis=1))[:1].tolist():
        group_names = next((", ".join(names[i] for i in group) for group in bound if index in group), names[index])
        raise PlanError(
            f"layer {names[index]!r} can run on no resource type of the cluster",
            hint=f"look at the costs, the limits and the pins of {group_names}",
        )
    return result
