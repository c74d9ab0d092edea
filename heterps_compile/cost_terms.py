"""From a cost table to the arrays of a cost model: seconds per sample and shares of memory, per layer and type.

Enters: a cost table, resource types and links. Leaves: arrays of L layers, T types. ``paper`` mode takes the times as
they stand in the table. ``full`` mode takes communication from bytes, where the table has them, and adds what
:data:`FULL_TERMS` says. Refused: pins that match nothing, layers that no type can run, unknown switches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt

from heterps_compile.cluster import Cluster, ResourceType
from heterps_compile.costs import CostTable
from heterps_compile.errors import OptionError, PlanError
from heterps_compile.plan_facts import PlanFacts

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

TERMS = ("compute serial", "compute parallel", "communication serial", "communication parallel")
FULL_TERMS = (*TERMS, "all-reduce", "pull and push", "memory of each replica", "memory shared by the replicas")
"""Columns of ``CostModel.terms``: seconds per sample of one unit; the two of memory are parts of a unit's memory."""
SWITCHES = ("transfer", "all-reduce", "pull-push", "memory", "fill-drain", "billing")
"""What can be left out of ``full`` mode, one by one."""
BOTH_WAYS = 2.0
"""Activations and rows travel forward, their gradients back, in equal number of bytes."""
RING_PASSES = 2.0
"""A ring all-reduce scatters sums, then gathers them: every byte passes a link twice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FullMode:
    """Options of ``full`` mode: microbatches a batch is cut into, and what is left out.

    ``samples`` are those of the whole training, which the billing minimum needs; ``data_rate`` are the samples per
    second that arrive: to be faster saves nothing. Raises :class:`OptionError` for counts below 1, rates that are not
    positive and unknown switches.
    """

    microbatches: int = 8
    samples: float | None = None
    data_rate: float | None = None
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise OptionError(f"microbatches is {self.microbatches} (allowed: a whole number >= 1)")
        if self.samples is not None and not 0 < self.samples < float("inf"):
            raise OptionError(f"samples is {self.samples} (allowed: a number of training samples > 0)")
        if self.data_rate is not None and not 0 < self.data_rate < float("inf"):
            raise OptionError(f"data_rate is {self.data_rate} (allowed: a number of samples per second > 0)")
        for name in self.without:
            if name not in SWITCHES:
                raise OptionError(f"without names {name!r} (allowed: {', '.join(SWITCHES)})")

    @classmethod
    def of(cls, plan: PlanFacts) -> FullMode | None:
        """The options a plan was made with; None for a plan of paper mode."""
        if plan.mode != "full":
            return None
        return cls(microbatches=plan.microbatches, samples=plan.samples, data_rate=plan.data_rate, without=plan.without)

    def has(self, switch: str) -> bool:
        """Whether a term is part of the model."""
        return switch not in self.without


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundaries:
    """What crosses from stage to stage: ``cut_bytes`` (L + 1,) per sample and direction, over links of T x T types.

    ``link_s_per_byte`` and ``latency_s_per_sample`` are (T, T): of one unit of the first type towards the second.
    """

    cut_bytes: Floats
    link_s_per_byte: Floats
    latency_s_per_sample: Floats

    def terms(self, cut: Ints, here: Ints, there: Ints) -> tuple[Floats, Floats]:
        """(serial, parallel) seconds per sample on a unit of type ``here`` whose boundary at ``cut`` meets ``there``.

        Forward and backward over the link; the bytes are shared by the units, the latencies are not.
        """
        crossing = BOTH_WAYS * self.cut_bytes[cut]
        return BOTH_WAYS * self.latency_s_per_sample[here, there], crossing * self.link_s_per_byte[here, there]

    def most_s(self) -> float:
        """Longer than any pipeline spends on its boundaries: every cut over the slowest link, in and out."""
        crossing = float(self.link_s_per_byte.max()) * float(self.cut_bytes.sum())
        return 2 * BOTH_WAYS * (crossing + float(self.latency_s_per_sample.max()) * len(self.cut_bytes))


def paper_terms(costs: CostTable, cluster: Cluster) -> tuple[Floats, Bools]:
    """(L, T, 4) and (L, T): times as they stand in the table, and which types can run a layer."""
    terms = np.zeros((len(costs), len(cluster), len(TERMS)))
    allowed = np.zeros((len(costs), len(cluster)), dtype=bool)
    for position, name in enumerate(costs.names()):
        for index, resource in enumerate(cluster):
            cost = costs[name].get(resource.name)
            if cost is None or resource.limit < 1:
                continue
            allowed[position, index] = True
            compute, communication = cost.compute_s / costs.batch_size, cost.communication_s / costs.batch_size
            terms[position, index] = (
                compute * (1 - cost.compute_parallel),
                compute * cost.compute_parallel,
                communication * (1 - cost.communication_parallel),
                communication * cost.communication_parallel,
            )
    return terms, allowed


def full_terms(costs: CostTable, cluster: Cluster, full: FullMode) -> tuple[Floats, Bools]:
    """(L, T, 8) and (L, T). Communication times of a table without ``edges`` are kept: it states no bytes instead."""
    paper, allowed = paper_terms(costs, cluster)
    terms = np.concatenate([paper, np.zeros((*paper.shape[:2], len(FULL_TERMS) - len(TERMS)))], axis=2)
    own_s = np.array([1.0 / cluster.port(r.name, r.name).bandwidth_bytes_per_s for r in cluster])
    reduce_s = np.array([reduce_s_per_byte(resource, own) for resource, own in zip(cluster, own_s, strict=True)])
    memory = np.array([r.memory_bytes or np.inf for r in cluster])
    copies = np.array([1.0 / r.units_per_host if r.unit == "core" else 1.0 for r in cluster])
    intake = intake_bytes(costs)
    for position, layer in enumerate(costs.layers):
        if costs.edges:
            terms[position, :, 2] = 0.0
            terms[position, :, 3] = intake[position] * own_s
        trained = layer.parameter_bytes + layer.state_bytes
        if full.has("pull-push"):
            terms[position, :, 5] = BOTH_WAYS * layer.touched_bytes_per_sample * own_s
        if full.has("all-reduce") and not layer.is_table:
            terms[position, :, 4] = RING_PASSES * layer.parameter_bytes * reduce_s / costs.batch_size
        if full.has("memory"):
            held = costs.batch_size * layer.output_bytes_per_sample
            each = 0.0 if layer.is_table else copies * trained
            terms[position, :, 6] = each / memory
            terms[position, :, 7] = (held + trained - each) / memory
    terms[~allowed] = 0.0
    return terms, allowed


def paid_at_least_s(cluster: Cluster, full: FullMode) -> Floats | None:
    """(T,) seconds per sample that are paid for however fast the pipeline: until data arrives, and the billing minimum.

    None where neither is known.
    """
    billed = full.samples is not None and full.has("billing")
    if not billed and full.data_rate is None:
        return None
    waiting_s = 1.0 / full.data_rate if full.data_rate else 0.0
    minimum_s = [r.billing_minimum_s / full.samples if full.samples and billed else 0.0 for r in cluster]
    paid_s: Floats = np.maximum(waiting_s, np.array(minimum_s))
    return paid_s


def reduce_s_per_byte(resource: ResourceType, network_s: float) -> float:
    """Seconds to move a byte of gradients on: inside the host first, then once a host over all of its network."""
    inside_s = 1.0 / resource.interconnect_bytes_per_s if resource.interconnect_bytes_per_s else 0.0
    return inside_s + network_s / resource.units_per_host


def boundaries(costs: CostTable, cluster: Cluster, full: FullMode) -> Boundaries:
    """The bytes at every cut and the links they take; all zero without ``transfer``."""
    links = [[cluster.port(here.name, there.name) for there in cluster] for here in cluster]
    on = float(full.has("transfer"))
    per_sample = full.microbatches / costs.batch_size
    return Boundaries(
        cut_bytes=on * cut_bytes(costs),
        link_s_per_byte=np.array([[1.0 / link.bandwidth_bytes_per_s for link in row] for row in links]),
        latency_s_per_sample=on * per_sample * np.array([[link.latency_s for link in row] for row in links]),
    )


def cut_bytes(costs: CostTable) -> Floats:
    """(L + 1,): bytes per sample that cross each cut; a tensor read by several later layers crosses once.

    A table without ``edges`` is a chain: what crosses is the input of the layer after the cut.
    """
    crossing = np.zeros(len(costs) + 1)
    if not costs.edges:
        crossing[1:-1] = [layer.input_bytes_per_sample for layer in costs.layers[1:]]
        return crossing
    position = {name: index for index, name in enumerate(costs.names())}
    readers: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for edge in costs.edges:
        readers[position[edge.source]].append((position[edge.target], edge.bytes_per_sample))
    for source, edges in readers.items():
        largest = max(size for _, size in edges)
        made = max(costs.layers[source].output_bytes_per_sample, largest)
        for cut in range(source + 1, max(target for target, _ in edges) + 1):
            crossing[cut] += min(made, sum(size for target, size in edges if target >= cut))
    return crossing


def intake_bytes(costs: CostTable) -> Floats:
    """(L,): bytes per sample of each layer's inputs that no other layer makes: ids and features from the data store."""
    made: dict[str, float] = defaultdict(float)
    for edge in costs.edges:
        made[edge.target] += edge.bytes_per_sample
    return np.array([max(0.0, layer.input_bytes_per_sample - made[layer.name]) for layer in costs.layers])


def layer_features(costs: CostTable) -> Floats:
    """(L, F) for the learned policies (HeterPS): one-hot kind, log input bytes per sample, log parameter bytes."""
    kinds = sorted({layer.kind for layer in costs.layers})
    one_hot = np.array([[layer.kind == kind for kind in kinds] for layer in costs.layers], dtype=float)
    amounts = np.array([[layer.input_bytes_per_sample, layer.parameter_bytes] for layer in costs.layers])
    return np.concatenate([one_hot.reshape(len(costs), -1), np.log1p(amounts).reshape(len(costs), 2) / 10], axis=1)


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
