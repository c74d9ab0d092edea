"""The highest throughput within the limits, and what stands in the way of more.

Enters: a cost model whose floor is out of reach. Leaves: the cheapest placement at the best reachable throughput (to
one part in a million), and one line per limit or memory that binds. A floor is out of reach if these are too low, or if
the serial part of a layer takes longer than the floor allows, however many units there are.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from heterps_compile.cost_model import CostModel, Ints
from heterps_compile.passes.place.exact import exact
from heterps_compile.provision import provision

PRECISION = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Fastest:
    """``chosen`` is None when no placement fits the limits at any speed."""

    chosen: Ints | None
    throughput_samples_per_s: float
    binds: tuple[str, ...]


def fastest(model: CostModel, time_limit_s: float = 20.0) -> Fastest:
    """Bisect on the throughput; ``exact`` answers whether one is reachable, first placement found."""
    deadline = time.monotonic() + time_limit_s
    chosen, reached_s, missed_s = _bracket(model, deadline)
    while chosen is not None and reached_s > missed_s * (1 + PRECISION) and time.monotonic() < deadline:
        middle = (reached_s * missed_s) ** 0.5
        found = _within(model, middle, deadline)
        if found is None:
            missed_s = middle
        else:
            chosen, reached_s = found
    if chosen is None:
        late = time.monotonic() > deadline
        slowest = _at(model, missed_s)  # what stands in the way of any speed, not of the floor's
        binds = ("no placement was found in the time given",) if late else _binds(slowest, deadline)
        return Fastest(chosen=None, throughput_samples_per_s=0.0, binds=binds)
    binds = _binds(model, deadline)
    cheap = exact(_at(model, reached_s), time_limit_s=_left(deadline), start=chosen)
    best = cheap.chosen if cheap.chosen is not None else chosen
    return Fastest(chosen=best, throughput_samples_per_s=1.0 / reached_s, binds=binds)


def _bracket(model: CostModel, deadline: float) -> tuple[Ints | None, float, float]:
    """A placement with a time it reaches, and a time that none reaches."""
    missed_s = model.slowest_s
    for factor in 16.0 ** np.arange(1, 20):
        if time.monotonic() > deadline:
            break
        found = _within(model, model.slowest_s * float(factor), deadline)
        if found is not None:
            return (*found, missed_s)
        missed_s = model.slowest_s * float(factor)
    return None, missed_s, missed_s


def _within(model: CostModel, time_s: float, deadline: float) -> tuple[Ints, float] | None:
    """A placement at most ``time_s`` slow, and the time it realises."""
    narrowed = _at(model, time_s)
    found = exact(narrowed, time_limit_s=_left(deadline), first=True)
    if found.chosen is None:
        return None
    made = provision(narrowed, found.chosen)
    assert made is not None, "the exact policy returned a placement that cannot be provisioned"
    return found.chosen, min(made.slowest_s, time_s)


def _at(model: CostModel, time_s: float) -> CostModel:
    return replace(model, min_throughput=1.0 / time_s)


def _binds(model: CostModel, deadline: float) -> tuple[str, ...]:
    """What, lifted alone, makes the floor reachable: a limit or a memory; else several, else the serial part."""

    def reachable(changed: CostModel) -> bool:
        return exact(changed, time_limit_s=_left(deadline), first=True).chosen is not None

    found = []
    every = np.ones(model.num_types, dtype=bool)
    for index, name in enumerate(model.types):
        this = np.arange(model.num_types) == index
        if reachable(model.with_limits(np.where(this, np.inf, model.limit))):
            found.append(f"limit of {name} ({int(model.limit[index])})")
        if model.full is not None and reachable(model.with_memory(this)):
            found.append(f"memory of {name}")
    if found:
        return tuple(found)
    names = ", ".join(model.types)
    free = model.with_limits(np.full(model.num_types, np.inf))
    if reachable(free):
        return (f"the limits of {names} together",)
    if model.full is not None and reachable(free.with_memory(every)):
        return (f"the memory of {names} together",)
    return (_slowest_layer(model),)


def _left(deadline: float) -> float:
    """Seconds until the deadline, or a few tenths, so that what is asked last is still tried."""
    return max(deadline - time.monotonic(), 0.2)


def _slowest_layer(model: CostModel) -> str:
    serial = np.maximum(model.terms[..., 0], model.terms[..., 2])
    least = np.where(model.allowed, serial, np.inf).min(axis=1)
    worst = int(np.argmax(least))
    fastest_type = model.types[int(np.argmin(np.where(model.allowed, serial, np.inf)[worst]))]
    if least[worst] < model.slowest_s:
        return "the serial parts of neighbouring layers and what stages exchange, which no number of units shortens"
    return (
        f"the part of layer {model.layers[worst]} that more units do not shorten: at most "
        f"{1 / least[worst]:,.0f} samples/s on {fastest_type}, its fastest type"
    )
