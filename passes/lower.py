"""Turn a stage graph into a callable: grouped look-ups in generated C++ on CPU, torch eager for the rest.

Enters: one stage graph. Leaves: a callable with its inputs and outputs, and a line per layer saying how it was lowered.
The look-ups of a layer become one call as late as their first reader allows; nothing else moves. Where a kernel cannot
be had, the layer runs in eager and says why; ``strict`` refuses instead.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from heterps_compile import optim
from heterps_compile.errors import LoweringError
from heterps_compile.fx.ops import argument, op_name, written
from heterps_compile.fx.values import attributes
from heterps_compile.graph import Layer, LayerGraph, Lookup
from heterps_compile.kernels.lookup import lookup_group, prepare
from heterps_compile.kernels.specs import GroupSpec, Layout, LookupSpec
from heterps_compile.stage_graph import StageGraph


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweredStage:
    """A stage that can run: ``run(*inputs) -> outputs``; ``how`` says for each layer what it became."""

    stage: StageGraph
    run: Callable[..., tuple[Any, ...]]
    how: Mapping[str, str]


class LookupGroup(nn.Module):
    """One call for all look-ups of a layer; a module so that the stage's FX graph stays printable."""

    def __init__(self, spec: GroupSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(
        self,
        tables: list[torch.Tensor],
        ids: list[torch.Tensor],
        offsets: list[torch.Tensor | None],
        weights: list[torch.Tensor | None],
    ) -> tuple[torch.Tensor, ...]:
        """Rows of each look-up, as ``F.embedding`` or ``F.embedding_bag`` would give them."""
        optim.track(tables, lazy=self.spec.lazy)
        optim.catch_up([tables[lookup.table] for lookup in self.spec.lookups], ids)
        return lookup_group(self.spec, tables, ids, offsets, weights)

    def extra_repr(self) -> str:
        """Number of look-ups."""
        return f"{len(self.spec.lookups)} look-ups"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lower:
    """Lower one stage.

    ``lazy_tables`` lets gradients of ``sparse=False`` tables stay sparse: the optimizer hook applies them exactly.
    ``read_whole`` names tables that the graph also reads outside look-ups: their rows must always be up to date, so
    their gradients stay dense.
    """

    strict: bool = False
    lazy_tables: bool = False
    read_whole: frozenset[str] = frozenset()

    def __call__(self, stage: StageGraph) -> LoweredStage:
        """Raises :class:`LoweringError` under ``strict`` for a look-up that has no kernel."""
        how = dict.fromkeys((layer.name for layer in stage.layers), f"torch eager on {stage.cut.device.type}")
        module = stage.module
        if any(layer.lookups for layer in stage.layers):
            optim.install()
        for layer in stage.layers:
            if not layer.lookups:
                continue
            if stage.cut.device.type != "cpu":
                how[layer.name] = self._eager(layer, f"look-up kernels are for cpu, the stage is on {stage.cut.device}")
                continue
            if not prepare(_row_shapes(module, layer), strict=self.strict):
                how[layer.name] = self._eager(layer, "no working C++ compiler, see heterps doctor")
                continue
            lazy = self.lazy_tables and not any(lookup.table in self.read_whole for lookup in layer.lookups)
            module, groups = _group_lookups(module, layer, lazy=lazy)
            gradients = ", lazy gradients where the optimizer allows them" if lazy else ""
            how[layer.name] = (
                f"{_count(len(layer.lookups), 'look-up')} in {_count(groups, 'generated C++ call')}{gradients}"
            )
        return LoweredStage(stage=stage, run=module.forward, how=how)

    def _eager(self, layer: Layer, reason: str) -> str:
        if self.strict:
            raise LoweringError(
                f"layer {layer.name} has no generated kernel: {reason}",
                hint="place it on cpu (pin), or leave out strict",
            )
        return f"torch eager: {reason}"


def _row_shapes(module: fx.GraphModule, layer: Layer) -> list[tuple[int, torch.dtype]]:
    """Dim and dtype of the rows of each table, which is what a kernel is generated for."""
    tables = {lookup.table for lookup in layer.lookups}
    examples = [node.meta["example_value"] for node in module.graph.nodes if node.name in tables]
    return [(int(example.shape[-1]), example.dtype) for example in examples]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def inputs_read_whole(gm: fx.GraphModule, graph: LayerGraph) -> frozenset[str]:
    """Inputs that something other than a look-up reads: of tables, tied output weights or a penalty on all rows."""
    tables = {lookup.node: lookup.table for layer in graph for lookup in layer.lookups}
    return frozenset(
        value.name
        for node in gm.graph.nodes
        for value in node.all_input_nodes
        if value.op == "placeholder" and tables.get(node.name) != value.name
    )


def _group_lookups(module: fx.GraphModule, layer: Layer, *, lazy: bool) -> tuple[fx.GraphModule, int]:
    """A copy of the stage in which the look-ups of ``layer`` are grouped, and the number of calls they became."""
    writer = _GroupWriter(module, layer, lazy=lazy)
    for node in module.graph.nodes:
        writer.add(node)
    writer.graph.lint()
    return fx.GraphModule(writer.attributes, writer.graph, class_name=type(module).__name__), writer.num_groups


class _GroupWriter:
    """Copies a graph node by node, holding look-ups back until something reads one of them."""

    def __init__(self, module: fx.GraphModule, layer: Layer, *, lazy: bool) -> None:
        self.graph = fx.Graph()
        self.attributes = attributes(module, module.graph)
        self.num_groups = 0
        self._lookups = {lookup.node: lookup for lookup in layer.lookups}
        self._prefix = "lookups_" + re.sub(r"\W", "_", layer.name)
        self._lazy = lazy
        self._new: dict[fx.Node, fx.Node] = {}
        self._pending: dict[fx.Node, Lookup] = {}

    def add(self, node: fx.Node) -> None:
        reads_pending = any(value in self._pending for value in node.all_input_nodes)
        if reads_pending and (rows := _concatenated(node, self._pending)):
            self._emit_concatenated(node, rows)
            return
        if reads_pending or node.op == "output" or written(node):
            self._emit_pending()
        if node.name in self._lookups:
            self._pending[node] = self._lookups[node.name]
        else:
            self._new[node] = self.graph.node_copy(node, self._new.__getitem__)

    def _emit_pending(self) -> None:
        nodes = list(self._pending)
        if not nodes:
            return
        call = self._call(nodes, "separate")
        for index, node in enumerate(nodes):
            self._take(call, index, node)

    def _emit_concatenated(self, node: fx.Node, rows: list[fx.Node]) -> None:
        """The kernel writes its outputs side by side, which is what the ``cat`` or ``stack`` would have made."""
        call = self._call(rows, "concat")
        if op_name(node) in ("cat", "concat", "concatenate"):
            self._take(call, 0, node)
            return
        flat = self.graph.call_function(operator.getitem, (call, 0))
        shape = (len(rows), node.meta["example_value"].shape[-1])
        self._new[node] = self.graph.call_method("unflatten", (flat, 1, shape))
        self._keep(node)

    def _take(self, call: fx.Node, index: int, node: fx.Node) -> None:
        self._new[node] = self.graph.call_function(operator.getitem, (call, index))
        self._keep(node)

    def _keep(self, node: fx.Node) -> None:
        self._new[node].meta = dict(node.meta)

    def _call(self, nodes: list[fx.Node], layout: Layout) -> fx.Node:
        lookups = [self._pending.pop(node) for node in nodes]
        new = {old.name: node for old, node in self._new.items()}
        tables = list(dict.fromkeys(lookup.table for lookup in lookups))
        specs = tuple(_spec(lookup, tables.index(lookup.table)) for lookup in lookups)
        name = f"{self._prefix}_{self.num_groups}"
        self.attributes[name] = LookupGroup(GroupSpec(lookups=specs, lazy=self._lazy, layout=layout))
        self.num_groups += 1
        arguments = (
            [new[table] for table in tables],
            [new[lookup.ids] for lookup in lookups],
            [new[lookup.offsets] if lookup.offsets else None for lookup in lookups],
            [new[lookup.per_sample_weights] if lookup.per_sample_weights else None for lookup in lookups],
        )
        return self.graph.call_module(name, arguments)


def _concatenated(node: fx.Node, pending: Mapping[fx.Node, Lookup]) -> list[fx.Node]:
    """The look-ups that ``node``, and nothing else, lays side by side along dim 1; empty when it does anything else."""
    name = op_name(node)
    if node.op != "call_function" or name not in ("cat", "concat", "concatenate", "stack"):
        return []
    rows = argument(node, 0, "tensors")
    dim = argument(node, 1, "dim", node.kwargs.get("axis", 0))
    if not isinstance(rows, list | tuple) or not rows or any(row not in pending or len(row.users) > 1 for row in rows):
        return []
    shapes = [row.meta["example_value"].shape for row in rows]
    width = len(shapes[0])
    last = dim in ((1, -2) if name == "stack" else (1, -1))
    same = name != "stack" or len({shape[-1] for shape in shapes}) == 1
    return list(rows) if width == 2 and last and same and len(set(rows)) == len(rows) else []


def _spec(lookup: Lookup, table: int) -> LookupSpec:
    return LookupSpec(
        table=table,
        mode=lookup.mode,
        padding_idx=lookup.padding_idx,
        max_norm=lookup.max_norm,
        norm_type=lookup.norm_type,
        scale_grad_by_freq=lookup.scale_grad_by_freq,
        sparse=lookup.sparse,
        include_last_offset=lookup.include_last_offset,
        has_offsets=lookup.offsets is not None,
        has_weights=lookup.per_sample_weights is not None,
        name=readable(lookup.table),
    )


def readable(placeholder: str) -> str:
    """``l_self_modules_tables_modules_0_parameters_weight_`` -> ``tables.0.weight``."""
    name = re.sub(r"^l_(self|s|args_\d+|model)_", "", placeholder, flags=re.IGNORECASE).strip("_")
    return re.sub(r"(^|_)(modules|parameters|buffers)_", ".", name).strip(".")
