"""Put a saved plan onto a graph that differs from the one it was made for by a few layers.

A model gives several graphs: train and eval differ by dropout, a graph break leaves small pieces. Enters: the plan, the
graph, its cluster. Leaves: a plan whose stages hold exactly the layers of this graph. Layers the plan does not know run
where the layer before them runs. It refuses a plan that knows none of a graph with parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from heterps_compile.cluster import Cluster
from heterps_compile.errors import PlanError
from heterps_compile.graph import LayerGraph
from heterps_compile.passes.fuse import Fuse
from heterps_compile.plans import Plan, units_of


def adopt(plan: Plan, graph: LayerGraph, cluster: Cluster, *, default: str) -> Plan:
    """The plan for ``graph``; ``default`` is the type of leading layers the plan does not know. Raises PlanError."""
    if tuple(name for stage in plan.stages for name in stage.layers) == graph.names():
        plan.validate(graph, cluster)
        return plan
    _demand_consistent(plan)
    known = [name for name in graph.names() if name in plan.placement]
    if not known and any(layer.parameters for layer in graph):
        raise PlanError(
            f"the plan knows none of the layers of this graph ({', '.join(graph.names()[:4])}, ...)",
            hint=f"it was made for a model with layers {', '.join(list(plan.placement)[:4])}, ...: plan this one again",
        )
    placement = _spread(plan.placement, graph, default)
    replicas = {stage.resource: stage.replicas for stage in plan.stages}
    fused = Fuse()(placement, graph)
    stages = tuple(replace(stage, replicas=replicas.get(stage.resource, 1)) for stage in fused)
    unknown = tuple(name for name in graph.names() if name not in plan.placement)
    note = f"adopted from a plan that does not list {', '.join(unknown[:4]) or 'the same order of layers'}"
    adopted = replace(
        plan, placement=placement, stages=stages, provision=units_of(stages), feasible=False, notes=(*plan.notes, note)
    )
    adopted.validate(graph, cluster)
    return adopted


def _demand_consistent(plan: Plan) -> None:
    staged = [(name, stage.resource) for stage in plan.stages for name in stage.layers]
    for name, resource in staged:
        if plan.placement.get(name) != resource:
            raise PlanError(
                f"the plan stages layer {name!r} on {resource!r} but places it on {plan.placement.get(name)!r}",
                hint="edit placement and stages together, or leave placement out",
            )
    if len(staged) != len(plan.placement):
        raise PlanError(
            f"the plan places {len(plan.placement)} layers but stages {len(staged)}",
            hint="each layer is in exactly one stage",
        )


def _spread(placement: Mapping[str, str], graph: LayerGraph, default: str) -> dict[str, str]:
    """A type for every layer: the plan's, else that of a layer it shares a parameter with, else the previous one's."""
    bound = {name: group for group in graph.bound for name in group}
    spread: dict[str, str] = {}
    previous = default
    for name in graph.names():
        kin = (placement[other] for other in bound.get(name, ()) if other in placement)
        previous = spread[name] = placement.get(name) or next(kin, None) or previous
    return spread
