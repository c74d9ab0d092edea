"""What if: one table of costs planned twice, as asked and with some numbers changed.

Enters: a cost table, a cluster, a request and changes such as ``limit.v100=4`` or ``floor=2e5``. Leaves: both plans and
the layers that moved between them. Refused: keys and types that do not exist, values that cannot be
(:class:`OptionError`, naming what is allowed).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from heterps_compile.cluster import Cluster, ResourceType
from heterps_compile.costs import CostTable
from heterps_compile.errors import InfeasibleError, OptionError, PlanError
from heterps_compile.planning import Request, plan_costs
from heterps_compile.plans import Plan

FLOOR = "floor"
KEYS = ("limit", "price", "memory")
FORMS = "limit.TYPE=units, price.TYPE=USD/h, memory.TYPE=bytes, floor=samples/s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One number to change: a ``limit`` (units), ``price`` (USD/h) or ``memory`` (bytes) of a type, or the ``floor``.

    ``resource`` is empty for the floor, which is in samples per second.
    """

    key: str
    resource: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Change:
        """Read ``KEY=VALUE``. Raises :class:`OptionError` for what is none of :data:`FORMS`."""
        name, _, amount = text.partition("=")
        key, _, resource = name.partition(".")
        if key not in (FLOOR, *KEYS) or (key == FLOOR) != (not resource):
            raise OptionError(f"what-if {text!r}: {name!r} is no key (allowed: {FORMS})")
        try:
            value = float(amount)
        except ValueError:
            value = math.nan
        allowed = _allowed(key)
        if not math.isfinite(value) or value < 0 or (key == FLOOR and value == 0) or (key == "limit" and value % 1):
            raise OptionError(f"what-if {text!r}: {amount!r} is no value of {name} (allowed: {allowed})")
        return cls(key=key, resource=resource, value=value)

    @property
    def name(self) -> str:
        """``limit.v100``."""
        return f"{self.key}.{self.resource}" if self.resource else self.key

    def __str__(self) -> str:
        return f"{self.name}={self.value:.12g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A layer that the change puts on another type."""

    layer: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """Both plans; ``changed`` is None where the change leaves no plan at any throughput, and ``refusal`` says why."""

    changes: tuple[Change, ...]
    base: Plan
    changed: Plan | None
    refusal: str = ""

    @property
    def moves(self) -> tuple[Move, ...]:
        """Layers whose type changed, in execution order."""
        after = self.changed.placement if self.changed else {}
        return tuple(
            Move(layer=layer, before=before, after=after[layer])
            for layer, before in self.base.placement.items()
            if layer in after and after[layer] != before
        )

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; ``base`` and ``changed`` have the form of a plan file."""
        return {
            "version": 1,
            "changes": {change.name: change.value for change in self.changes},
            "base": self.base.to_dict(),
            "changed": self.changed.to_dict() if self.changed else None,
            "refusal": self.refusal,
            "moved": {move.layer: [move.before, move.after] for move in self.moves},
        }


def what_if(costs: CostTable, cluster: Cluster | None, request: Request, changes: Sequence[Change | str]) -> WhatIf:
    """Plan as asked, and again with the changes. Raises what :func:`plan_costs` raises for the plan as asked.

    A change may leave a layer without any type, or nothing that fits the limits: that is an answer, not an error.
    """
    read = tuple(Change.parse(change) if isinstance(change, str) else change for change in changes)
    fleet = cluster or costs.cluster()
    other_fleet, other_request = changed_problem(fleet, request, read)
    base = plan_costs(costs, fleet, request)
    try:
        changed = plan_costs(costs, other_fleet, other_request)
    except (InfeasibleError, PlanError) as error:
        return WhatIf(changes=read, base=base, changed=None, refusal=error.message)
    return WhatIf(changes=read, base=base, changed=changed)


def changed_problem(cluster: Cluster, request: Request, changes: Sequence[Change]) -> tuple[Cluster, Request]:
    """The cluster and the request with every change made. Raises :class:`OptionError` for types not in the cluster."""
    resources = {resource.name: resource for resource in cluster}
    for change in changes:
        if change.key == FLOOR:
            request = replace(request, min_throughput=change.value)
            continue
        if change.resource not in resources:
            known = ", ".join(resources)
            raise OptionError(f"what-if {change}: {change.resource!r} is no resource type (allowed: {known})")
        resources[change.resource] = _with(resources[change.resource], change)
    return replace(cluster, resources=tuple(resources.values())), request


def _with(resource: ResourceType, change: Change) -> ResourceType:
    if change.key == "limit":
        return replace(resource, limit=int(change.value))
    if change.key == "price":
        return replace(resource, price_usd_per_h=change.value, spot=False)  # a plan file reads spot prices anew
    return replace(resource, memory_bytes=change.value)


def _allowed(key: str) -> str:
    return {
        "limit": "a whole number of units >= 0",
        "price": "USD per hour >= 0",
        "memory": "bytes >= 0",
        FLOOR: "samples per second > 0",
    }[key]
