"""heterps-compile: ``torch.compile(model, backend="heterps")`` for models that train on mixed fleets.

Names are loaded when first used, so importing the package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heterps_compile import optim as optim
    from heterps_compile.cluster import Cluster as Cluster
    from heterps_compile.cluster import Link as Link
    from heterps_compile.cluster import ResourceType as ResourceType
    from heterps_compile.costs import CostTable as CostTable
    from heterps_compile.errors import HeterpsError as HeterpsError
    from heterps_compile.errors import HeterpsWarning as HeterpsWarning
    from heterps_compile.inspection import explain as explain
    from heterps_compile.inspection import is_planned as is_planned
    from heterps_compile.planner import plan as plan
    from heterps_compile.plans import Plan as Plan
    from heterps_compile.training import compile_ as compile_
    from heterps_compile.training import flush as flush
    from heterps_compile.training import train_step as train_step

__version__ = "0.1.0"

_HOMES = {
    "Cluster": "cluster",
    "CostTable": "costs",
    "HeterpsError": "errors",
    "HeterpsWarning": "errors",
    "Link": "cluster",
    "Plan": "plans",
    "ResourceType": "cluster",
    "compile_": "training",
    "explain": "inspection",
    "flush": "training",
    "is_planned": "inspection",
    "plan": "planner",
    "train_step": "training",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> object:
    if name == "optim":
        return import_module("heterps_compile.optim")
    if name not in _HOMES:
        raise AttributeError(f"module 'heterps_compile' has no attribute {name!r}")
    value = getattr(import_module(f"heterps_compile.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
