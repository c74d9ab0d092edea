"""The graphs a model gives, without running it: what ``plan``, ``profile`` and reports work from.

Enters: a model and example inputs. Leaves: each graph Dynamo makes, with its inputs and why it ended. The graphs are
not executed: they return zeros of the right shapes, so no buffer changes, no random number is drawn and nothing is
computed. It refuses models from which Dynamo gets no graph, and says why that happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from heterps_compile.errors import GraphError


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """One Dynamo graph, its flat inputs, and why it ended there."""

    gm: fx.GraphModule
    example_inputs: tuple[Any, ...]
    ended_by: str


def capture(model: nn.Module, example_inputs: Sequence[Any]) -> tuple[Captured, ...]:
    """Trace ``model(*example_inputs)``. Raises :class:`GraphError` when there is no graph."""
    found: list[Captured] = []

    def record(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        found.append(Captured(gm=gm, example_inputs=tuple(inputs), ended_by=ended_by(gm)))
        return _Unexecuted(gm)

    original = getattr(model, "_orig_mod", model)  # this and the next name: tried on torch 2.13.0
    call = original.forward if getattr(original, "_compiled_call_impl", None) is not None else original
    torch.compile(call, backend=record, dynamic=False)(*example_inputs)
    if not found:
        raise GraphError(f"torch.compile gets no graph from {type(original).__name__}", hint=why_no_graph(original))
    return tuple(found)


def ended_by(gm: fx.GraphModule) -> str:
    """Why Dynamo ended this graph: empty for a plain return, else the reason of the graph break."""
    reason = getattr(gm, "compile_subgraph_reason", None)  # set by torch 2.11 to 2.13
    if reason is None or not getattr(reason, "graph_break", False):
        return ""
    lines = [line.strip() for line in str(reason.reason).splitlines() if line.strip()]
    return "graph break: " + " ".join(lines[:2])[:200]


def why_no_graph(model: nn.Module) -> str:
    """The usual reasons for which Dynamo silently runs a model in eager."""
    hooked = [
        name or type(model).__name__
        for name, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks  # tried on torch 2.13.0
    ]
    if hooked:
        return f"{hooked[0]} has a full backward hook, around which Dynamo compiles nothing: use tensor hooks instead"
    return 'run with TORCH_LOGS="graph_breaks,recompiles" to see what Dynamo could not trace'


class _Unexecuted:
    """Stands for a compiled graph: zeros of the right shape for each output."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
        (output,) = (node for node in gm.graph.nodes if node.op == "output")
        self.outputs = output.args[0]

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        given = dict(zip(self.inputs, args, strict=True))
        return tuple(given[v] if v in given else _zeros(v) for v in self.outputs)


def _zeros(value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return value
    example = value.meta["example_value"]
    if isinstance(example, torch.Tensor):
        return torch.zeros([int(size) for size in example.shape], dtype=example.dtype, device=example.device)
    return example
