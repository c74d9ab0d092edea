"""The cost table: what each layer costs on one unit of each resource type, for one batch.

Enters: measurements, estimates or a hand-written ``costs.json`` (design section 9). Leaves: an immutable table that is
all the planner needs; no model, no device. A layer without an entry for a type cannot run on that type. Refused: files
with missing, unknown or out-of-range fields, costs of layers or types that are not listed, layers that run nowhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from heterps_compile.cluster import Cluster, ResourceType, unique_names
from heterps_compile.errors import FileFormatError, OptionError
from heterps_compile.fields import Record, describe, parse, read_file
from heterps_compile.graph import Edge

CostSource = Literal["given", "measured", "estimated"]
SOURCES: tuple[CostSource, ...] = ("given", "measured", "estimated")
OPTIMIZER_SLOTS: Mapping[str, int] = {
    "sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "adam": 2, "adamw": 2,
}  # fmt: skip
"""Values that an optimizer keeps per parameter (torch.optim; SGD with momentum is called momentum)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCost:
    """Time of one layer for a batch on ONE unit, forward and backward together.

    ``compute_parallel`` and ``communication_parallel`` are the parts (Amdahl's alpha and beta) that more units speed
    up.
    """

    compute_s: float
    communication_s: float = 0.0
    compute_parallel: float = 1.0
    communication_parallel: float = 1.0
    source: CostSource = "given"


@dataclass(frozen=True, kw_only=True, slots=True)
class CostLayer:
    """What the planner knows of a layer beside its times; amounts per sample unless named otherwise.

    ``state_bytes`` is what training keeps beside the parameters: gradients and optimizer state.
    ``touched_bytes_per_sample`` counts table rows read by one sample.
    """

    name: str
    kind: str = "other"
    parameter_bytes: float = 0.0
    state_bytes: float = 0.0
    touched_bytes_per_sample: float = 0.0
    input_bytes_per_sample: float = 0.0
    output_bytes_per_sample: float = 0.0
    intensity_flop_per_byte: float = 0.0

    @property
    def is_table(self) -> bool:
        """Whether its parameters are rows that are looked up: then replicas share them, row by row."""
        return self.kind == "embedding"


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Layers in execution order, and their cost on each resource type for a batch of ``batch_size`` samples.

    ``bound`` lists groups of layers that share a table or parameter and so must sit on one type. Raises
    :class:`FileFormatError` for costs of unknown layers or types and for layers that run nowhere.
    """

    batch_size: int
    resources: tuple[ResourceType, ...]
    layers: tuple[CostLayer, ...]
    costs: Mapping[str, Mapping[str, LayerCost]] = field(hash=False)
    edges: tuple[Edge, ...] = ()
    bound: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        names, types = self.names(), self.resource_names()
        if len(set(names)) != len(names):
            raise FileFormatError("layers: a name is there twice (allowed: each name once)")
        _refuse_unknown("costs", self.costs, names, "layer")
        for name in names:
            row = self.costs.get(name, {})
            _refuse_unknown(f"costs.{name}", row, types, "resource type")
            if not row:
                raise FileFormatError(f"costs.{name} is missing (allowed: at least one of {', '.join(types)})")
        for group in self.bound:
            _refuse_unknown("bound", group, names, "layer")
        for edge in self.edges:
            _refuse_unknown("edges", (edge.source, edge.target), names, "layer")

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, name: str) -> Mapping[str, LayerCost]:
        return self.costs[name]

    def names(self) -> tuple[str, ...]:
        """Layer names in execution order."""
        return tuple(layer.name for layer in self.layers)

    def resource_names(self) -> tuple[str, ...]:
        """Names of the resource types, in order."""
        return tuple(resource.name for resource in self.resources)

    def layer(self, name: str) -> CostLayer:
        """The layer called ``name``."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, CostLayer]:
        return {layer.name: layer for layer in self.layers}

    def cluster(self) -> Cluster:
        """The resource types of this table as a cluster without links."""
        return Cluster(resources=self.resources)

    def sources(self) -> Mapping[str, str]:
        """Resource type -> "measured", "estimated", "given" or "mixed"."""
        found: dict[str, set[str]] = {name: set() for name in self.resource_names()}
        for row in self.costs.values():
            for name, cost in row.items():
                found[name].add(cost.source)
        return {name: next(iter(kinds)) if len(kinds) == 1 else "mixed" for name, kinds in found.items() if kinds}

    def signature(self) -> str:
        """A content key: equal for tables that say the same, whatever the process."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    def merge(self, *others: CostTable) -> CostTable:
        """Add the resource types of tables of the same layers; where both know a cost, measured wins over estimated.

        Raises :class:`FileFormatError` when layers or batch sizes differ.
        """
        merged = self
        for other in others:
            merged = _merge_two(merged, other)
        return merged

    def trained_with(self, optimizer: str) -> CostTable:
        """The same table with the ``state_bytes`` of an optimizer: its slots, and a gradient except for table rows.

        Raises :class:`OptionError` for an optimizer it does not know.
        """
        if optimizer not in OPTIMIZER_SLOTS:
            raise OptionError(f"optimizer is {optimizer!r} (allowed: {', '.join(OPTIMIZER_SLOTS)})")
        slots = OPTIMIZER_SLOTS[optimizer]
        layers = tuple(
            replace(layer, state_bytes=layer.parameter_bytes * (slots + (0 if layer.is_table else 1)))
            for layer in self.layers
        )
        return replace(self, layers=layers)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; ``from_dict`` gives an equal table back."""
        return {
            "version": 1,
            "batch_size": self.batch_size,
            "resources": [resource.to_dict() for resource in self.resources],
            "layers": [_changed(layer, CostLayer) for layer in self.layers],
            "costs": {
                name: {kind: _changed(cost, LayerCost) for kind, cost in row.items()}
                for name, row in self.costs.items()
            },
            "edges": [[edge.source, edge.target, edge.bytes_per_sample] for edge in self.edges],
            "bound": [list(group) for group in self.bound],
        }

    def save(self, path: str | Path) -> None:
        """Write the table as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Read ``costs.json`` (or YAML). Raises :class:`FileFormatError` with path, line, field and allowed values."""
        return cls.from_record(read_file(path))

    @classmethod
    def from_json(cls, text: str, *, origin: str = "") -> CostTable:
        """Read JSON text, e.g. from standard input."""
        return cls.from_record(Record.of(parse(text, origin), origin))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, origin: str = "") -> CostTable:
        """Read a mapping of the same form as the file."""
        return cls.from_record(Record.of(values, origin))

    @classmethod
    def from_record(cls, record: Record) -> CostTable:
        """Read a parsed file."""
        record.only("version", "batch_size", "resources", "layers", "costs", "edges", "bound")
        record.version()
        resources = tuple(ResourceType.from_record(entry) for entry in record.records("resources", required=True))
        layers = tuple(_read_layer(entry) for entry in record.records("layers", required=True))
        unique_names(record, "resources", tuple(r.name for r in resources))
        unique_names(record, "layers", names := tuple(layer.name for layer in layers))
        types = tuple(r.name for r in resources)
        return cls(
            batch_size=record.integer("batch_size", low=1),
            resources=resources,
            layers=layers,
            costs=_read_costs(record, names, types),
            edges=_read_edges(record, names),
            bound=_read_bound(record, names),
        )


