"""What the operations of a Dynamo graph are: heavy or cheap, writing, random, or switching a mode.

Enters: FX nodes at torch level. Leaves: names, kinds and sets of nodes. Operations this file does not know are cheap
"pointwise" work that writes to nothing; custom operators answer by their schema.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload  # tried on torch 2.13.0, as is the schema of an OpOverload

OpKind = Literal[
    "lookup",
    "linear",
    "conv",
    "attention",
    "recurrent",
    "norm",
    "loss",
    "reduction",
    "view",
    "pointwise",
    "mode",
    "other",
]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_KINDS: dict[OpKind, str] = {
    "lookup": "embedding embedding_bag",
    "linear": """linear matmul mm bmm mv dot inner outer addmm addbmm baddbmm addmv einsum tensordot bilinear cdist
        chain_matmul multi_dot _scaled_mm""",
    "conv": "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution",
    "attention": "scaled_dot_product_attention multi_head_attention_forward flex_attention",
    "recurrent": "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
    "norm": "batch_norm layer_norm group_norm instance_norm rms_norm local_response_norm native_layer_norm",
    "reduction": """sum mean max min amax amin prod norm var std logsumexp argmax argmin topk sort cumsum any all median
        max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
        adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d vector_norm softmax log_softmax normalize""",
    "view": """view reshape view_as reshape_as transpose permute t squeeze unsqueeze flatten unflatten expand expand_as
        chunk split tensor_split unbind narrow select diagonal movedim swapaxes getitem detach size getattr item numel
        dim contiguous as_strided real broadcast_to T mT unsafe_chunk ravel""",
}
_KIND_OF: dict[str, OpKind] = {name: kind for kind, names in _KINDS.items() for name in names.split()}

CHEAP: frozenset[OpKind] = frozenset({"reduction", "view", "pointwise", "mode"})
"""Kinds that cling to a neighbour instead of being a layer of their own."""

_SWITCHES = {"_enter_autocast": 1, "_exit_autocast": -1, "_enter_inference_mode": 1, "_exit_inference_mode": -1}
_NEVER_RANDOM = (0, 0.0, False)
_RANDOM = _words(
    """rand randn randint rand_like randn_like randint_like randperm bernoulli normal multinomial poisson gumbel_softmax
    uniform exponential log_normal cauchy geometric random trunc_normal fractional_max_pool2d fractional_max_pool3d"""
)
_DROPOUTS = _words(
    """dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout native_dropout"""
)
_INPLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in _words("iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul setitem")
)


def op_name(node: fx.Node) -> str:
    """Short name of what a node calls: ``linear``, ``bmm``, ``add_``."""
    target = node.target
    if isinstance(target, str):
        return target.rsplit(".", 1)[-1]
    if isinstance(target, OpOverload):  # torch.ops.aten.linear.default
        return str(target.overloadpacket.__name__)
    return str(getattr(target, "__name__", type(target).__name__))


def op_kind(node: fx.Node) -> OpKind:
    """What a node mostly does."""
    if node.op in ("placeholder", "output", "get_attr"):
        return "view"
    name = op_name(node)
    if node.op == "call_module" or isinstance(node.target, HigherOrderOperator):
        return "other"
    if mode_switch(node):
        return "mode"
    kind = _KIND_OF.get(name) or _KIND_OF.get(name.rstrip("_"))
    if kind:
        return kind
    return "loss" if name.endswith("_loss") or "cross_entropy" in name else "pointwise"


def argument(node: fx.Node, position: int, keyword: str, default: Any = None) -> Any:
    """An argument however it was passed."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(keyword, default)


def mode_switch(node: fx.Node) -> bool:
    """Whether a node changes a mode of the thread: autocast, grad mode, inference mode, functorch levels."""
    if node.op != "call_function":
        return False
    name = op_name(node)
    return (
        name in _SWITCHES or name == "_set_grad_enabled" or name.endswith(("_increment_nesting", "_decrement_nesting"))
    )


