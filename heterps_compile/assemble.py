"""Join lowered stages into the callable Dynamo keeps: the runtime, parameter placement, verification, the report.

Enters: everything the passes made for one graph. Leaves: a :class:`CompiledGraph`. One stage on the caller's device
runs as a plain call; several run through the local pipeline, split into microbatches only where that is proved safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from heterps_compile.compiled import CompiledGraph, LayerReport, Report, Run
from heterps_compile.fx.ops import is_random
from heterps_compile.fx.values import placeholders
from heterps_compile.graph import LayerGraph
from heterps_compile.options import Options
from heterps_compile.passes.batch_axis import BatchAxis
from heterps_compile.passes.lower import LoweredStage
from heterps_compile.passes.split import returned_values
from heterps_compile.placing import Place, placer
from heterps_compile.plans import Plan
from heterps_compile.row_split import RowSplit
from heterps_compile.runtime.local import LocalPipeline, StageProgram
from heterps_compile.site import Site, static_inputs
from heterps_compile.verify import compare_with_eager


def assemble(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    graph: LayerGraph,
    plan: Plan,
    lowered: Sequence[LoweredStage],
    site: Site,
    options: Options,
    read_whole: frozenset[str],
) -> CompiledGraph:
    """Build the callable and its report; ``read_whole`` names inputs that are read outside look-ups."""
    rows, microbatches = _row_split(gm, example_inputs, lowered, options)
    programs = tuple(
        StageProgram(
            name=stage.stage.cut.name,
            resource=stage.stage.cut.resource,
            device=stage.stage.cut.device,
            run=stage.run,
            inputs=stage.stage.inputs,
            outputs=stage.stage.outputs,
            uses_rng=any(is_random(node, stage.stage.module) for node in stage.stage.module.graph.nodes),
        )
        for stage in lowered
    )
    inputs = tuple(node.name for node in placeholders(gm))
    static = static_inputs(gm, example_inputs)
    pipeline = LocalPipeline(
        stages=programs,
        inputs=inputs,
        outputs=_outputs(gm),
        home=site.home,
        resident=tuple(inputs[index] for index in static),
        row_split=rows,
        num_microbatches=options.microbatches,
    )
    matrices = [index for index in static if isinstance(example_inputs[index], torch.Tensor)]
    current = [index for index in matrices if inputs[index] in read_whole and example_inputs[index].dim() == 2]
    place = placer(_homes(inputs, static, lowered, site), current)
    return CompiledGraph(
        report=_report(graph, plan, lowered, microbatches),
        run=pipeline,
        prepare=place,
        first_call=_verified(pipeline, place, gm, inputs) if options.verify == "first_call" else None,
        close=pipeline.close,
        static_inputs=static,
    )


def uncompiled(gm: fx.GraphModule, example_inputs: Sequence[Any], reason: str) -> CompiledGraph:
    """The graph as Dynamo made it, run in eager, with the reason in its report."""
    report = Report(
        plan=Plan(placement={}, stages=(), provision={}),
        graph=LayerGraph(layers=()),
        layers=(),
        microbatches="1",
        notes=(f"eager: {reason}",),
    )
    return CompiledGraph(report=report, run=gm.forward, static_inputs=static_inputs(gm, example_inputs))


def _outputs(gm: fx.GraphModule) -> tuple[Any, ...]:
    """The flat outputs: names of values, or constants wrapped as one-tuples."""
    return tuple(value.name if isinstance(value, fx.Node) else (value,) for value in returned_values(gm))


def _row_split(
    gm: fx.GraphModule, example_inputs: Sequence[Any], lowered: Sequence[LoweredStage], options: Options
) -> tuple[RowSplit | None, str]:
    """How a batch is cut into microbatches, and a sentence on it."""
    if options.microbatches == 1:
        return None, "1 (none asked for)"
    if len(lowered) < 2:
        return None, "1: one stage has nothing to overlap with"
    verdict = BatchAxis()(gm, example_inputs)
    if verdict.row_split is None:
        return None, f"1: {verdict.reason}"
    return verdict.row_split, str(options.microbatches)


def _homes(
    inputs: Sequence[str], static: Sequence[int], lowered: Sequence[LoweredStage], site: Site
) -> list[tuple[int, torch.device]]:
    """The parameters and buffers that stages away from the caller's device read, with their devices."""
    wanted = {name: stage.stage.cut.device for stage in lowered for name in stage.stage.inputs}
    pairs = ((index, wanted.get(inputs[index], site.home)) for index in static)
    return [(index, device) for index, device in pairs if device.type != site.home.type]


def _verified(pipeline: LocalPipeline, place: Place | None, gm: fx.GraphModule, inputs: Sequence[str]) -> Run:
    """The first call: compare with the graph as Dynamo made it, then run."""

    def placed(*args: Any) -> tuple[Any, ...]:
        if place is not None:
            place(args)
        return pipeline(*args)

    def first(*args: Any) -> tuple[Any, ...]:
        compare_with_eager(placed, gm.forward, args, inputs)
        return pipeline(*args)

    return first


def _report(graph: LayerGraph, plan: Plan, lowered: Sequence[LoweredStage], microbatches: str) -> Report:
    layers = tuple(
        LayerReport(
            layer=layer.name,
            stage=stage.stage.cut.name,
            resource=stage.stage.cut.resource,
            device=str(stage.stage.cut.device),
            lowering=stage.how[layer.name],
        )
        for stage in lowered
        for layer in stage.stage.layers
    )
    return Report(plan=plan, graph=graph, layers=layers, microbatches=microbatches)
