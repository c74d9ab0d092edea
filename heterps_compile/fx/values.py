"""Facts about the values in a Dynamo graph, read from ``meta["example_value"]`` without computing anything.

Enters: FX nodes whose example values are FakeTensors, SymInts or nests of them. Leaves: plain ints, names and keys.
Symbolic sizes answer with the size of the first call; asking never adds a guard.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

UNKNOWN_SIZE = 1
"""Stands for a size that depends on data (``nonzero`` and the like)."""

_ROOT = re.compile(r"^[LG]\['(\w+)'\]\.?")


def size_hint(size: int | torch.SymInt) -> int:
    """The size at the first call; never specialises a symbol."""
    if isinstance(size, int):
        return size
    node = size.node  # tried on torch 2.13.0; int(size) would add a guard
    return int(node.hint) if node.has_hint() else UNKNOWN_SIZE


def tensors(value: object) -> Iterator[torch.Tensor]:
    """All tensors in a value, however nested."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


def example(node: fx.Node) -> Any:
    """What Dynamo recorded for a node; None where it recorded nothing."""
    return node.meta.get("example_value")


def shape(node: fx.Node) -> tuple[int, ...]:
    """Shape of a node's (first) tensor as plain ints; empty for a scalar and for no tensor at all."""
    for tensor in tensors(example(node)):
        return tuple(size_hint(size) for size in tensor.shape)
    return ()


def numel(node: fx.Node) -> int:
    """Elements in all tensors of a node's value."""
    return sum(math.prod(size_hint(size) for size in tensor.shape) for tensor in tensors(example(node)))


def num_bytes(node: fx.Node) -> int:
    """Bytes of all tensors of a node's value."""
    return sum(
        math.prod(size_hint(size) for size in tensor.shape) * tensor.dtype.itemsize for tensor in tensors(example(node))
    )


def requires_grad(node: fx.Node) -> bool:
    """Whether gradients flow to the node's value, as seen at tracing."""
    return any(tensor.requires_grad for tensor in tensors(example(node)))


def storages(node: fx.Node) -> tuple[int, ...]:
    """Keys of the storages a node's value lives in: equal keys, aliased tensors.

    ``_cdata`` is the address of the storage object (tried on torch 2.13.0); the example values in the graph keep all of
    them alive, so no address is used twice. Sparse tensors have no storage and alias nothing here.
    """
    return tuple(tensor.untyped_storage()._cdata for tensor in tensors(example(node)) if tensor.layout is torch.strided)


def is_parameter(node: fx.Node, example_input: object = None) -> bool:
    """Whether a placeholder is a parameter or buffer of a module."""
    if node.op != "placeholder":
        return False
    if "_dynamo_static_input_type" in node.meta.get("tensor_dict", {}):
        return True
    return isinstance(example_input, torch.nn.Parameter) or isinstance(example(node), torch.nn.Parameter)


def placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    """Inputs of a graph in order."""
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def parameter_names(gm: fx.GraphModule, example_inputs: Sequence[object]) -> frozenset[str]:
    """Names of the placeholders that are parameters or buffers."""
    given = list(example_inputs)
    nodes = placeholders(gm)
    given += [None] * (len(nodes) - len(given))
    return frozenset(node.name for node, value in zip(nodes, given, strict=False) if is_parameter(node, value))


def batch_size(gm: fx.GraphModule, parameters: frozenset[str]) -> int:
    """The leading size most inputs (not parameters) share, of those an output has too if any has; 1 without inputs."""
    leading = Counter(sizes[0] for node in placeholders(gm) if node.name not in parameters and (sizes := shape(node)))
    output = next(node for node in reversed(gm.graph.nodes) if node.op == "output")
    returned = {sizes[0] for node in output.all_input_nodes if (sizes := shape(node))}
    kept = {size: count for size, count in leading.items() if size in returned} or dict(leading)
    return max(1, max(kept, key=kept.__getitem__, default=1))


def attributes(root: nn.Module, graph: fx.Graph) -> dict[str, Any]:
    """What the ``get_attr`` and ``call_module`` nodes of ``graph`` refer to in ``root``, by dotted path."""
    paths = dict.fromkeys(str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module"))
    return {path: functools.reduce(getattr, path.split("."), root) for path in paths}


def call_stack(node: fx.Node) -> tuple[tuple[str, str, Any], ...]:
    """Module calls around a node, outermost first: (key of the call, path, class).

    Dynamo's keys tell two calls of one module apart (``id`` and ``id@1``).
    """
    stack = node.meta.get("nn_module_stack") or {}
    return tuple((key, path, kind) for key, (path, kind) in stack.items())


def module_path(path: str) -> tuple[str, str]:
    """Split ``L['self'].bot.0`` into the local it starts from and the dotted path: ``("self", "bot.0")``."""
    found = _ROOT.match(path)
    root, rest = (found[1], path[found.end() :]) if found else ("", path)
    rest = rest.replace("._modules", "")
    return root, re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", rest).strip(".")
