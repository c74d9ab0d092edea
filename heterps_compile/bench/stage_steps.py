"""The stages of a plan as they are lowered, each with a training step of its own that can be timed.

Enters: a Dynamo graph with the parameters it trains, its layers and a plan for this machine. Leaves: one callable per
stage: its inputs brought to its device, forward, backward, gradients sent back, and its parameters updated. What passes
between the stages was recorded once, so that a stage runs without the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from heterps_compile.devices.move import move_in_place
from heterps_compile.fx.run import MakeOptimizer, Run, training_step
from heterps_compile.fx.values import placeholders
from heterps_compile.graph import LayerGraph
from heterps_compile.options import Options
from heterps_compile.passes.lower import Lower, LoweredStage, inputs_read_whole
from heterps_compile.passes.split import Split
from heterps_compile.plans import Plan
from heterps_compile.site import Site, static_inputs


def stage_steps(
    gm: fx.GraphModule, example_inputs: Sequence[Any], graph: LayerGraph, plan: Plan, make_optimizer: MakeOptimizer
) -> tuple[Callable[[], None], ...]:
    """The training step of each stage, with gradients of ones for what it hands on, under ``train_step``'s options.

    Parameters of ``example_inputs`` move to the device of their stage and are trained by the steps.
    """
    site = Site.of(gm, example_inputs, Options(plan=plan, lazy_tables=True))
    lower = Lower(lazy_tables=True, read_whole=inputs_read_whole(gm, graph))
    names = [node.name for node in placeholders(gm)]
    resident = {names[index] for index in static_inputs(gm, example_inputs)}
    values = dict(zip(names, example_inputs, strict=True))
    steps = []
    for stage in (lower(stage) for stage in Split(home=site.home)(gm, graph, site.cuts(plan))):
        for name in resident.intersection(stage.stage.inputs):
            if values[name].device != stage.stage.cut.device:
                move_in_place(values[name], stage.stage.cut.device)
        inputs = [values[name] for name in stage.stage.inputs]
        call = _pulling(stage, resident, site.home)
        trained: list[torch.Tensor] = [value for value in inputs if isinstance(value, torch.nn.Parameter)]
        steps.append(training_step(call, inputs, make_optimizer(trained) if trained else None))
        values.update(zip(stage.stage.outputs, map(_as_leaf, call(*inputs)), strict=True))
    return tuple(steps)


def _pulling(stage: LoweredStage, resident: set[str], home: torch.device) -> Run:
    """The stage on inputs wherever they are; what it makes goes to the caller's device, and on from there."""
    device = stage.stage.cut.device
    stays = [name in resident for name in stage.stage.inputs]

    def call(*inputs: Any) -> tuple[Any, ...]:
        pulled = (v if at_home else _to(v, device) for v, at_home in zip(inputs, stays, strict=True))
        return tuple(_to(value, home) for value in stage.run(*pulled))

    return call


def _to(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor) or value.device.type == device.type:
        return value
    return value.to(device)


def _as_leaf(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
