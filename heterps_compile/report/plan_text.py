"""The plan as text a person reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heterps_compile.plan import Plan


def explain(plan: Plan) -> str:
    """What to rent and why."""
    return "\n".join(f"{s.replicas} x {s.resource}: {', '.join(s.layers)}" for s in plan.stages)
