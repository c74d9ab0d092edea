"""Memory that may not be shared: what an operation writes in place, and what the caller gets to see."""

from __future__ import annotations

from torch import fx

from heterps_compile.fx.ops import written
from heterps_compile.fx.values import storages


def exposed_storages(graph: fx.Graph) -> set[int]:
    """Keys (:func:`storages`) of everything that is written to in ``graph`` or returned by it."""
    seen = [target for node in graph.nodes for target in written(node)]
    seen += [value for node in graph.nodes if node.op == "output" for value in node.all_input_nodes]
    return {key for node in seen for key in storages(node)}
