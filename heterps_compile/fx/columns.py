"""Ids that travel as columns of one float matrix: ``x[:, 3:4].long()`` for each column becomes ``x.long()`` once.

Enters: a stage's module. Leaves: a copy in which the integer columns are views of one integer matrix, under their old
names. Refused: matrices of which few columns are ids, and whatever is written in place or leaves the graph, as views
share memory and columns converted one by one do not.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from heterps_compile.fx.exposed import exposed_storages
from heterps_compile.fx.values import attributes, example, shape, storages

FEWEST = 0.25
"""Share of a matrix that must be ids: converting one number costs far less than calling an operation."""

Columns = dict[fx.Node, dict[fx.Node, Any]]
"""For each matrix the nodes that convert columns of it, with the index of the columns."""


def convert_once(module: fx.GraphModule) -> fx.GraphModule:
    """The same module with one conversion per matrix; the very module where there is nothing to gain."""
    columns = _columns(module.graph)
    if not columns:
        return module
    matrix_of = {node: matrix for matrix, found in columns.items() for node in found}
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    whole: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        matrix = matrix_of.get(node)
        if matrix is None:
            new[node] = graph.node_copy(node, new.__getitem__)
            continue
        if matrix not in whole:
            name = f"{matrix.name}_as_integers"  # a name of its own: look-ups know the columns by theirs
            whole[matrix] = graph.create_node("call_method", "long", (new[matrix],), name=name)
        index = (whole[matrix], columns[matrix][node])
        new[node] = graph.create_node("call_function", operator.getitem, index, name=node.name)
        new[node].meta = dict(node.meta)
    for node in matrix_of:
        (taken,) = (new[value] for value in node.all_input_nodes)
        if not taken.users:
            graph.erase_node(taken)
    graph.lint()
    return fx.GraphModule(attributes(module, module.graph), graph, class_name=type(module).__name__)


def exact_below(node: fx.Node) -> int | None:
    """Up to which whole number the floats that ``node`` converts are exact; None where it converts none."""
    source = node.all_input_nodes[0] if is_conversion(node) else None
    value = example(source) if source is not None else None
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return None
    return int(2 / torch.finfo(value.dtype).eps)


def is_conversion(node: fx.Node) -> bool:
    """Whether a node makes int64 of another tensor's numbers."""
    if node.op != "call_method" or len(node.all_input_nodes) != 1:
        return False
    return (node.target == "long" and len(node.args) == 1) or (
        node.target == "to" and node.args[1:] == (torch.int64,) and not node.kwargs
    )


def _columns(graph: fx.Graph) -> Columns:
    exposed = exposed_storages(graph)
    found: Columns = defaultdict(dict)
    for node in graph.nodes:
        if not is_conversion(node):
            continue
        taken = node.all_input_nodes[0]
        if taken.op != "call_function" or taken.target is not operator.getitem:
            continue
        matrix, index = taken.args
        if not isinstance(matrix, fx.Node) or not _takes_columns(matrix, index):
            continue
        if not exposed.intersection((*storages(matrix), *storages(node))):
            found[matrix][node] = index
    return {matrix: nodes for matrix, nodes in found.items() if _is_worth_it(matrix, nodes)}


def _takes_columns(matrix: fx.Node, index: Any) -> bool:
    """Whether ``matrix[index]`` are columns of a float matrix, chosen by numbers known now."""
    value = example(matrix)
    if not isinstance(value, torch.Tensor) or value.dim() != 2 or not value.dtype.is_floating_point:
        return False
    if value.requires_grad or not isinstance(index, tuple) or len(index) != 2 or index[0] != slice(None):
        return False
    columns = index[1]
    parts = (columns.start, columns.stop, columns.step) if isinstance(columns, slice) else (columns,)
    return all(part is None or isinstance(part, int) for part in parts)


def _is_worth_it(matrix: fx.Node, nodes: dict[fx.Node, Any]) -> bool:
    taken = sum(shape(node)[1] if len(shape(node)) == 2 else 1 for node in nodes)
    return len(nodes) > 1 and taken >= FEWEST * shape(matrix)[1]
