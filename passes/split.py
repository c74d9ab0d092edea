"""Cut the traced graph into one submodule per stage, each with named inputs and outputs.

Enters: the Dynamo graph, its layers, and the stages as runs of layers with the device each is to run on. Leaves: stage
graphs in order; a value is known by the name of its FX node everywhere. Nodes run in layer order, which the trace made
legal for mutations and random numbers too. It refuses layers that are not those of the graph. (HeterPS splits a program
at each change of device; Paddle's splitter allows only a palindromic chain, this one any acyclic cut.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from heterps_compile.errors import PlanError
from heterps_compile.fx.ops import op_name
from heterps_compile.fx.values import attributes
from heterps_compile.graph import Layer, LayerGraph
from heterps_compile.stage_graph import Cut, StageGraph


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Cut ``gm`` at the stage boundaries. ``home`` is the device the caller's inputs live on."""

    home: torch.device

    def __call__(self, gm: fx.GraphModule, graph: LayerGraph, cuts: Sequence[Cut]) -> tuple[StageGraph, ...]:
        """Raises :class:`PlanError` when the cuts do not hold every layer exactly once, in order."""
        placed = [name for cut in cuts for name in cut.layers]
        if placed != list(graph.names()):
            missing = sorted(set(graph.names()) ^ set(placed))
            raise PlanError(
                f"the stages do not hold the layers of this graph in order; they differ in {missing or 'their order'}",
                hint="the plan was made for another model, or for another version of it: plan again",
            )
        nodes = {node.name: node for node in gm.graph.nodes}
        members = [[nodes[name] for layer in cut.layers for name in graph[layer].nodes] for cut in cuts]
        needed = _values_needed_after(members, returned_names(gm))
        several = any(cut.device.type != self.home.type for cut in cuts)
        return tuple(
            _stage_graph(gm, cut, tuple(graph[name] for name in cut.layers), inside, keep, several)
            for cut, inside, keep in zip(cuts, members, needed, strict=True)
        )


def returned_values(gm: fx.GraphModule) -> tuple[Any, ...]:
    """The flat outputs of a Dynamo graph: FX nodes, or constants such as None."""
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    values = output.args[0]
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def returned_names(gm: fx.GraphModule) -> set[str]:
    """Names of the nodes among the outputs."""
    return {value.name for value in returned_values(gm) if isinstance(value, fx.Node)}


def _values_needed_after(members: Sequence[Iterable[fx.Node]], returned: set[str]) -> list[set[str]]:
    """For each stage, the names that a later stage or the caller reads."""
    needed = set(returned)
    after: list[set[str]] = []
    for inside in reversed(members):
        after.append(set(needed))
        needed.update(value.name for node in inside for value in node.all_input_nodes)
    return after[::-1]


def _stage_graph(
    gm: fx.GraphModule,
    cut: Cut,
    layers: tuple[Layer, ...],
    inside: Sequence[fx.Node],
    keep: set[str],
    several: bool,
) -> StageGraph:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    own = set(inside)
    inputs: dict[str, None] = {}
    for node in inside:
        for value in node.all_input_nodes:
            if value in own or value in env:
                continue
            if value.op == "get_attr":  # a constant of the graph: each stage reads its own
                env[value] = graph.node_copy(value, lambda n: env[n])
            else:
                env[value] = graph.placeholder(value.name)
                env[value].meta = dict(value.meta)
                inputs[value.name] = None
    for node in inside:
        env[node] = graph.node_copy(node, lambda n: env[n])
        if several:
            _rehome(env[node], cut.device)
    outputs = tuple(node.name for node in inside if node.name in keep)
    by_name = {node.name: env[node] for node in inside}
    graph.output(tuple(by_name[name] for name in outputs))
    graph.lint()
    module = fx.GraphModule(_attributes_on(gm, graph, cut.device), graph, class_name=f"Stage_{cut.name}")
    return StageGraph(cut=cut, layers=layers, module=module, inputs=tuple(inputs), outputs=outputs)


_MAKERS = frozenset(
    (
        *("arange", "as_tensor", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn"),
        *("randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
    )
)
"""Functions of torch that make a tensor from numbers, on the CPU when no device is named."""


def _rehome(node: fx.Node, device: torch.device) -> None:
    """Make a node that names a device (``torch.zeros(..., device=cpu)``, ``x.cpu()``) name its stage's device.

    So do nodes that make a tensor and name none. A graph traced after its parameters moved names devices too.
    """

    def rename(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    node.args = fx.node.map_aggregate(node.args, rename)
    kwargs = fx.node.map_aggregate(node.kwargs, rename)
    makes = node.op == "call_function" and op_name(node) in _MAKERS
    node.kwargs = {**kwargs, "device": device} if makes or kwargs.get("device") is not None else kwargs
    if node.op == "call_method" and node.target in ("cpu", "cuda"):
        node.target, node.args, node.kwargs = "to", (node.args[0], device), {}
    elif node.op == "call_method" and node.target == "to" and len(node.args) > 1 and isinstance(node.args[1], str):
        node.args = (node.args[0], device, *node.args[2:])


def _attributes_on(gm: fx.GraphModule, graph: fx.Graph, device: torch.device) -> dict[str, Any]:
    """The attributes a stage reads, tensors among them copied to its device (constants: never parameters)."""
    return {
        path: value.to(device) if isinstance(value, torch.Tensor) and value.device.type != device.type else value
        for path, value in attributes(gm, graph).items()
    }
