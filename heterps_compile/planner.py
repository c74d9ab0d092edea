"""``plan(model, example_inputs, cluster=...)``: plan a model without running it, for a fleet that need not be here.

Enters: a model and a batch of example inputs. Leaves: a plan to print, save and hand to the backend. A model that
Dynamo cuts into several graphs is planned as one chain of all their layers, with a warning. Nothing of the model is
executed, except that layers are measured on synthetic tensors where ``profile`` says so.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from heterps_compile.calibrate import calibrate
from heterps_compile.capture import Captured, capture
from heterps_compile.cluster import Cluster
from heterps_compile.costs import CostTable
from heterps_compile.devices import sim
from heterps_compile.errors import DeviceError, HeterpsWarning
from heterps_compile.graph import Edge, LayerGraph
from heterps_compile.options import Options, ProfileMode
from heterps_compile.passes.lower import Lower
from heterps_compile.passes.profile import Profile
from heterps_compile.passes.trace import Trace
from heterps_compile.planning import Mode, Request, plan_costs
from heterps_compile.plans import Plan


def plan(
    model: nn.Module,
    example_inputs: Sequence[Any],
    *,
    cluster: Cluster | str | Path | Mapping[str, Any] | None = None,
    min_throughput: float | None = None,
    policy: str | None = None,
    seed: int = 0,
    pin: Mapping[str, str] | None = None,
    replicas: Mapping[str, int] | None = None,
    profile: ProfileMode = "auto",
    optimizer: str = "adam",
    mode: Mode = "full",
    microbatches: int = 8,
    samples: float | None = None,
    data_rate: float | None = None,
    time_limit_s: float = 60.0,
) -> Plan:
    """Plan ``model(*example_inputs)`` for ``cluster`` (:func:`this_machine` by default).

    ``min_throughput`` is in samples per second. Where it is out of reach the plan has ``feasible=False`` and holds the
    best that can be reached, with what binds. ``optimizer`` (of ``OPTIMIZER_SLOTS``) says how much memory training
    takes, ``samples`` how many samples it sees in all, ``data_rate`` how many arrive per second; see :class:`Request`
    for the rest. Raises
    :class:`OptionError`, :class:`FileFormatError`, and :class:`InfeasibleError` when nothing fits the limits at any
    throughput.
    """
    given = {"cluster": cluster, "min_throughput": min_throughput, "policy": policy, "seed": seed, "profile": profile}
    options = Options.parse({**given, "pin": pin or {}, "replicas": replicas or {}})
    fleet = options.cluster or this_machine()
    costs = model_costs(model, example_inputs, fleet, options.profile).trained_with(optimizer)
    request = Request(
        min_throughput=options.min_throughput,
        policy=options.policy,
        seed=options.seed,
        pin=options.pin,
        replicas=options.replicas,
        mode=mode,
        microbatches=microbatches,
        samples=samples,
        data_rate=data_rate,
        time_limit_s=time_limit_s,
    )
    return plan_costs(costs, fleet, request)


def this_machine() -> Cluster:
    """The resource types here, CPU cores at the rates a short calibration measured and the cache remembers."""
    return calibrate().applied(Cluster.local())


def model_costs(
    model: nn.Module, example_inputs: Sequence[Any], cluster: Cluster, profile: ProfileMode = "auto"
) -> CostTable:
    """What each layer costs on each type of ``cluster``, trained under ``train_step``: gradients of tables hold the
    rows that were looked up. ``auto`` estimates a model on torch's ``meta`` device.
    """
    if profile == "auto" and any(parameter.is_meta for parameter in model.parameters()):
        profile = "estimate"
    if any(resource.device == "sim" for resource in cluster):
        with contextlib.suppress(DeviceError):  # only running the plan here needs the device
            sim.install()  # before measuring runs this process's first backward pass
    measure = Profile(mode=profile, runs_as=lambda stage: Lower(lazy_tables=True)(stage).run)
    graphs = _graphs(model, example_inputs)
    return _chain([measure(c.gm, Trace()(c.gm, c.example_inputs).with_lazy_tables(), cluster) for c in graphs])


def model_graph(model: nn.Module, example_inputs: Sequence[Any]) -> LayerGraph:
    """The layers of the largest graph Dynamo makes of the model."""
    graphs = [Trace()(captured.gm, captured.example_inputs) for captured in _graphs(model, example_inputs)]
    return max(graphs, key=len)


def _graphs(model: nn.Module, example_inputs: Sequence[Any]) -> tuple[Captured, ...]:
    """The graphs that compute something."""
    found = tuple(c for c in capture(model, example_inputs) if any(n.op.startswith("call") for n in c.gm.graph.nodes))
    if len(found) > 1:
        breaks = [captured.ended_by for captured in found if captured.ended_by]
        warnings.warn(
            f"{type(model).__name__} gives {len(found)} graphs, planned as one chain; {breaks[0] if breaks else ''}",
            HeterpsWarning,
            stacklevel=3,
        )
    return found


def _chain(tables: Sequence[CostTable]) -> CostTable:
    """One table of all layers, in order; a name that was there before gets a number."""
    first = tables[0]
    for index, table in enumerate(tables[1:], start=2):
        taken = set(first.names())
        names = {name: f"{name}#{index}" if name in taken else name for name in table.names()}
        first = replace(
            first,
            layers=first.layers + tuple(replace(layer, name=names[layer.name]) for layer in table.layers),
            costs={**first.costs, **{names[name]: row for name, row in table.costs.items()}},
            edges=first.edges
            + tuple(
                Edge(source=names[e.source], target=names[e.target], bytes_per_sample=e.bytes_per_sample)
                for e in table.edges
            ),
            bound=first.bound + tuple(tuple(names[name] for name in group) for group in table.bound),
        )
    return first