def _read_layer(record: Record) -> CostLayer:
    record.only(*CostLayer.__dataclass_fields__)
    amounts = [name for name in CostLayer.__dataclass_fields__ if name not in ("name", "kind")]
    return CostLayer(
        name=record.text("name"), kind=record.text("kind", "other"), **{n: record.number(n, 0.0) for n in amounts}
    )


def _read_cost(record: Record) -> LayerCost:
    record.only(*LayerCost.__dataclass_fields__)
    source = record.text("source", "given", choices=SOURCES)
    return LayerCost(
        compute_s=record.number("compute_s"),
        communication_s=record.number("communication_s", 0.0),
        compute_parallel=record.number("compute_parallel", 1.0, high=1.0),
        communication_parallel=record.number("communication_parallel", 1.0, high=1.0),
        source=next(kind for kind in SOURCES if kind == source),
    )


def _read_costs(record: Record, names: tuple[str, ...], types: tuple[str, ...]) -> dict[str, dict[str, LayerCost]]:
    table = record.record("costs")
    table.only(*names)
    costs: dict[str, dict[str, LayerCost]] = {}
    for name in names:
        row = table.record(name)
        row.only(*types)
        if not row.values:
            table.reject(name, f"a cost for at least one of {', '.join(types)}")
        costs[name] = {kind: _read_cost(row.record(kind)) for kind in types if row.has(kind)}
    return costs


def _read_edges(record: Record, names: tuple[str, ...]) -> tuple[Edge, ...]:
    edges = []
    for index, item in enumerate(record.sequence("edges")):
        right = isinstance(item, (list, tuple)) and len(item) == 3 and item[0] in names and item[1] in names
        if not right or not isinstance(item[2], (int, float)) or item[2] < 0:
            place = describe(record.origin, (*record.path, "edges", index))
            raise FileFormatError(f"{place} is {item!r} (allowed: [layer, layer, bytes per sample >= 0])")
        if names.index(item[0]) >= names.index(item[1]):
            place = describe(record.origin, (*record.path, "edges", index))
            raise FileFormatError(f"{place} is {item!r} (allowed: from a layer to one that is listed after it)")
        edges.append(Edge(source=item[0], target=item[1], bytes_per_sample=float(item[2])))
    return tuple(edges)


def _read_bound(record: Record, names: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    groups = []
    for index, item in enumerate(record.sequence("bound")):
        if not isinstance(item, (list, tuple)) or not all(name in names for name in item):
            place = describe(record.origin, (*record.path, "bound", index))
            raise FileFormatError(f"{place} is {item!r} (allowed: a list of layer names)")
        groups.append(tuple(item))
    return tuple(groups)


def _changed(value: object, kind: Any) -> dict[str, Any]:
    """Fields that differ from their defaults, and those without one."""
    pairs = ((name, getattr(value, name), f.default) for name, f in kind.__dataclass_fields__.items())
    return {name: given for name, given, default in pairs if given != default}


def _refuse_unknown(field_name: str, given: Iterable[str], known: tuple[str, ...], noun: str) -> None:
    for name in given:
        if name not in known:
            raise FileFormatError(f'{field_name} names no {noun} "{name}" (allowed: {", ".join(known[:12])})')


def _merge_two(first: CostTable, second: CostTable) -> CostTable:
    if first.names() != second.names():
        different = sorted(set(first.names()) ^ set(second.names()))[:3] or ["their order"]
        raise FileFormatError(
            f"layers differ between the tables to merge: {', '.join(different)} (allowed: equal layers)"
        )
    if first.batch_size != second.batch_size:
        raise FileFormatError(f"batch_size is {first.batch_size} and {second.batch_size} (allowed: equal batch sizes)")
    rank = {"estimated": 0, "given": 1, "measured": 2}
    costs = {
        name: {
            **first.costs[name],
            **{
                kind: cost
                for kind, cost in second.costs[name].items()
                if kind not in first.costs[name] or rank[cost.source] >= rank[first.costs[name][kind].source]
            },
        }
        for name in first.names()
    }
    known = first.resource_names()
    extra = tuple(r for r in second.resources if r.name not in known)
    return replace(first, resources=first.resources + extra, costs=costs)
