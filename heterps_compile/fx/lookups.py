"""Look-ups in a Dynamo graph: calls of ``F.embedding`` and ``F.embedding_bag`` on a table that is a graph input.

Enters: FX nodes. Leaves: :class:`~heterps_compile.graph.Lookup` records. Refused (None): tables that are computed,
ids that are no tensor, and the swapped order of arguments that old ``embedding_bag`` calls use.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import fx

from heterps_compile.fx.ops import argument
from heterps_compile.fx.values import example, numel, shape
from heterps_compile.graph import Lookup

Mode = Literal["none", "sum", "mean", "max"]


def parse_lookup(node: fx.Node, parameters: frozenset[str]) -> Lookup | None:
    """The look-up a node makes, or None where it makes none."""
    if node.op != "call_function":
        return None
    if node.target is F.embedding:
        return _embedding(node, parameters)
    if node.target is F.embedding_bag:
        return _embedding_bag(node, parameters)
    if node.target is torch.embedding:  # (weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False)
        return _aten_embedding(node, parameters)
    return None


def ids_per_call(lookup: Lookup, gm_nodes: dict[str, fx.Node]) -> int:
    """How many rows one call reads, at the sizes of the first call."""
    return numel(gm_nodes[lookup.ids])


def row_bytes(lookup: Lookup, gm_nodes: dict[str, fx.Node]) -> int:
    """Bytes of one row of the table."""
    table = gm_nodes[lookup.table]
    return shape(table)[-1] * cast(torch.Tensor, example(table)).dtype.itemsize


def _embedding(node: fx.Node, parameters: frozenset[str]) -> Lookup | None:
    ids, table = argument(node, 0, "input"), argument(node, 1, "weight")
    if not _is_table(table, parameters) or not _is_ids(ids):
        return None
    return Lookup(
        node=node.name,
        table=table.name,
        ids=ids.name,
        padding_idx=_static(argument(node, 2, "padding_idx")),
        max_norm=_static(argument(node, 3, "max_norm")),
        norm_type=_static(argument(node, 4, "norm_type", 2.0), 2.0),
        scale_grad_by_freq=bool(argument(node, 5, "scale_grad_by_freq", False)),
        sparse=bool(argument(node, 6, "sparse", False)),
    )


def _embedding_bag(node: fx.Node, parameters: frozenset[str]) -> Lookup | None:
    ids, table = argument(node, 0, "input"), argument(node, 1, "weight")
    offsets, weights = argument(node, 2, "offsets"), argument(node, 8, "per_sample_weights")
    if not _is_table(table, parameters) or not _is_ids(ids):
        return None
    return Lookup(
        node=node.name,
        table=table.name,
        ids=ids.name,
        mode=cast(Mode, argument(node, 6, "mode", "mean")),
        offsets=offsets.name if isinstance(offsets, fx.Node) else None,
        per_sample_weights=weights.name if isinstance(weights, fx.Node) else None,
        padding_idx=_static(argument(node, 10, "padding_idx")),
        max_norm=_static(argument(node, 3, "max_norm")),
        norm_type=_static(argument(node, 4, "norm_type", 2.0), 2.0),
        scale_grad_by_freq=bool(argument(node, 5, "scale_grad_by_freq", False)),
        sparse=bool(argument(node, 7, "sparse", False)),
        include_last_offset=bool(argument(node, 9, "include_last_offset", False)),
    )


def _aten_embedding(node: fx.Node, parameters: frozenset[str]) -> Lookup | None:
    table, ids = argument(node, 0, "weight"), argument(node, 1, "indices")
    if not _is_table(table, parameters) or not _is_ids(ids):
        return None
    padding = argument(node, 2, "padding_idx", -1)
    return Lookup(
        node=node.name,
        table=table.name,
        ids=ids.name,
        padding_idx=padding if isinstance(padding, int) and padding >= 0 else None,
        scale_grad_by_freq=bool(argument(node, 3, "scale_grad_by_freq", False)),
        sparse=bool(argument(node, 4, "sparse", False)),
    )


def _is_table(value: Any, parameters: frozenset[str]) -> bool:
    return isinstance(value, fx.Node) and value.name in parameters and len(shape(value)) == 2


def _is_ids(value: Any) -> bool:
    tensor = example(value) if isinstance(value, fx.Node) else None
    return isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.int64, torch.int32)


def _static(value: Any, default: Any = None) -> Any:
    """A number known before the call: under ``dynamic=True`` Dynamo passes module floats as ``item()`` of an input."""
    if not isinstance(value, fx.Node):
        return value
    number = example(value)
    if isinstance(number, torch.SymFloat) and number.node.has_hint():
        return float(number.node.hint)
    source = value.args[0] if value.args and isinstance(value.args[0], fx.Node) else None
    held = getattr(source.meta.get("grapharg"), "example_strong_ref", None) if source is not None else None
    return held.item() if isinstance(held, torch.Tensor) else default
