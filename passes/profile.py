"""What each layer costs on each resource type: measured where the device is here, estimated from rates where not.

Enters: a Dynamo graph, its layers and a cluster. Leaves: a :class:`~heterps_compile.costs.CostTable` for the batch size
of the graph; every entry says whether it was measured. Refused: nothing; a layer that cannot run alone is estimated.

Compute time is forward, backward and, where the optimizer is known, the update, on one unit. Communication time is
``latency + batch * (bytes of table rows touched + input bytes) / network rate``: a stage pulls the rows and activations
it reads (ODT of the paper's cost model). The parallel parts alpha and beta are what shrinks with more units; a fixed
part per operation, or a latency, does not.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from heterps_compile import cache
from heterps_compile.catalog import CATALOG
from heterps_compile.cluster import (
    ASSUMED_LATENCY_S,
    ASSUMED_NETWORK_BYTES_PER_S,
    Cluster,
    ResourceType,
    num_cores,
)
from heterps_compile.costs import CostLayer, CostTable, LayerCost
from heterps_compile.errors import OptionError
from heterps_compile.fx.run import LayerRun, MakeOptimizer, Run, measure
from heterps_compile.graph import Layer, LayerGraph
from heterps_compile.options import ProfileMode
from heterps_compile.stage_graph import StageGraph

EFFICIENCY: dict[str, tuple[float, float]] = {
    "embedding": (0.5, 0.7),
    "linear": (0.6, 0.7),
    "conv": (0.5, 0.7),
    "matmul": (0.3, 0.6),
    "attention": (0.4, 0.6),
    "recurrent": (0.3, 0.6),
    "norm": (0.2, 0.6),
    "pointwise": (0.2, 0.7),
    "reduction": (0.2, 0.7),
    "loss": (0.2, 0.6),
    "other": (0.2, 0.5),
}
"""Part of a unit's rates that a kind of layer reaches: (FLOP/s, byte/s), the usual range of eager kernels. Table rows
come at the rates below; the rest of what a look-up moves, ids, results and gradients, is streamed."""

CORE_GATHER_BYTES_PER_S = 5e8
"""Lines of ``LINE_BYTES`` that one core reads at random from a table beyond its caches: the 0.41 to 0.60e9 of five runs
of ``calibrate()`` on an AMD EPYC core, 4 % of what it streams. Bound by latency, so much the same on other cores."""
ACCELERATOR_GATHER = 0.3
"""The same as a part of an accelerator's memory rate. Assumed: many reads are under way there, each of a whole line."""
LINE_BYTES = 64

