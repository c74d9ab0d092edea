"""What a plan says: placement, stages, provision, predictions, alternatives and reasons, as plain frozen values.

Enters: the results of place, fuse and provision. Leaves: the fields that ``plans.Plan`` loads, saves and explains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from heterps_compile.cluster import ResourceType


@dataclass(frozen=True)
class Placement(Mapping[str, str]):
    """Layer -> resource type, in execution order, with the policy that made it and what that policy says about itself.

    ``lower_bound_usd_per_million_samples`` is a proven bound on any placement's cost (0 when the policy proves none).
    """

    assignment: tuple[tuple[str, str], ...]
    policy: str = "given"
    lower_bound_usd_per_million_samples: float = 0.0
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, placement: Mapping[str, str], policy: str = "given", **facts: Any) -> Placement:
        """Freeze a mapping."""
        return cls(assignment=tuple(placement.items()), policy=policy, **facts)

    def __getitem__(self, layer: str) -> str:
        return self._by_layer[layer]

    @cached_property
    def _by_layer(self) -> dict[str, str]:
        return dict(self.assignment)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.assignment)

    def __len__(self) -> int:
        return len(self.assignment)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A maximal run of consecutive layers on one resource type, and its replicas (one unit each).

    ``memory_bytes`` is what one unit holds, 0 where not known; ``bound_by`` says what asks for that many replicas:
    "compute", "communication" or "memory".
    """

    resource: str
    layers: tuple[str, ...]
    replicas: int = 1
    throughput_samples_per_s: float = 0.0
    memory_bytes: float = 0.0
    bound_by: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """What another policy would have given."""

    feasible: bool
    cost_usd_per_million_samples: float | None = None
    throughput_samples_per_s: float | None = None
    price_usd_per_h: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why one layer is where it is: the cost of the whole plan (USD per million samples) were it moved alone.

    ``elsewhere`` leaves out types where no plan with this layer reaches the floor; ``source`` says whether the times
    were measured, estimated or given, ``pinned`` that no other type was allowed, ``bound`` that it shares a table, and
    ``transfer_bound`` that on its type moving its inputs and rows takes longer than computing.
    """

    layer: str
    source: str = "given"
    pinned: bool = False
    bound: bool = False
    transfer_bound: bool = False
    elsewhere: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PlanFacts:
    """Placement, stages, provision and predictions. Money in USD, throughput in samples per second.

    A plan that is not ``feasible`` carries the placement with the best reachable throughput, and ``binds`` says what
    stands in the way. ``optimum_proven`` is False when the optimum is a lower bound that no plan is known to reach.
    """

    placement: Mapping[str, str]
    stages: tuple[Stage, ...]
    provision: Mapping[str, int]
    policy: str = "given"
    seed: int = 0
    feasible: bool = True
    min_throughput: float | None = None
    mode: str = "paper"
    microbatches: int = 1
    samples: float | None = None
    data_rate: float | None = None
    without: tuple[str, ...] = ()
    batch_size: int = 1
    throughput_samples_per_s: float = 0.0
    price_usd_per_h: float = 0.0
    cost_usd_per_million_samples: float = 0.0
    optimum_usd_per_million_samples: float = 0.0
    optimum_proven: bool = False
    gap_to_optimum: float = 0.0
    alternatives: Mapping[str, Alternative] = field(default_factory=dict)
    resources: tuple[ResourceType, ...] = ()
    reasons: tuple[Reason, ...] = ()
    binds: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    planning_s: float = field(default=0.0, compare=False)
