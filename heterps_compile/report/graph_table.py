"""The layer graph as a table a person reads: what each layer holds, moves and computes, and what limits it where.

Enters: a layer graph, and a cluster or resource types. Leaves: text. (Graphviz is ``LayerGraph.dot``.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from heterps_compile.cluster import ResourceType
from heterps_compile.graph import Layer, LayerGraph
from heterps_compile.report.columns import align

DATA = "data-intensive"
COMPUTE = "compute-intensive"


def intensity_class(layer: Layer, resource: ResourceType) -> str:
    """Whether moving data or computing limits a layer on one unit of a type; "unknown" for a type without rates."""
    if not resource.balance_flop_per_byte:
        return "unknown"
    return COMPUTE if layer.intensity_flop_per_byte >= resource.balance_flop_per_byte else DATA


def layer_table(graph: LayerGraph, types: Iterable[ResourceType]) -> str:
    """One line per layer: kind, parameters, bytes touched and FLOPs per sample, FLOP per byte, class on each type."""
    types = tuple(types)
    heads = ["layer", "kind", "params", "touched/sample", "FLOP/sample", "FLOP/byte"]
    heads += [f"on {resource.name} ({resource.balance_flop_per_byte:.0f} FLOP/byte)" for resource in types]
    rows = [_row(layer, types) for layer in graph]
    total = sum(layer.parameter_bytes for layer in graph)
    flops = sum(layer.forward_flops_per_sample + layer.backward_flops_per_sample for layer in graph)
    foot = f"{len(graph)} layers, {human(total, 'B')} of parameters, {human(flops, 'FLOP')} per sample"
    return "\n".join([*align([heads, *rows], right=range(2, 6)), foot])


def human(value: float, unit: str = "") -> str:
    """Three digits and a decimal prefix: ``human(1536, "B") == "1.54 kB"``."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def _row(layer: Layer, types: Sequence[ResourceType]) -> list[str]:
    flops = layer.forward_flops_per_sample + layer.backward_flops_per_sample
    return [
        layer.name,
        layer.kind,
        human(layer.parameter_bytes, "B"),
        human(layer.touched_bytes_per_sample, "B"),
        human(flops),
        f"{layer.intensity_flop_per_byte:.2f}",
        *(intensity_class(layer, resource) for resource in types),
    ]