OVERHEAD_S = {"cpu": 4e-6, "accelerator": 1e-5}
"""Fixed time of one operation (dispatch; launch and its share of the backward's), whatever the batch."""
BACKWARD_OPERATIONS = 1.5
"""Backward operations per forward operation."""
MAX_PARALLEL = 0.999


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Measure or estimate each layer on each type.

    ``mode``: ``measure`` on the devices that are here, ``estimate`` from rates alone, or ``auto``: measure when there
    is a choice of types to make. ``remember`` keeps measurements on disk, keyed by content, machine and torch version.
    ``runs_as`` makes of a layer what it will be lowered to, ``make_optimizer`` what will step its parameters: without
    them layers are measured in eager, and without their update. ``simulated`` measures the simulated accelerator too,
    whose times are those of this machine's CPU and mean nothing elsewhere.
    """

    mode: ProfileMode = "auto"
    remember: bool = True
    runs_as: Callable[[StageGraph], Run] | None = None
    make_optimizer: MakeOptimizer | None = None
    simulated: bool = False

    def __call__(self, gm: fx.GraphModule, graph: LayerGraph, cluster: Cluster) -> CostTable:
        """One entry per layer and type."""
        measuring = self.mode == "measure" or (self.mode == "auto" and len(cluster) > 1)
        costs: dict[str, dict[str, LayerCost]] = {layer.name: {} for layer in graph}
        for resource in cluster:
            device = device_of(resource, simulated=self.simulated) if measuring else None
            measured = self._measure(gm, graph, resource, device) if device else {}
            for layer in graph:
                costs[layer.name][resource.name] = measured.get(layer.name) or estimate(
                    layer, resource, graph.batch_size
                )
        return CostTable(
            batch_size=graph.batch_size,
            resources=cluster.resources,
            layers=tuple(_cost_layer(layer) for layer in graph),
            costs=costs,
            edges=graph.edges,
            bound=graph.bound,
        )

    def _measure(
        self, gm: fx.GraphModule, graph: LayerGraph, resource: ResourceType, device: torch.device
    ) -> dict[str, LayerCost]:
        """Layers that run alone; equal content is measured once."""
        here = resource.limit <= num_cores()  # what two threads cost each other says nothing of hundreds of cores
        cores = max(1, resource.limit) if device.type == "cpu" and here else 1
        found: dict[str, tuple[float, float] | None] = {}
        costs: dict[str, LayerCost] = {}
        for layer in graph:
            run = LayerRun(gm, layer)
            key = _machine_key(device, f"{run.key} {cores} {self.runs_as is not None}", graph.batch_size)
            if key not in found:
                prior = estimate(layer, resource, graph.batch_size).compute_parallel
                found[key] = self._recall(key) or self._fit(run, graph.batch_size, device, cores, prior)
                self._keep(key, found[key])
            if (fit := found[key]) is not None:
                costs[layer.name] = _measured_cost(layer, resource, graph.batch_size, *fit)
        return costs

    def _fit(
        self, run: LayerRun, batch_size: int, device: torch.device, cores: int, prior: float
    ) -> tuple[float, float] | None:
        """Seconds on one unit, and alpha from less work per unit: half the batch, or more cores. None if it cannot run.

        More cores that take longer than one say that others use them now, not that the layer is serial: left out.
        """
        one = 1 if device.type == "cpu" else None
        counts = _core_counts(cores)
        try:
            call = self.runs_as(run.stage(device)) if self.runs_as is not None else None
            inputs = run.inputs(batch_size, False, device)
            variants: list[tuple[Sequence[Any], int | None]] = [(inputs, one), *((inputs, count) for count in counts)]
            shares = [1.0, *(1 / count for count in counts)]
            if batch_size > 1 and (half := _half(run, batch_size, device)) is not None:
                variants.append((half, one))
                shares.append(0.5)
            whole, *less = measure(run, variants, call, self.make_optimizer)
        except Exception:  # whatever a sub-graph raises on synthetic inputs: the cost says that it is an estimate
            return None
        points = [(share, timing.best_s / whole.best_s) for share, timing in zip(shares[1:], less, strict=True)]
        return whole.median_s, parallel_part([(share, took) for share, took in points if took < 1], prior)

    @property
    def _remembers(self) -> bool:
        """An optimizer has no key: what is measured with one is measured anew."""
        return self.remember and self.make_optimizer is None

    def _recall(self, key: str) -> tuple[float, float] | None:
        saved = cache.load("profiles", key) if self._remembers else None
        try:
            return (float(saved["compute_s"]), float(saved["compute_parallel"])) if saved else None
        except (KeyError, TypeError, ValueError):
            return None

    def _keep(self, key: str, fit: tuple[float, float] | None) -> None:
        if self._remembers and fit is not None:
            cache.save("profiles", key, {"compute_s": fit[0], "compute_parallel": fit[1]})


def device_of(resource: ResourceType, *, simulated: bool = False) -> torch.device | None:
    """The device here that is one unit of this type, or None."""
    if resource.device == "cpu":
        elsewhere = resource.name in CATALOG and resource.name != "cpu"  # a core of some cloud's, with rates of its own
        return None if elsewhere else torch.device("cpu")
    if resource.device == "sim" and simulated:
        return torch.device("sim", 0)
    if resource.device == "cuda" and torch.cuda.is_available():
        named = torch.cuda.get_device_name().lower()
        return torch.device("cuda") if all(part in named for part in resource.name.lower().split("-")) else None
    return None


def estimate(layer: Layer, resource: ResourceType, batch_size: int) -> LayerCost:
    """Roofline: the slower of computing and moving bytes at the kind's efficiency, and a fixed time per operation.

    Raises :class:`OptionError` for a type that states no rates.
    """
    if not (resource.flops_per_s and resource.memory_bytes_per_s):
        raise OptionError(
            f"resource type {resource.name!r} states no flops_per_s or no memory_bytes_per_s to estimate times from",
            hint="give both in the cluster file, name a type of the catalog, or measure on a machine that has it",
        )
    compute, memory = EFFICIENCY[layer.kind]
    flops = layer.forward_flops_per_sample + layer.backward_flops_per_sample
    moved = layer.forward_bytes_per_sample + layer.backward_bytes_per_sample
    gathered = layer.touched_bytes_per_sample if layer.lookups else 0.0
    streamed_s = max(0.0, moved - gathered) / (memory * resource.memory_bytes_per_s)
    work_s = batch_size * max(flops / (compute * resource.flops_per_s), streamed_s + _gathering_s(layer, resource))
    once_s = OVERHEAD_S["accelerator" if resource.is_accelerator else "cpu"]
    backward = BACKWARD_OPERATIONS if layer.backward_bytes_per_sample else 0.0
    fixed_s = once_s * (1 + backward) * _num_operations(layer)
    return LayerCost(
        compute_s=work_s + fixed_s,
        compute_parallel=min(MAX_PARALLEL, work_s / (work_s + fixed_s)),
        source="estimated",
        **_communication(layer, resource, batch_size),
    )


def _gathering_s(layer: Layer, resource: ResourceType) -> float:
    """Time of the rows one sample looks up: whole lines of memory, and one at least per look-up however short a row."""
    if not layer.lookups:
        return 0.0
    share = ACCELERATOR_GATHER * resource.memory_bytes_per_s
    rate = share if resource.is_accelerator else min(share, CORE_GATHER_BYTES_PER_S)
    return max(layer.touched_bytes_per_sample, LINE_BYTES * len(layer.lookups)) / rate


def _num_operations(layer: Layer) -> int:
    """Operations that launch something: look-ups of a group are one call each; views are counted, at most two each."""
    return max(1, len(layer.lookups) or len(layer.nodes))


def _communication(layer: Layer, resource: ResourceType, batch_size: int) -> dict[str, float]:
    rows = layer.touched_bytes_per_sample if layer.lookups else 0.0
    rate = resource.network_bytes_per_s or ASSUMED_NETWORK_BYTES_PER_S
    moved_s = batch_size * (rows + layer.input_bytes_per_sample) / rate
    total_s = moved_s + ASSUMED_LATENCY_S
    return {"communication_s": total_s, "communication_parallel": min(MAX_PARALLEL, moved_s / total_s)}


def _measured_cost(
    layer: Layer, resource: ResourceType, batch_size: int, compute_s: float, parallel: float
) -> LayerCost:
    return LayerCost(
        compute_s=compute_s,
        compute_parallel=parallel,
        source="measured",
        **_communication(layer, resource, batch_size),
    )


def _half(run: LayerRun, batch_size: int, device: torch.device) -> list[Any] | None:
    """Inputs of half the batch; None where the sub-graph has the batch size written into it."""
    try:
        inputs = run.inputs(batch_size, True, device)
        with torch.no_grad(), torch.random.fork_rng():
            run.module(*inputs)
    except Exception:  # any operation may refuse any shape
        return None
    return inputs


def parallel_part(points: Sequence[tuple[float, float]], prior: float) -> float:
    """Least-squares alpha of ``time = 1 - alpha + alpha * share`` from (share of the work per unit, relative time).

    The estimate joins as one more observation, at half the work: two cores say little about hundreds.
    """
    points = [*points, (0.5, 1 - 0.5 * prior)]
    weight = sum((1 - share) ** 2 for share, _ in points)
    alpha = sum((1 - share) * (1 - took) for share, took in points) / weight
    return min(MAX_PARALLEL, max(0.0, alpha))


def _core_counts(cores: int) -> list[int]:
    """2, 4, 8 ... and all cores."""
    counts = [2**power for power in range(1, 8) if 2**power < cores]
    return [*counts, cores] if cores > 1 else []


def _machine_key(device: torch.device, content: str, batch_size: int) -> str:
    here = platform.processor() or platform.machine()
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else here
    text = f"{where} {num_cores()} {device.type} {torch.__version__} {batch_size} {content}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _cost_layer(layer: Layer) -> CostLayer:
    return CostLayer(
        name=layer.name,
        kind=layer.kind,
        parameter_bytes=layer.parameter_bytes,
        state_bytes=2 * layer.parameter_bytes if layer.lookups else 3 * layer.parameter_bytes,
        touched_bytes_per_sample=layer.touched_bytes_per_sample if layer.lookups else 0.0,
        input_bytes_per_sample=layer.input_bytes_per_sample,
        output_bytes_per_sample=layer.output_bytes_per_sample,
        intensity_flop_per_byte=layer.intensity_flop_per_byte,
    )
