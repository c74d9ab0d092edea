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

from heterps_compile.errors import LoweringError
from heterps_compile.fx_ops import written
from heterps_compile.graph import Layer, Lookup
from heterps_compile.kernels.lookup import lookup_group
from heterps_compile.kernels.specs import GroupSpec, LookupSpec
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
        return lookup_group(self.spec, tables, ids, offsets, weights)

    def extra_repr(self) -> str:
        """Number of look-ups."""
        return f"{len(self.spec.lookups)} look-ups"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lower:
    """``lazy_tables`` lets gradients of ``sparse=False`` tables stay sparse (the optimizer then applies them exactly).
    """

    strict: bool = False
    lazy_tables: bool = False

    def __call__(self, stage: StageGraph) -> LoweredStage:
        """Raises :class:`LoweringError` under ``strict`` for a look-up that has no kernel."""
        how = dict.fromkeys((layer.name for layer in stage.layers), f"torch eager on {stage.cut.device.type}")
        module = stage.module
        for layer in stage.layers:
            if not layer.lookups:
                continue
            if stage.cut.device.type != "cpu":
                how[layer.name] = self._eager(layer, f"look-up kernels are for cpu, the stage is on {stage.cut.device}")
                continue
            module, groups = _group_lookups(module, layer, lazy=self.lazy_tables)
            how[layer.name] = f"{len(layer.lookups)} look-ups in {groups} generated C++ call{'s' * (groups > 1)}"
        return LoweredStage(stage=stage, run=module.forward, how=how)

    def _eager(self, layer: Layer, reason: str) -> str:
        if self.strict:
            raise LoweringError(
                f"layer {layer.name} has no generated kernel: {reason}",
                hint="place it on cpu (pin), or leave out strict",
            )
        return f"torch eager: {reason}"


def _group_lookups(module: fx.GraphModule, layer: Layer, *, lazy: bool) -> tuple[fx.GraphModule, int]:
    """A copy of the stage in which the look-ups of ``layer`` are grouped, and the number of calls they became."""
    lookups = {lookup.node: lookup for lookup in layer.lookups}
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    attributes: dict[str, Any] = {name: _attribute(module, name) for name in _attribute_names(module)}
    pending: list[tuple[fx.Node, Lookup]] = []
    groups = 0

    def flush() -> None:
        nonlocal groups
        if pending:
            name = f"lookups_{layer.name}_{groups}".replace(".", "_")
            name = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
            attributes[name] = _emit(graph, env, name, pending, lazy=lazy)
            pending.clear()
            groups += 1

    for node in module.graph.nodes:
        if node.name in lookups:
            if any(value in {p for p, _ in pending} for value in node.all_input_nodes):
                flush()
            pending.append((node, lookups[node.name]))
            continue
        reads_pending = any(value in {p for p, _ in pending} for value in node.all_input_nodes)
        if reads_pending or node.op == "output" or written(node):
            flush()
        env[node] = graph.node_copy(node, lambda n: env[n])
    graph.lint()
    return fx.GraphModule(attributes, graph, class_name=type(module).__name__), groups


def _emit(
    graph: fx.Graph,
    env: dict[fx.Node, fx.Node],
    name: str,
    pending: list[tuple[fx.Node, Lookup]],
    *,
    lazy: bool,
) -> LookupGroup:
    by_name = {old.name: new for old, new in env.items()}
    tables = list(dict.fromkeys(lookup.table for _, lookup in pending))
    specs = tuple(_spec(lookup, tables.index(lookup.table)) for _, lookup in pending)
    call = graph.call_module(
        name,
        (
            [by_name[table] for table in tables],
            [by_name[lookup.ids] for _, lookup in pending],
            [by_name[lookup.offsets] if lookup.offsets else None for _, lookup in pending],
            [by_name[lookup.per_sample_weights] if lookup.per_sample_weights else None for _, lookup in pending],
        ),
    )
    for index, (node, _) in enumerate(pending):
        env[node] = graph.call_function(operator.getitem, (call, index))
        env[node].meta = dict(node.meta)
        env[node].name = node.name
    return LookupGroup(GroupSpec(lookups=specs, lazy=lazy))


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


def _attribute_names(module: fx.GraphModule) -> set[str]:
    return {str(node.target) for node in module.graph.nodes if node.op in ("get_attr", "call_module")}


def _attribute(module: fx.GraphModule, name: str) -> Any:
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value
