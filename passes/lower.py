"""Turn a stage graph into a callable: grouped look-ups in generated C++ on CPU, torch eager for the rest.

Enters: one stage graph. Leaves: a callable with its inputs and outputs, and a line per layer saying how it was lowered.
The look-ups of a layer become one call as late as their first reader allows; nothing else moves. Where a kernel cannot
be had, the layer runs in eager and says why; ``strict`` refuses instead.
"""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from heterps_compile import optim
from heterps_compile.errors import HeterpsWarning, LoweringError
from heterps_compile.fx.columns import convert_once, exact_below
from heterps_compile.fx.joined import Rows, is_last_dim, joined_rows
from heterps_compile.fx.ops import mode_switch, written
from heterps_compile.fx.values import attributes, example, shape
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
            _warn_of_inexact_ids(module, stage.layers)
            if stage.cut.device.type == "cpu":
                module = convert_once(module)
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


def _warn_of_inexact_ids(module: fx.GraphModule, layers: Sequence[Layer]) -> None:
    """Say so where ids come from floating-point numbers that cannot name every row of their table."""
    nodes = {node.name: node for node in module.graph.nodes}
    for lookup in (lookup for layer in layers for lookup in layer.lookups):
        limit, rows = exact_below(nodes[lookup.ids]), shape(nodes[lookup.table])[0]
        if limit is not None and rows > limit:
            warnings.warn(
                f"the ids of {readable(lookup.table)}, a table of {rows:,} rows, travel as floating-point numbers that "
                f"are exact only up to {limit:,}: some rows are never found, others found for several ids.\n"
                "hint: pass ids as integers, or in a wider type",
                HeterpsWarning,
                stacklevel=2,
            )
            return


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
    """Copies a graph node by node, holding look-ups back until something reads one of them.

    Rows that are only read side by side are written so, once, and each of their readers becomes a view of them.
    """

    def __init__(self, module: fx.GraphModule, layer: Layer, *, lazy: bool) -> None:
        self.graph = fx.Graph()
        self.attributes = attributes(module, module.graph)
        self.num_groups = 0
        self._lookups = {lookup.node: lookup for lookup in layer.lookups}
        self._prefix = "lookups_" + re.sub(r"\W", "_", layer.name)
        self._lazy = lazy
        self._new: dict[fx.Node, fx.Node] = {}
        self._pending: dict[fx.Node, Lookup] = {}
        self._readers = joined_rows(module.graph, self._lookups.keys())
        self._joined = {row for rows in self._readers.values() for row in rows}
        self._buffers: dict[Rows, fx.Node] = {}

    def add(self, node: fx.Node) -> None:
        if node in self._readers:
            self._read_joined(node)
            return
        if node.op == "output" or written(node) or mode_switch(node):
            self._emit_all()
        elif any(value in self._pending for value in node.all_input_nodes):
            self._emit_separate()
        if node.name in self._lookups:
            self._pending[node] = self._lookups[node.name]
        else:
            self._new[node] = self.graph.node_copy(node, self._new.__getitem__)

    def _emit_all(self) -> None:
        """Nothing waits any longer: joined rows of which some are still to come are joined no more."""
        for rows in dict.fromkeys(self._readers.values()):
            if all(row in self._pending for row in rows):
                self._buffer(rows)
            elif any(row in self._pending for row in rows):
                self._readers = {reader: read for reader, read in self._readers.items() if read != rows}
                self._joined.difference_update(rows)
        self._emit_separate()

    def _emit_separate(self) -> None:
        nodes = [node for node in self._pending if node not in self._joined]
        if not nodes:
            return
        call = self._call(nodes, "separate")
        for index, node in enumerate(nodes):
            self._new[node] = self.graph.call_function(operator.getitem, (call, index))
            self._keep(node)

    def _read_joined(self, node: fx.Node) -> None:
        rows = self._readers[node]
        self._buffer(rows)
        self._new[node] = self._buffers[rows]
        if not is_last_dim(node):
            shape = (-1, len(rows), example(node).shape[-1])
            self._new[node] = self.graph.call_method("view", (self._buffers[rows], shape))
        self._keep(node)

    def _buffer(self, rows: Rows) -> None:
        """Look ``rows`` up, unless that is done: the kernel writes them side by side."""
        if rows not in self._buffers:
            self._buffers[rows] = self.graph.call_function(operator.getitem, (self._call(list(rows), "concat"), 0))

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