def mode_regions(nodes: Iterable[fx.Node]) -> list[list[int]]:
    """Positions of the nodes of each mode region, switches included; a region left open runs to the end.

    Grad mode has no pairs of its own: a region ends where the mode is back at what the first switch changed.
    """
    regions: list[list[int]] = []
    depth, grad, entry = 0, True, True
    for position, node in enumerate(nodes):
        inside = depth > 0 or grad is not entry
        if not mode_switch(node):
            if inside:
                regions[-1].append(position)
            continue
        if not inside:
            regions.append([])
        regions[-1].append(position)
        name = op_name(node)
        if name == "_set_grad_enabled":
            value = bool(node.args[0])
            if not inside:
                entry = not value
            grad = value
        else:
            depth += _SWITCHES.get(name, 1 if name.endswith("increment_nesting") else -1)
    return regions


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory a node writes to."""
    found: list[Any] = []
    name = op_name(node)
    if node.op == "call_method":
        if (name.endswith("_") and not name.endswith("__")) or name == "__setitem__":
            found.append(node.args[0])
    elif node.op == "call_function":
        target = node.target
        if target in _INPLACE_OPERATORS:
            found.append(node.args[0])
        elif isinstance(target, OpOverload):
            found += _schema_writes(target, node)
        elif isinstance(target, HigherOrderOperator):
            found += node.all_input_nodes if "mutation" in name else []
        elif name.endswith("_") and not name.startswith("_"):
            found.append(argument(node, 0, "input"))
        found += _writes_by_flag(node, name)
        if "out" in node.kwargs:
            found.append(node.kwargs["out"])
    return _flat_nodes(found)


def is_random(node: fx.Node, gm: fx.GraphModule | None = None) -> bool:
    """Whether a node draws random numbers; a probability not known before the call counts as drawing."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = op_name(node).rstrip("_")
    if isinstance(node.target, HigherOrderOperator):
        return gm is not None and any(is_random(inner, gm) for inner in _bodies(node, gm))
    if name in _RANDOM:
        return True
    if name in _DROPOUTS:
        train = argument(node, 2, "training", node.kwargs.get("train", True))
        return train is not False and argument(node, 1, "p", 0.5) not in _NEVER_RANDOM
    if name == "rrelu":
        return argument(node, 3, "training", False) is not False
    if name == "scaled_dot_product_attention":
        return argument(node, 4, "dropout_p", 0.0) not in _NEVER_RANDOM
    if name == "multi_head_attention_forward":
        return (
            node.kwargs.get("training", True) is not False and argument(node, 10, "dropout_p", 0.0) not in _NEVER_RANDOM
        )
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu") and len(node.args) > 6:
        return node.args[5] not in _NEVER_RANDOM and node.args[6] is not False
    return False


def _bodies(node: fx.Node, gm: fx.GraphModule) -> Iterable[fx.Node]:
    for source in node.all_input_nodes:
        if source.op == "get_attr" and isinstance(body := getattr(gm, str(source.target), None), fx.GraphModule):
            yield from body.graph.nodes


def _schema_writes(target: OpOverload, node: fx.Node) -> list[Any]:
    found = []
    for position, slot in enumerate(target._schema.arguments):
        if slot.alias_info is not None and slot.alias_info.is_write:
            found.append(argument(node, position, slot.name))
    return found


def _writes_by_flag(node: fx.Node, name: str) -> list[Any]:
    target = node.target
    if target is torch.batch_norm:  # (input, weight, bias, running_mean, running_var, training, ...)
        return [node.args[3], node.args[4]] if node.args[5] is not False else []
    if name in ("batch_norm", "instance_norm"):
        flag = argument(node, 5, "training" if name == "batch_norm" else "use_input_stats", name == "instance_norm")
        running = [argument(node, 1, "running_mean"), argument(node, 2, "running_var")]
        return running if flag is not False else []
    if name in ("embedding", "embedding_bag") and callable(target) and target is not torch.embedding:
        renormed = argument(node, 3, "max_norm") if getattr(target, "__module__", "") == "torch.nn.functional" else None
        return [argument(node, 1, "weight")] if renormed is not None else []
    place = _inplace_position(target) if callable(target) else None
    if place is not None and argument(node, place, "inplace", False) is not False:
        return [argument(node, 0, "input")]
    return []


@functools.lru_cache(maxsize=512)
def _inplace_position(target: Callable[..., Any]) -> int | None:
    try:
        names = list(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    return names.index("inplace") if "inplace" in names else None


def _flat_nodes(values: Iterable[Any]) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(list(values), found.append)
    return found
