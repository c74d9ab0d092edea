"""Where a graph runs: the device its caller lives on, the cluster planned for, and which of its types are here.

Enters: the graph's inputs and the options. Leaves: a frozen value. A resource type whose device this machine lacks is
rehearsed on the caller's device with one warning, or refused under ``strict``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from heterps_compile.cluster import Cluster, ResourceType
from heterps_compile.errors import DeviceError, HeterpsWarning
from heterps_compile.fx.ops import written
from heterps_compile.fx.values import is_parameter, placeholders, storages
from heterps_compile.graph import LayerGraph
from heterps_compile.options import Options
from heterps_compile.plans import Plan
from heterps_compile.stage_graph import Cut


def static_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[int, ...]:
    """Positions of the parameters and buffers among the flat inputs of a Dynamo graph."""
    pairs = enumerate(zip(placeholders(gm), example_inputs, strict=True))
    return tuple(index for index, (node, value) in pairs if is_parameter(node, value))


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """``home`` is the device of the caller's tensors; ``devices`` gives each resource type a device of this machine."""

    home: torch.device
    cluster: Cluster
    devices: Mapping[str, torch.device]
    absent: frozenset[str] = frozenset()
    strict: bool = False

    @classmethod
    def of(cls, gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Site:
        """Read the home device off the inputs and find a device for each type of the cluster."""
        home = _home(gm, example_inputs)
        cluster = _cluster(options, home)
        present = {resource.name: _device(resource.device, home) for resource in cluster}
        return cls(
            home=home,
            cluster=cluster,
            devices={name: home if device is None else device for name, device in present.items()},
            absent=frozenset(name for name, device in present.items() if device is None),
            strict=options.strict,
        )

    @property
    def home_type(self) -> str:
        """The resource type that stands for the caller's device: the first one that runs there."""
        return next((name for name, device in self.devices.items() if device.type == self.home.type), "")

    def cuts(self, plan: Plan) -> tuple[Cut, ...]:
        """The stages of a plan with the devices they run on here. Raises :class:`DeviceError` under ``strict``."""
        cuts = []
        for index, stage in enumerate(plan.stages):
            cut = Cut(
                name=f"stage{index}", layers=stage.layers, resource=stage.resource, device=self.devices[stage.resource]
            )
            if stage.resource in self.absent:
                self._say_absent(cut)
            cuts.append(cut)
        return tuple(cuts)

    def _say_absent(self, cut: Cut) -> None:
        wanted = self.cluster[cut.resource].device
        message = (
            f"{cut.name} ({', '.join(cut.layers[:3])}{', ...' if len(cut.layers) > 3 else ''}) is planned for "
            f"{cut.resource!r}, but this machine has no {wanted!r} device; it runs on {self.home.type!r} instead"
        )
        if self.strict:
            raise DeviceError(message, hint="run the plan where the device is, or leave out strict")
        warnings.warn(message + ", at that device's speed", HeterpsWarning, stacklevel=2)

    def pinned(self, graph: LayerGraph, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[str, str]:
        """Layers that have no choice of type, in a cluster of several.

        Their parameters were moved away from home by an earlier plan of the same model; or they write into an input of
        the caller's, which a copy on another device would hide.
        """
        if len(self.devices) < 2:
            return {}
        names = [node.name for node in placeholders(gm)]
        static = {names[index] for index in static_inputs(gm, example_inputs)}
        moved = {
            names[index]: example_inputs[index].device.type
            for index in static_inputs(gm, example_inputs)
            if example_inputs[index].device.type != self.home.type
        }
        own = {key for node in placeholders(gm) if node.name not in static for key in storages(node)}
        nodes = {node.name: node for node in gm.graph.nodes}
        by_device = {device.type: name for name, device in reversed(list(self.devices.items()))}
        pins = {}
        for layer in graph:
            devices = {moved[name] for name in layer.parameters if name in moved} & set(by_device)
            if devices:
                pins[layer.name] = by_device[devices.pop()]
            elif any(own & set(storages(target)) for name in layer.nodes for target in written(nodes[name])):
                pins[layer.name] = self.home_type
        return pins


def _home(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> torch.device:
    static = set(static_inputs(gm, example_inputs))
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    own = [v for i, v in enumerate(example_inputs) if isinstance(v, torch.Tensor) and i not in static]
    return next((value.device for value in (*own, *tensors)), torch.device("cpu"))


def _cluster(options: Options, home: torch.device) -> Cluster:
    if options.cluster is not None:
        return options.cluster
    if options.plan is not None and options.plan.resources:
        return Cluster(resources=options.plan.resources)
    local = Cluster.local(simulated=int(_names_sim(options)))
    if options.plan is not None or options.pin:
        return local
    # Nobody asked for a placement: the model stays where its caller put it.
    here = tuple(resource for resource in local if resource.device == home.type)
    return Cluster(resources=here or (_unpriced(home),))


def _names_sim(options: Options) -> bool:
    types = set(options.plan.placement.values()) if options.plan is not None else set(options.pin.values())
    return "sim" in types


def _unpriced(home: torch.device) -> ResourceType:
    """A device of no known type, with made-up rates: everything runs there, so nothing is decided by them."""
    return ResourceType(
        name=home.type, device=home.type, price_usd_per_h=0.0, limit=1, flops_per_s=1e10, memory_bytes_per_s=1e10
    )


def _device(kind: str, home: torch.device) -> torch.device | None:
    """A device of this kind on this machine, or None."""
    if kind == home.type:
        return home
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "sim":
        from heterps_compile.devices import sim

        sim.install()
        return torch.device("sim", 0)
    module = getattr(torch, kind, None)
    available = getattr(module, "is_available", None)
    return torch.device(kind, 0) if available is not None and available() else None
