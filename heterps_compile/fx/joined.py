"""Looked-up rows that are only ever read side by side: a kernel can write them so, and nobody has to copy them.

Enters: a graph and the names of its look-ups. Leaves: the ``cat`` and ``stack`` nodes that read them, with the rows
each lays side by side. Refused: rows that anything else reads as well, and, where several nodes read the same rows,
results that are written in place or leave the graph: they will share memory, which in eager they do not.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from heterps_compile.fx.exposed import exposed_storages
from heterps_compile.fx.ops import argument, op_name
from heterps_compile.fx.values import example, storages

Rows = tuple[fx.Node, ...]


def joined_rows(graph: fx.Graph, lookups: Collection[str]) -> dict[fx.Node, Rows]:
    """The nodes that read nothing but rows of ``lookups``, side by side, and these rows in order."""
    readers = {node: rows for node in graph.nodes if (rows := _side_by_side(node, lookups))}
    alone = {rows for rows in readers.values() if all(readers.get(user) == rows for row in rows for user in row.users)}
    exposed = exposed_storages(graph)
    for rows in list(alone):
        same = [reader for reader, read in readers.items() if read == rows]
        if len(same) > 1 and any(key in exposed for reader in same for key in storages(reader)):
            alone.discard(rows)
    return {reader: rows for reader, rows in readers.items() if rows in alone}


def is_last_dim(node: fx.Node) -> bool:
    """Whether a ``cat`` of joined rows is the buffer itself, and not a view in which each row is apart."""
    return op_name(node) != "stack" and _dim(node) == len(example(node).shape) - 1


def _side_by_side(node: fx.Node, lookups: Collection[str]) -> Rows:
    """The rows that ``node`` lays next to each other, sample by sample; empty when it does anything else."""
    name = op_name(node)
    if node.op != "call_function" or name not in ("cat", "concat", "concatenate", "stack"):
        return ()
    rows = argument(node, 0, "tensors")
    if not isinstance(rows, list | tuple) or not rows or len(set(rows)) < len(rows):
        return ()
    if any(not isinstance(row, fx.Node) or row.name not in lookups for row in rows):
        return ()
    shapes = [example(row).shape for row in rows]
    width = len(shapes[0])
    same = len({shape[-1] for shape in shapes}) == 1
    if name == "stack":
        fits = width == 2 and same and _dim(node) == 1
    elif width == 3 and _dim(node) == 1:  # (batch, 1, dim) each: one id per sample, as a column
        fits = same and all(isinstance(shape[1], int) and shape[1] == 1 for shape in shapes)
    else:
        fits = width in (2, 3) and _dim(node) == width - 1
    return tuple(rows) if fits else ()


def _dim(node: fx.Node) -> int | None:
    """The dim of a ``cat`` or ``stack``, counted from the front."""
    dim = argument(node, 1, "dim", node.kwargs.get("axis", 0))
    return dim % len(example(node).shape) if isinstance(dim, int) else None
