"""What ``torch.compile(model, backend="heterps", options={...})`` accepts.

Enters: the user's mapping, or ``HETERPS_OPTIONS`` (JSON) where torch's own tools drop the mapping. Leaves: one frozen
value, handed on by argument. It refuses unknown names (listing the close ones), wrong types and contradictions.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from heterps_compile.cluster import Cluster
from heterps_compile.errors import OptionError
from heterps_compile.plans import Plan

ENVIRONMENT_VARIABLE = "HETERPS_OPTIONS"

Verify = Literal["never", "first_call"]
ProfileMode = Literal["auto", "measure", "estimate"]

POLICIES = (
    "rl", "rl-rnn", "exact", "brute-force", "greedy", "genetic", "bayesian", "cpu-only", "gpu-only", "heuristic",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options of one compilation. Every field can be left out.

    cluster: resource types to plan for: a path, a mapping or a :class:`Cluster`; this machine by default.
    min_throughput: samples per second the plan must reach.
    policy, seed: placement policy and its seed; without a policy the cheapest of ``rl`` and ``exact`` is taken.
    plan: a saved plan (path or :class:`Plan`) to run instead of planning; it says everything the four above say.
    pin: layer glob -> resource type. replicas: resource type -> units.
    microbatches: how many pieces a batch flows through a multi-stage pipeline in.
    profile: ``measure`` layers here, ``estimate`` from rates, or ``auto``: measure when there is a choice to make.
    strict: raise where a slower way would be taken with a warning.
    verify: ``first_call`` compares outputs and gradients with eager once and raises on a difference.
    lazy_tables: gradients of ``sparse=False`` tables stay sparse and rows are brought up to date when next read.
    """

    cluster: Cluster | None = None
    min_throughput: float | None = None
    policy: str | None = None
    seed: int = 0
    plan: Plan | None = None
    pin: Mapping[str, str] = field(default_factory=dict)
    replicas: Mapping[str, int] = field(default_factory=dict)
    microbatches: int = 1
    profile: ProfileMode = "auto"
    strict: bool = False
    verify: Verify = "never"
    lazy_tables: bool = False

    def __post_init__(self) -> None:
        if self.plan is not None and (self.cluster or self.min_throughput or self.policy or self.pin or self.replicas):
            raise OptionError(
                "option plan comes with cluster, min_throughput, policy, pin or replicas",
                hint="a saved plan already answers these; leave them out, or leave out plan to make a new one",
            )

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None = None, mode: str | None = None) -> Options:
        """Check the user's mapping and build the value. Raises :class:`OptionError`."""
        if mode not in (None, "default"):
            raise OptionError(
                f"mode={mode!r} is not supported by backend 'heterps' (allowed: 'default')",
                hint="say what you want in options={...}: " + ", ".join(f.name for f in fields(cls)),
            )
        given = dict(options) if options else _from_environment()
        names = [f.name for f in fields(cls)]
        for name in given:
            if name not in names:
                close = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
                raise OptionError(
                    f"unknown option {name!r} of backend 'heterps'",
                    hint=f"did you mean {' or '.join(close)}?" if close else f"options: {', '.join(names)}",
                )
        return cls(**{name: _READERS[name](name, value) for name, value in given.items()})


def _from_environment() -> dict[str, Any]:
    text = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if not text:
        return {}
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise OptionError(f"{ENVIRONMENT_VARIABLE} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise OptionError(f"{ENVIRONMENT_VARIABLE} holds a {type(values).__name__} (allowed: a JSON object)")
    return values


def _reject(name: str, value: object, allowed: str) -> OptionError:
    return OptionError(f"option {name} is {value!r} (allowed: {allowed})")


def _cluster(name: str, value: object) -> Cluster | None:
    if value is None or isinstance(value, Cluster):
        return value
    if isinstance(value, str | Path):
        return Cluster.load(value)
    if isinstance(value, Mapping):
        return Cluster.from_dict(value)
    raise _reject(name, value, "a path, a mapping or a Cluster")


def _plan(name: str, value: object) -> Plan | None:
    if value is None or isinstance(value, Plan):
        return value
    if isinstance(value, str | Path):
        return Plan.load(value)
    if isinstance(value, Mapping):
        return Plan.from_dict(value)
    raise _reject(name, value, "a path, a mapping or a Plan")


def _positive(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise _reject(name, value, "a number > 0")
    return float(value)


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _reject(name, value, "a whole number >= 1")
    return value


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _reject(name, value, "a whole number >= 0")
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _reject(name, value, "True or False")
    return value


def _one_of(*allowed: str) -> Any:
    def read(name: str, value: object) -> str:
        if value not in allowed:
            close = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else ""
            raise OptionError(f"option {name} is {value!r} (allowed: {', '.join(allowed)})", hint=hint)
        return str(value)

    return read


def _policy(name: str, value: object) -> str | None:
    return None if value is None else str(_one_of(*POLICIES)(name, value))


def _globs(name: str, value: object) -> dict[str, str]:
    if not isinstance(value, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        raise _reject(name, value, 'a mapping of layer glob to resource type, such as {"emb*": "cpu"}')
    return dict(value)


def _units(name: str, value: object) -> dict[str, int]:
    if not isinstance(value, Mapping):
        raise _reject(name, value, 'a mapping of resource type to units, such as {"cpu": 2}')
    return {str(key): _count(f"{name}[{key!r}]", units) for key, units in value.items()}


_READERS: dict[str, Any] = {
    "cluster": _cluster,
    "min_throughput": _positive,
    "policy": _policy,
    "seed": _integer,
    "plan": _plan,
    "pin": _globs,
    "replicas": _units,
    "microbatches": _count,
    "profile": _one_of("auto", "measure", "estimate"),
    "strict": _flag,
    "verify": _one_of("never", "first_call"),
    "lazy_tables": _flag,
}
