"""Resource types, the links between them, and the cluster they form.

Enters: a YAML or JSON file, a mapping, or this machine. Leaves: frozen values with units in their names. Refused: files
with missing, unknown or out-of-range fields, resource types named twice, links to types that are not there.
A type named in the catalog (or ``like`` one of it) needs only name, price and limit; any field given wins.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any, Literal

from heterps_compile.catalog import CATALOG
from heterps_compile.errors import FileFormatError, OptionError
from heterps_compile.fields import Record, describe, read_file

Unit = Literal["card", "core"]

ASSUMED_NETWORK_BYTES_PER_S = 1.25e9
"""10 Gb/s, used for a link of two types that state no network rate."""
ASSUMED_LATENCY_S = 5.0e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceType:
    """A kind of device that can be rented: price, limit and datasheet rates of one unit (a core or a card).

    ``device`` is a torch device type ("cpu", "cuda", "xpu") or "sim", the simulated accelerator. A rate or memory of 0
    is not stated: it constrains nothing and estimates need it. ``limit`` is the most units one can rent. The units of a
    host share its network, and cores share one copy of what they all read.
    ``price_usd_per_h`` is what is paid: the spot price where ``spot`` is set. :mod:`heterps_compile.catalog` says what
    the rates mean and what the texts on sources speak of.
    """

    name: str
    device: str
    price_usd_per_h: float
    limit: int
    memory_bytes: float = 0.0
    flops_per_s: float = 0.0
    tensor_flops_per_s: float = 0.0
    memory_bytes_per_s: float = 0.0
    interconnect_bytes_per_s: float = 0.0
    network_bytes_per_s: float = 0.0
    unit: Unit = "card"
    units_per_host: int = 1
    spot: bool = False
    spot_price_usd_per_h: float = 0.0
    billing_minimum_s: float = 0.0
    source: str = ""
    date: str = ""
    price_source: str = ""
    price_date: str = ""

    @property
    def balance_flop_per_byte(self) -> float:
        """Arithmetic intensity at which one unit is as fast at computing as at moving data; 0 when not stated."""
        return self.flops_per_s / self.memory_bytes_per_s if self.memory_bytes_per_s else 0.0

    @property
    def is_accelerator(self) -> bool:
        """Anything but a CPU core."""
        return self.device != "cpu"

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON or YAML: name, device, price and limit, and what ``from_record`` would not fill in equally."""
        filled = {f.name: f.default for f in fields(self)} | dict(CATALOG.get(self.name, {}))
        always = ("name", "device", "price_usd_per_h", "limit")
        return {name: value for name, value in asdict(self).items() if name in always or value != filled[name]}

    @classmethod
    def from_record(cls, record: Record) -> ResourceType:
        """Read one entry; fields left out come from the catalog. Raises :class:`FileFormatError`."""
        record.only(*(f.name for f in fields(cls)), "like")
        name = record.text("name")
        if not name.isprintable():
            record.reject("name", "printable text of one line")
        like = record.text("like", name, choices=tuple(CATALOG)) if record.has("like") else name
        stated = {field: value for field, value in record.values.items() if value is not None}
        given = Record({**_borrowed(like, stated), **stated}, record.origin, record.path)
        device = given.text("device", "cpu" if name.startswith("cpu") else "cuda")
        amounts: dict[str, Any] = {field: given.number(field, 0.0) for field in AMOUNTS}
        notes: dict[str, Any] = {field: _note(given, field) for field in NOTES}
        unit = given.text("unit", "core" if device == "cpu" else "card", choices=UNITS)
        return cls(
            name=name,
            device=device,
            price_usd_per_h=_price_usd_per_h(given),
            limit=given.integer("limit"),
            unit="core" if unit == "core" else "card",
            units_per_host=given.integer("units_per_host", 1, low=1),
            spot=given.boolean("spot", False),
            **amounts,
            **notes,
        )


