"""The plan: which layer runs where, in which stages, on how many units, and what that is predicted to cost.

Enters: the results of place, fuse and provision. Leaves: a frozen value that prints (``explain``), loads, and is
checked by one validator that planner and executor share. Refused: a plan whose stages, placement and provision
contradict each other, its graph or its cluster (:class:`PlanError`), and files that cannot be read
(:class:`FileFormatError`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from heterps_compile.cluster import Cluster, ResourceType
from heterps_compile.errors import PlanError
from heterps_compile.fields import Record, parse, read_file
from heterps_compile.plan_facts import Alternative, Placement, PlanFacts, Reason, Stage
from heterps_compile.report.plan_text import explain

__all__ = ["Alternative", "Placement", "Plan", "PlanFacts", "Reason", "Stage", "units_of", "validate"]


@dataclass(frozen=True, kw_only=True)
class Plan(PlanFacts):
    """The facts of a plan, with what one does with them: print, save, load, check."""

    def validate(self, graph: Graph, cluster: Cluster) -> None:
        """Check that the plan fits ``graph`` (a layer graph or a cost table) and ``cluster``.

        Raises :class:`PlanError` naming the layer, stage or type that does not fit.
        """
        validate(self, graph, cluster)

    def explain(self) -> str:
        """What to rent and why, for a person, in fewer than 60 lines."""
        return explain(self)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; ``from_dict`` gives an equal plan back."""
        return {
            "version": 1,
            "policy": self.policy,
            "seed": self.seed,
            "feasible": self.feasible,
            "mode": self.mode,
            "microbatches": self.microbatches,
            "samples": self.samples,
            "data_rate": self.data_rate,
            "without": list(self.without),
            "batch_size": self.batch_size,
            "min_throughput": self.min_throughput,
            "placement": dict(self.placement),
            "stages": [_entries(stage) for stage in self.stages],
            "provision": dict(self.provision),
            "throughput_samples_per_s": self.throughput_samples_per_s,
            "price_usd_per_h": self.price_usd_per_h,
            "cost_usd_per_million_samples": self.cost_usd_per_million_samples,
            "optimum_usd_per_million_samples": self.optimum_usd_per_million_samples,
            "optimum_proven": self.optimum_proven,
            "gap_to_optimum": self.gap_to_optimum,
            "planning_s": self.planning_s,
            "alternatives": {
                name: {k: v for k, v in _entries(other).items() if v is not None}
                for name, other in self.alternatives.items()
            },
            "binds": list(self.binds),
            "notes": list(self.notes),
            "sources": dict(self.sources),
            "versions": dict(self.versions),
            "resources": [resource.to_dict() for resource in self.resources],
            "reasons": [_entries(reason) for reason in self.reasons],
        }

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read ``plan.json``. Raises :class:`FileFormatError` with path, line, field and allowed values."""
        return cls.from_record(read_file(path))

    @classmethod
    def from_json(cls, text: str, *, origin: str = "") -> Plan:
        """Read JSON text."""
        return cls.from_record(Record.of(parse(text, origin), origin))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, origin: str = "") -> Plan:
        """Read a mapping of the same form as the file."""
        return cls.from_record(Record.of(values, origin))

    @classmethod
    def from_record(cls, record: Record) -> Plan:
        """Read a parsed file; only placement and stages must be there, so that a plan can be written by hand."""
        record.only("version", *cls.__dataclass_fields__)
        record.version()
        stages = tuple(_read_stage(entry) for entry in record.records("stages", required=True))
        return cls(
            placement=_read_placement(record, stages),
            stages=stages,
            provision=_read_provision(record, stages),
            policy=record.text("policy", "given"),
            seed=record.integer("seed", 0),
            feasible=record.boolean("feasible", True),
            min_throughput=record.number("min_throughput") if record.has("min_throughput") else None,
            mode=record.text("mode", "paper", choices=("paper", "full")),
            microbatches=record.integer("microbatches", 1, low=1),
            samples=record.number("samples") if record.has("samples") else None,
            data_rate=record.number("data_rate") if record.has("data_rate") else None,
            without=record.texts("without"),
            batch_size=record.integer("batch_size", 1, low=1),
            throughput_samples_per_s=record.number("throughput_samples_per_s", 0.0),
            price_usd_per_h=record.number("price_usd_per_h", 0.0),
            cost_usd_per_million_samples=record.number("cost_usd_per_million_samples", 0.0),
            optimum_usd_per_million_samples=record.number("optimum_usd_per_million_samples", 0.0),
            optimum_proven=record.boolean("optimum_proven", False),
            gap_to_optimum=record.number("gap_to_optimum", 0.0),
            alternatives=_read_alternatives(record.record("alternatives")),
            resources=tuple(ResourceType.from_record(entry) for entry in record.records("resources")),
            reasons=tuple(_read_reason(entry) for entry in record.records("reasons")),
            binds=record.texts("binds"),
            notes=record.texts("notes"),
            sources=_read_texts(record.record("sources")),
            versions=_read_texts(record.record("versions")),
            planning_s=record.number("planning_s", 0.0),
        )


class Graph(Protocol):
    """What the validator needs of a layer graph or a cost table."""

    @property
    def bound(self) -> tuple[tuple[str, ...], ...]:
        """Groups of layers that must share a resource type."""

    def names(self) -> tuple[str, ...]:
        """Layer names in execution order."""


def validate(plan: Plan, graph: Graph, cluster: Cluster) -> None:
    """The one validator of planner and executor. Raises :class:`PlanError` for the first thing that does not fit."""
    _check_layers(plan, graph)
    for stage in plan.stages:
        if stage.resource not in cluster:
            raise PlanError(
                f"stage {stage.layers[0]}.. is on {stage.resource!r}, which the cluster lacks "
                f"(it has {', '.join(cluster.names())})"
            )
    for first, second in zip(plan.stages, plan.stages[1:], strict=False):
        if first.resource == second.resource:
            raise PlanError(
                f"stages {first.layers[0]}.. and {second.layers[0]}.. are neighbours on {first.resource}",
                hint="a stage is a maximal run of layers on one type: join them",
            )
    _check_units(plan, cluster)


def _check_layers(plan: Plan, graph: Graph) -> None:
    listed = tuple(name for stage in plan.stages for name in stage.layers)
    names = graph.names()
    if set(listed) != set(names) or len(listed) != len(names):
        missing = [name for name in names if name not in listed][:3]
        unknown = [name for name in listed if name not in names][:3]
        twice = [name for name in listed if listed.count(name) > 1][:3]
        raise PlanError(
            f"the stages do not hold the layers of the graph (missing: {missing}, unknown: {unknown}, twice: {twice})",
            hint="plan again: the plan was made for another model or another version of it",
        )
    if listed != names:
        index = next(i for i, pair in enumerate(zip(listed, names, strict=True)) if pair[0] != pair[1])
        raise PlanError(
            f"layer {listed[index]!r} stands where the graph runs {names[index]!r}: stages are out of order"
        )
    for stage in plan.stages:
        for name in stage.layers:
            if plan.placement.get(name) != stage.resource:
                raise PlanError(
                    f"layer {name!r} is placed on {plan.placement.get(name)!r} but staged on {stage.resource!r}"
                )
    for group in graph.bound:
        used = sorted({plan.placement[name] for name in group})
        if len(used) > 1:
            raise PlanError(f"layers {', '.join(group[:4])} share a parameter but are placed on {', '.join(used)}")


def _check_units(plan: Plan, cluster: Cluster) -> None:
    for stage in plan.stages:
        if stage.replicas < 1:
            raise PlanError(
                f"stage {stage.layers[0]}.. on {stage.resource} has {stage.replicas} replicas, not 1 or more"
            )
    units = units_of(plan.stages)
    provision = {name: count for name, count in plan.provision.items() if count}
    if units != provision:
        raise PlanError(f"provision {provision} is not the sum of the stages' replicas {units}")
    if plan.feasible:
        for name, count in units.items():
            if count > cluster[name].limit:
                raise PlanError(f"the plan rents {count} units of {name}, over its limit {cluster[name].limit}")


def units_of(stages: tuple[Stage, ...]) -> dict[str, int]:
    """Units of each type, summed over the stages."""
    units: dict[str, int] = {}
    for stage in stages:
        units[stage.resource] = units.get(stage.resource, 0) + stage.replicas
    return units


def _entries(value: Any) -> dict[str, Any]:
    pairs = ((name, getattr(value, name)) for name in value.__dataclass_fields__)
    return {
        name: list(item) if isinstance(item, tuple) else dict(item) if isinstance(item, Mapping) else item
        for name, item in pairs
    }


def _read_stage(record: Record) -> Stage:
    record.only(*Stage.__dataclass_fields__)
    return Stage(
        resource=record.text("resource"),
        layers=record.texts("layers", required=True),
        replicas=record.integer("replicas", 1, low=1),
        throughput_samples_per_s=record.number("throughput_samples_per_s", 0.0),
        memory_bytes=record.number("memory_bytes", 0.0),
        bound_by=record.text("bound_by", ""),
    )


def _read_placement(record: Record, stages: tuple[Stage, ...]) -> dict[str, str]:
    staged = {name: stage.resource for stage in stages for name in stage.layers}
    if not record.has("placement"):
        return staged
    given = record.record("placement")
    for name in given.values:
        if staged.get(name) != given.text(name):
            given.reject(name, f"{staged[name]}, as in its stage" if name in staged else "a layer of a stage")
    for name in staged:
        if not given.has(name):
            given.reject(name, f"{staged[name]}, as in its stage")
    return _read_texts(given)


def _read_provision(record: Record, stages: tuple[Stage, ...]) -> dict[str, int]:
    rented = units_of(stages)
    if not record.has("provision"):
        return rented
    units = record.record("provision")
    given = {name: units.integer(name) for name in units.values}
    for name in [*given, *rented]:
        if given.get(name, 0) != rented.get(name, 0):
            units.reject(name, f"{rented.get(name, 0)}, the replicas of its stages")
    return given


def _read_texts(record: Record) -> dict[str, str]:
    return {name: record.text(name) for name in record.values}


def _read_alternatives(record: Record) -> dict[str, Alternative]:
    return {name: _read_alternative(record.record(name)) for name in record.values}


def _read_alternative(record: Record) -> Alternative:
    record.only(*Alternative.__dataclass_fields__)
    numbers = [name for name in Alternative.__dataclass_fields__ if name != "feasible" and record.has(name)]
    return Alternative(feasible=record.boolean("feasible"), **{name: record.number(name) for name in numbers})


def _read_reason(record: Record) -> Reason:
    record.only(*Reason.__dataclass_fields__)
    costs = record.record("elsewhere")
    return Reason(
        layer=record.text("layer"),
        source=record.text("source", "given"),
        pinned=record.boolean("pinned", False),
        bound=record.boolean("bound", False),
        transfer_bound=record.boolean("transfer_bound", False),
        elsewhere={name: costs.number(name) for name in costs.values},
    )
