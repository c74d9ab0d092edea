"""fuse: placement -> stages. Neighbouring layers on one resource type become one stage.

Enters: a placement and the layers in execution order. Leaves: stages with one replica each; ``provision`` decides how
many. Refused: a placement that misses a layer (:class:`PlanError`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from heterps_compile.errors import PlanError
from heterps_compile.plans import Graph, Stage


@dataclass(frozen=True, kw_only=True)
class Fuse:
    """The pass; it has no options."""

    def __call__(self, placement: Mapping[str, str], graph: Graph) -> tuple[Stage, ...]:
        """Maximal runs of consecutive layers of ``graph`` (or a cost table) on one type."""
        missing = [name for name in graph.names() if name not in placement]
        if missing:
            raise PlanError(f"the placement misses layers {', '.join(missing[:5])}")
        runs = groupby(graph.names(), key=lambda name: placement[name])
        return tuple(Stage(resource=resource, layers=tuple(names)) for resource, names in runs)
