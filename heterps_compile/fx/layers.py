"""From groups of FX nodes to annotated layers.

Enters: a partition of a graph's compute nodes in execution order, and ordering edges. Leaves: a
:class:`~heterps_compile.graph.LayerGraph` with a name, a kind and all amounts per sample for every layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from torch import fx

from heterps_compile.fx.lookups import ids_per_call, parse_lookup, row_bytes
from heterps_compile.fx.ops import CHEAP, OpKind, op_kind, op_name, written
from heterps_compile.fx.values import batch_size, call_stack, module_path, num_bytes
from heterps_compile.fx.work import Work, node_work
from heterps_compile.graph import Edge, Layer, LayerGraph, LayerKind, Lookup

_BY_RANK: tuple[OpKind, ...] = ("lookup", "norm", "loss", "reduction", "pointwise", "other", "view", "mode")
_HEAVY: tuple[OpKind, ...] = ("linear", "conv", "attention", "recurrent")
_AS_LAYER: dict[OpKind, LayerKind] = {
    "lookup": "embedding",
    "linear": "linear",
    "conv": "conv",
    "attention": "attention",
    "recurrent": "recurrent",
    "norm": "norm",
    "loss": "loss",
    "reduction": "reduction",
    "view": "pointwise",
    "pointwise": "pointwise",
    "mode": "pointwise",
    "other": "other",
}


def describe_layers(
    gm: fx.GraphModule,
    groups: Sequence[Sequence[fx.Node]],
    order_edges: Iterable[tuple[fx.Node, fx.Node]],
    parameters: frozenset[str],
) -> LayerGraph:
    """Annotate each group; nodes of a group in graph order, groups in execution order."""
    book = _Book(gm, groups, parameters)
    names = _unique([book.name(group) for group in groups])
    layers = tuple(book.layer(name, index) for index, name in enumerate(names))
    return LayerGraph(
        layers=layers,
        edges=book.edges(names, order_edges),
        bound=_bound(layers),
        batch_size=book.batch,
    )


class _Book:
    """Sizes, work and owners of all nodes, computed once."""

    def __init__(self, gm: fx.GraphModule, groups: Sequence[Sequence[fx.Node]], parameters: frozenset[str]) -> None:
        self.groups = groups
        self.parameters = parameters
        self.batch = batch_size(gm, parameters)
        self.by_name = {node.name: node for node in gm.graph.nodes}
        self.owner = {node: index for index, group in enumerate(groups) for node in group}
        self.bytes = {node: num_bytes(node) for node in gm.graph.nodes}
        self.work = {node: node_work(node) for node in self.owner}
        self.kinds = {node: op_kind(node) for node in self.owner}
        stacks = [stack for node in self.owner if (stack := call_stack(node))]
        self.roots = {module_path(stack[0][1])[0] for stack in stacks}
        self.containers = {key for stack in stacks for key, _, _ in stack[:-1]}

    def layer(self, name: str, index: int) -> Layer:
        group = self.groups[index]
        inputs = dict.fromkeys(a for node in group for a in node.all_input_nodes if self.owner.get(a) != index)
        held = tuple(node.name for node in inputs if node.name in self.parameters)
        lookups = self.lookups(group)
        work = sum((self.work[node] for node in group), Work())
        parameter_bytes = sum(self.bytes[self.by_name[parameter]] for parameter in held)
        rows = sum(ids_per_call(lookup, self.by_name) * row_bytes(lookup, self.by_name) for lookup in lookups)
        return Layer(
            name=name,
            kind=self.kind(group),
            nodes=tuple(node.name for node in group),
            parameters=held,
            lookups=lookups,
            module=self.path(self.anchor(group)),
            parameter_bytes=parameter_bytes,
            touched_bytes_per_sample=(rows if lookups else parameter_bytes) / self.batch,
            input_bytes_per_sample=sum(self.bytes[a] for a in inputs if a.name not in self.parameters) / self.batch,
            output_bytes_per_sample=sum(self.bytes[node] for node in group if self.leaves(node)) / self.batch,
            forward_flops_per_sample=work.forward_flops / self.batch,
            backward_flops_per_sample=work.backward_flops / self.batch,
            forward_bytes_per_sample=work.forward_bytes / self.batch,
            backward_bytes_per_sample=work.backward_bytes / self.batch,
        )

    def leaves(self, node: fx.Node) -> bool:
        """Whether a value is read outside its layer, by another layer or by the caller."""
        return any(self.owner.get(user) != self.owner[node] for user in node.users)

    def lookups(self, group: Sequence[fx.Node]) -> tuple[Lookup, ...]:
        """The look-ups of a layer that holds nothing else but cheap operations before them; else none."""
        found = {node: parse_lookup(node, self.parameters) for node in group if self.kinds[node] == "lookup"}
        if any(self.kinds[node] not in CHEAP and node not in found for node in group):
            return ()
        if any(a in found for node in group for a in node.all_input_nodes):
            return ()
        if any(self.kinds[node] == "mode" or (node not in found and written(node)) for node in group):
            return ()
        lookups = tuple(lookup for lookup in found.values() if lookup is not None)
        return lookups if len(lookups) == len(found) else ()

    def anchor(self, group: Sequence[fx.Node]) -> fx.Node:
        """The node a layer is named after: most FLOPs of the heavy ones, else the first that is no view."""
        heavy = [node for node in group if self.kinds[node] not in CHEAP]
        if heavy:
            return max(heavy, key=lambda node: self.work[node].forward_flops)
        return next((node for node in group if self.kinds[node] not in ("view", "mode")), group[0])

    def kind(self, group: Sequence[fx.Node]) -> LayerKind:
        """What most FLOPs go to; without a heavy operation the first kind present, in a fixed order."""
        heavy = [node for node in group if self.kinds[node] in _HEAVY]
        if heavy:
            most = max(heavy, key=lambda node: self.work[node].forward_flops)
            weights = any(a.name in self.parameters for a in most.all_input_nodes)
            return "matmul" if self.kinds[most] == "linear" and not weights else _AS_LAYER[self.kinds[most]]
        present = {self.kinds[node] for node in group}
        return _AS_LAYER[next(kind for kind in _BY_RANK if kind in present)]

    def path(self, node: fx.Node) -> str:
        """Dotted path of the innermost module; starts with the local's name where the graph has modules of several."""
        stack = call_stack(node)
        if not stack:
            return ""
        root, path = module_path(stack[-1][1])
        return ".".join(part for part in (root if len(self.roots) > 1 else "", path) if part)

    def name(self, group: Sequence[fx.Node]) -> str:
        lookups = self.lookups(group)
        if lookups:
            tables = dict.fromkeys(lookup.table for lookup in lookups)
            paths = {self.path(self.by_name[lookup.node]) for lookup in lookups}
            if len(tables) == len(paths) == 1 and "" not in paths:
                return f"emb({paths.pop()})"
            width = self.by_name[lookups[0].table].meta["example_value"].shape[-1]
            return f"emb({len(tables)} table{'s' * (len(tables) > 1)} x {width})"
        anchor = self.anchor(group)
        stack, path = call_stack(anchor), self.path(anchor)
        calls = {s[-1][0] for node in group if self.kinds[node] not in CHEAP and (s := call_stack(node))}
        functional = not stack or not path or stack[-1][0] in self.containers
        name = ".".join(part for part in (path, op_name(anchor).strip("_") if functional else "") if part)
        return name if len(calls) < 2 else f"{name}+{len(calls) - 1}"

    def edges(self, names: Sequence[str], order_edges: Iterable[tuple[fx.Node, fx.Node]]) -> tuple[Edge, ...]:
        """Activations between layers, each value counted once per reader, and ordering edges of 0 bytes."""
        amount: dict[tuple[int, int], int] = defaultdict(int)
        for node, index in self.owner.items():
            for reader in dict.fromkeys(self.owner[user] for user in node.users if user in self.owner):
                if reader != index:
                    amount[index, reader] += self.bytes[node]
        for a, b in order_edges:
            if self.owner[a] != self.owner[b]:
                amount.setdefault((self.owner[a], self.owner[b]), 0)
        return tuple(
            Edge(source=names[a], target=names[b], bytes_per_sample=amount[a, b] / self.batch)
            for a, b in sorted(amount)
        )


def _unique(names: Sequence[str]) -> list[str]:
    """Add ``_1``, ``_2`` ... to names that are taken."""
    taken: set[str] = set()
    result: list[str] = []
    for name in names:
        unique, count = name, 0
        while unique in taken:
            count += 1
            unique = f"{name}_{count}"
        taken.add(unique)
        result.append(unique)
    return result


def _bound(layers: Sequence[Layer]) -> tuple[tuple[str, ...], ...]:
    """Groups of layers joined by parameters they share."""
    group_of = {layer.name: {layer.name} for layer in layers}
    first: dict[str, str] = {}
    for layer in layers:
        for parameter in layer.parameters:
            a, b = group_of[first.setdefault(parameter, layer.name)], group_of[layer.name]
            if a is not b:
                a |= b
                group_of.update((name, a) for name in b)
    order = [layer.name for layer in layers]
    unique = {id(group): group for group in group_of.values() if len(group) > 1}
    return tuple(tuple(name for name in order if name in group) for group in unique.values())