UNITS = ("card", "core")
AMOUNTS = (
    "memory_bytes", "flops_per_s", "tensor_flops_per_s", "memory_bytes_per_s", "interconnect_bytes_per_s",
    "network_bytes_per_s", "spot_price_usd_per_h", "billing_minimum_s",
)  # fmt: skip
NOTES = ("source", "date", "price_source", "price_date")


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What joins one unit of a type to one unit of another: bandwidth per unit and latency."""

    between: tuple[str, str]
    bandwidth_bytes_per_s: float
    latency_s: float = ASSUMED_LATENCY_S

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON or YAML."""
        return {
            "between": list(self.between),
            "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            "latency_s": self.latency_s,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The resource types on offer and the links between them; the order of types is the order of the file."""

    resources: tuple[ResourceType, ...]
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        names = self.names()
        if not names:
            raise FileFormatError("resources is empty (allowed: at least one resource type)")
        for name in names:
            if names.count(name) > 1:
                raise FileFormatError(f'resources: name "{name}" is there {names.count(name)} times (allowed: once)')
        for link in self.links:
            for end in link.between:
                if end not in names:
                    raise FileFormatError(f'links: "{end}" is no resource type (allowed: {", ".join(names)})')

    def __len__(self) -> int:
        return len(self.resources)

    def __iter__(self) -> Iterator[ResourceType]:
        return iter(self.resources)

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def __getitem__(self, name: str) -> ResourceType:
        for resource in self.resources:
            if resource.name == name:
                return resource
        raise OptionError(f"resource type {name!r} is not in the cluster (it has {', '.join(self.names())})")

    def names(self) -> tuple[str, ...]:
        """Names of the resource types, in order."""
        return tuple(resource.name for resource in self.resources)

    def link(self, a: str, b: str) -> Link:
        """The link between two types: the one given, or else the slower network rate of the two ends."""
        if (given := self._given(a, b)) is not None:
            return given
        rates = [rate for rate in (self[a].network_bytes_per_s, self[b].network_bytes_per_s) if rate]
        return Link(between=(a, b), bandwidth_bytes_per_s=min(rates, default=ASSUMED_NETWORK_BYTES_PER_S))

    def port(self, here: str, there: str) -> Link:
        """What one unit of ``here`` can move to and from ``there``, whose units may be many: the link given between the
        types, or else the network rate of ``here`` alone."""
        given = self._given(here, there)
        if given is not None:
            return given
        rate = self[here].network_bytes_per_s or ASSUMED_NETWORK_BYTES_PER_S
        return Link(between=(here, there), bandwidth_bytes_per_s=rate)

    def _given(self, a: str, b: str) -> Link | None:
        return next((link for link in self.links if link.between in ((a, b), (b, a))), None)

    def with_limits(self, limits: Mapping[str, int]) -> Cluster:
        """The same cluster with other limits, for what-if questions. Raises :class:`OptionError` for unknown types."""
        for name, limit in limits.items():
            self[name]
            if limit < 0:
                raise OptionError(f"limit of {name} is {limit} (allowed: a whole number >= 0)")
        changed = tuple(_replace(r, limit=limits.get(r.name, r.limit)) for r in self.resources)
        return Cluster(resources=changed, links=self.links)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON or YAML; ``from_dict`` gives an equal cluster back."""
        return {
            "version": 1,
            "resources": [r.to_dict() for r in self.resources],
            "links": [link.to_dict() for link in self.links],
        }

    def save(self, path: str | Path) -> None:
        """Write the cluster as YAML."""
        import yaml

        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a YAML or JSON file. Raises :class:`FileFormatError` with path, line, field and allowed values."""
        return cls.from_record(read_file(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, origin: str = "") -> Cluster:
        """Read a mapping of the same form as the file."""
        return cls.from_record(Record.of(values, origin))

    @classmethod
    def from_record(cls, record: Record) -> Cluster:
        """Read a parsed file."""
        record.only("version", "resources", "links")
        record.version()
        resources = tuple(ResourceType.from_record(entry) for entry in record.records("resources", required=True))
        unique_names(record, "resources", tuple(r.name for r in resources))
        links = tuple(_read_link(entry, tuple(r.name for r in resources)) for entry in record.records("links"))
        return cls(resources=resources, links=links)

    @classmethod
    def local(cls, *, simulated: int = 0) -> Cluster:
        """This machine: its CPU cores, its CUDA cards if torch sees any, and ``simulated`` units of the sim device.

        Prices and rates are the catalog's for ``cpu``; cards carry their own name and memory, and no price is known for
        them, so the catalog's on-demand price of the closest card is used.
        """
        cores = num_cores()
        cpu: dict[str, Any] = {"name": "cpu", "limit": cores, "memory_bytes": _memory_bytes() / cores}
        entries = [cpu, *_cuda_entries()]
        if simulated:
            entries.append({"name": "sim", "limit": simulated})
        return cls.from_dict({"resources": entries})


def num_cores() -> int:
    """Cores this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def unique_names(record: Record, field: str, names: tuple[str, ...]) -> None:
    """Refuse a list of entries in which one name stands twice."""
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            place = describe(record.origin, (*record.path, field, index, "name"))
            raise FileFormatError(f'{place} is "{name}" a second time (allowed: each name once)')
        seen.add(name)


def closest(name: str) -> str | None:
    """The catalog entry whose name is in, or most like, the name a driver reports ("NVIDIA A100-SXM4-80GB")."""
    flat = name.lower().replace(" ", "-").replace("gb", "")
    inside = [key for key in CATALOG if all(part in flat for part in key.split("-"))]
    return max(inside, key=len) if inside else next(iter(difflib.get_close_matches(flat, CATALOG, n=1)), None)


def _borrowed(like: str, stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the catalog says of a type; of the source of its price nothing where the entry states another price."""
    base = CATALOG.get(like, {})
    if stated.get("spot") or stated.get("price_usd_per_h", base.get("price_usd_per_h")) == base.get("price_usd_per_h"):
        return base
    return {field: value for field, value in base.items() if field not in ("price_source", "price_date")}


def _price_usd_per_h(record: Record) -> float:
    """What one unit costs: on demand, or spot where the entry says ``spot: true``."""
    if not record.boolean("spot", False):
        if not record.has("price_usd_per_h"):
            name = record.text("name")
            near = f"; did you mean {like}?" if (like := closest(name)) else ""
            record.reject("price_usd_per_h", f"a number >= 0, or a name of the catalog, which has no {name}{near}")
        return record.number("price_usd_per_h")
    price = record.number("spot_price_usd_per_h", 0.0)
    if price == 0:
        name = record.text("name")
        record.reject(
            "spot", f"true where the spot price is known; give spot_price_usd_per_h of {name}, or leave spot out"
        )
    return price


def _note(record: Record, name: str) -> str:
    """Free text; YAML reads an unquoted date as a date, and a year as a number."""
    value = record.values.get(name)
    return str(value) if isinstance(value, (date, int)) else record.text(name, "")


def _replace(resource: ResourceType, **changes: Any) -> ResourceType:
    return ResourceType(**{**asdict(resource), **changes})


def _read_link(record: Record, names: tuple[str, ...]) -> Link:
    record.only("between", "bandwidth_bytes_per_s", "latency_s")
    ends = record.texts("between", required=True)
    if len(ends) != 2 or any(end not in names for end in ends):
        record.reject("between", f"two of {', '.join(names)}")
    return Link(
        between=(ends[0], ends[1]),
        bandwidth_bytes_per_s=record.number("bandwidth_bytes_per_s", low=1.0),
        latency_s=record.number("latency_s", ASSUMED_LATENCY_S),
    )


def _memory_bytes() -> float:
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return 4.0e9  # a platform without sysconf


def _cuda_entries() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found: dict[str, dict[str, Any]] = {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        like = closest(properties.name)
        name = like or properties.name.lower().replace(" ", "-")
        entry = found.setdefault(name, {"name": name, "device": "cuda", "limit": 0})
        entry["limit"] += 1
        entry["memory_bytes"] = float(properties.total_memory)
        if like is None:
            entry["price_usd_per_h"] = CATALOG["v100"]["price_usd_per_h"]
    return list(found.values())
