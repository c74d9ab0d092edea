"""A stage between the passes: what the plan wants (:class:`Cut`) and the FX module that does it (:class:`StageGraph`).

Values are known by the names of their FX nodes in the traced graph, across all stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from heterps_compile.graph import Layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """One stage as the plan wants it: a name, the layers it holds, its resource type and the device it runs on."""

    name: str
    layers: tuple[str, ...]
    resource: str
    device: torch.device


@dataclass(frozen=True, kw_only=True, slots=True)
class StageGraph:
    """A stage as an FX module: call it with ``inputs`` in order, it returns ``outputs`` as a tuple."""

    cut: Cut
    layers: tuple[Layer, ...]
    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
