"""Work of single operations, from the shapes in a Dynamo graph: FLOPs and bytes moved, forward and backward.

Enters: FX nodes with example values. Leaves: amounts for one call at the sizes of the first call. A multiply-add counts
as two FLOPs, like ``torch.utils.flop_counter``, whose formulas the heavy operations follow; any other operation counts
one FLOP per element. Bytes are those of eager execution: all operands read, all results written, views free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from heterps_compile.fx.ops import OpKind, argument, op_kind, op_name
from heterps_compile.fx.values import num_bytes, numel, requires_grad, shape


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """FLOPs and bytes of one call."""

    forward_flops: float = 0.0
    backward_flops: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            forward_flops=self.forward_flops + other.forward_flops,
            backward_flops=self.backward_flops + other.backward_flops,
            forward_bytes=self.forward_bytes + other.forward_bytes,
            backward_bytes=self.backward_bytes + other.backward_bytes,
        )


def node_work(node: fx.Node) -> Work:
    """Work of one node; views, sizes and mode switches do none."""
    kind = op_kind(node)
    if kind in ("view", "mode"):
        return Work()
    if kind == "lookup":
        return _lookup_work(node)
    flops = forward_flops(node, kind)
    moved = num_bytes(node) + sum(num_bytes(source) for source in node.all_input_nodes)
    if not requires_grad(node):
        return Work(forward_flops=flops, forward_bytes=moved)
    learning = sum(requires_grad(source) for source in _factors(node))
    heavy = kind in ("linear", "conv", "attention", "recurrent")
    # One product of the forward's size per operand that wants a gradient; pointwise work repeats itself once.
    # An attention or recurrent call holds several products, whose operands want gradients twice over.
    factor = min(learning, 2) if kind in ("linear", "conv") else 2 if heavy else 1
    return Work(
        forward_flops=flops,
        backward_flops=flops * factor,
        forward_bytes=moved,
        backward_bytes=moved * (factor if heavy else 1),
    )


def _factors(node: fx.Node) -> list[fx.Node]:
    """The operands of a product; a bias is none."""
    name = op_name(node).rstrip("_")
    if name == "linear" or name.startswith("conv"):
        values = [argument(node, 0, "input"), argument(node, 1, "weight")]
    elif name in ("addmm", "addbmm", "baddbmm", "addmv"):
        values = list(node.args[1:3])
    else:
        values = list(node.all_input_nodes)
    return [value for value in values if isinstance(value, fx.Node)]


def forward_flops(node: fx.Node, kind: OpKind) -> float:
    """FLOPs of the forward of one node."""
    if kind == "linear":
        return _product_flops(node)
    if kind == "conv":
        return _conv_flops(node)
    if kind == "attention":
        return _attention_flops(node)
    if kind == "recurrent":
        return _recurrent_flops(node)
    if kind in ("reduction", "norm", "loss"):
        inputs = node.all_input_nodes
        return float(max(numel(node), numel(inputs[0]) if inputs else 0))
    return float(numel(node))


def _lookup_work(node: fx.Node) -> Work:
    """Rows read and results written; backward reads the results' gradients and writes rows' gradients.

    A gradient that is not sparse is as large as its table, and written whole.
    """
    ids, table = argument(node, 0, "input"), argument(node, 1, "weight")
    if node.target is torch.embedding:
        ids, table = table, ids
    if not isinstance(ids, fx.Node) or not isinstance(table, fx.Node):
        return Work(forward_bytes=float(2 * num_bytes(node)))
    elements = float(numel(ids) * shape(table)[-1])
    moved = elements * num_bytes(table) / max(1, numel(table)) + num_bytes(ids) + num_bytes(node)
    learns = requires_grad(node)
    whole = 0 if argument(node, 7 if op_name(node) == "embedding_bag" else 6, "sparse", False) else num_bytes(table)
    return Work(
        forward_flops=elements if op_name(node) == "embedding_bag" else 0.0,
        backward_flops=elements if learns else 0.0,
        forward_bytes=moved,
        backward_bytes=moved + whole if learns else 0.0,
    )


def _product_flops(node: fx.Node) -> float:
    """2 * elements of the result * length of the summed dimension(s)."""
    name, out = op_name(node).rstrip("_"), numel(node)
    operands = [shape(source) for source in node.all_input_nodes if shape(source)]
    if not operands:
        return 0.0
    if name == "einsum":
        return _einsum_flops(node)
    if name == "tensordot":
        return 2.0 * math.sqrt(float(out) * math.prod(operands[0]) * math.prod(operands[-1]))
    if name == "bilinear":  # (in1, in2, weight (out, in1, in2))
        return 2.0 * out * operands[0][-1] * operands[1][-1]
    if name == "linear":
        return 2.0 * out * operands[0][-1]
    if name in ("addmm", "addbmm", "baddbmm", "addmv"):
        first = argument(node, 1, "batch1" if "bmm" in name else "mat1" if name == "addmm" else "mat")
        return 2.0 * out * shape(first)[-1] if isinstance(first, fx.Node) else 0.0
    return 2.0 * out * operands[0][-1]


def _einsum_flops(node: fx.Node) -> float:
    """2 * product of all index sizes, for two operands; one product more per further operand."""
    equation = node.args[0]
    operands = [shape(source) for source in node.all_input_nodes]
    if not isinstance(equation, str) or "." in equation:
        return 2.0 * max([numel(node), *(math.prod(sizes) for sizes in operands)])
    sizes: dict[str, int] = {}
    sources = node.args[1:] if isinstance(node.args[1], fx.Node) else node.args[1]
    terms = equation.replace(" ", "").split("->")[0].split(",")
    for term, source in zip(terms, sources if isinstance(sources, (tuple, list)) else (), strict=False):
        if isinstance(source, fx.Node):
            sizes.update(zip(term, shape(source), strict=False))
    return 2.0 * max(1, len(terms) - 1) * math.prod(sizes.values())


def _conv_flops(node: fx.Node) -> float:
    """2 * result elements * (channels in / groups) * kernel; the input's elements where it is transposed."""
    weight = argument(node, 1, "weight")
    if not isinstance(weight, fx.Node):
        return 0.0
    source = argument(node, 0, "input")
    spread = numel(source) if "transpose" in op_name(node) and isinstance(source, fx.Node) else numel(node)
    return 2.0 * spread * math.prod(shape(weight)[1:])


def _attention_flops(node: fx.Node) -> float:
    """Two products over the sequence, and for multi-head attention its four projections."""
    query, key, value = (argument(node, i, k) for i, k in enumerate(("query", "key", "value")))
    if not all(isinstance(a, fx.Node) for a in (query, key, value)):
        return 0.0
    q, k, v = shape(query), shape(key), shape(value)
    if op_name(node) != "multi_head_attention_forward":  # (..., length, width)
        return 2.0 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])
    width = q[-1]  # (length, batch, width)
    projections = 2.0 * width * (2 * math.prod(q) + math.prod(k) + math.prod(v))
    return projections + 4.0 * math.prod(q) * k[0]


def _recurrent_flops(node: fx.Node) -> float:
    """Each weight matrix is multiplied once per step and sample; 2 * (steps * batch) * weight elements."""
    source = node.all_input_nodes[0]
    width = shape(source)[-1] if shape(source) else 1
    steps = numel(source) / max(1, width)
    weights = sum(numel(other) for other in node.all_input_nodes[1:] if len(shape(other)) == 2)
    return 2.0 * steps * weights
