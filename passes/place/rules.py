"""Fixed rules: everything on CPU cores, everything on one accelerator type, or data-intensive layers first on CPU.

Enters: a cost model. Leaves: a placement, or None when the cluster has no such type, a layer cannot run there, or the
floor is out of reach. Where several types qualify, each is tried and the cheapest taken. Pinned layers stay where they
are pinned, and layers that share a table follow the first of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from heterps_compile.cost_model import Bools, CostModel, Ints
from heterps_compile.passes.place.found import Found
from heterps_compile.provision import provision


def cpu_only(model: CostModel, seed: int = 0, time_limit_s: float = 20.0) -> Found:
    """Every layer on one CPU type."""
    del seed, time_limit_s
    return best_of(model, candidates("cpu-only", model))


def gpu_only(model: CostModel, seed: int = 0, time_limit_s: float = 20.0) -> Found:
    """Every layer on one accelerator type."""
    del seed, time_limit_s
    return best_of(model, candidates("gpu-only", model))


def heuristic(model: CostModel, seed: int = 0, time_limit_s: float = 20.0) -> Found:
    """The leading data-intensive layers (at least the first) on CPU, the rest on one accelerator type (AIBox)."""
    del seed, time_limit_s
    return best_of(model, candidates("heuristic", model))


RULES = ("cpu-only", "gpu-only", "heuristic")


def candidates(rule: str, model: CostModel) -> list[Ints]:
    """The placements (L,) a rule chooses from, fitted to pins and shared tables; empty when it has none."""
    position = np.arange(model.num_layers)
    if rule == "heuristic":
        wanted = [
            np.where(position < _leading(data_intensive(model, cpu)), cpu, accelerator)
            for cpu in cpu_types(model)
            for accelerator in accelerator_types(model)
        ]
    else:
        wanted_types = cpu_types(model) if rule == "cpu-only" else accelerator_types(model)
        wanted = [np.full(model.num_layers, type_index) for type_index in wanted_types]
    return [placement for placement in (fit(model, row) for row in wanted) if placement is not None]


def cpu_types(model: CostModel) -> list[int]:
    """Indices of the types whose device is a CPU."""
    return [index for index, device in enumerate(model.devices) if device == "cpu"]


def accelerator_types(model: CostModel) -> list[int]:
    """Indices of all other types."""
    return [index for index, device in enumerate(model.devices) if device != "cpu"]


def data_intensive(model: CostModel, type_index: int) -> Bools:
    """(L,): whether moving data takes a layer at least as long as computing, on one unit of ``type_index``."""
    terms = model.terms[:, type_index]
    return np.asarray(terms[:, 2] + terms[:, 3] >= terms[:, 0] + terms[:, 1])


def best_of(model: CostModel, wanted: Iterable[Ints]) -> Found:
    """The cheapest of several placements."""
    best = Found(chosen=None)
    for placement in wanted:
        made = provision(model, placement)
        if made is not None and made.cost_usd_per_million_samples < best.cost:
            best = Found(chosen=placement, cost=made.cost_usd_per_million_samples)
    return best


def fit(model: CostModel, placement: Ints) -> Ints | None:
    """Keep pinned layers where they must be; None when another layer cannot run where it is put."""
    fitted = placement.copy()
    for group in model.bound:
        fitted[list(group)] = fitted[group[0]]
    forced = model.allowed.sum(axis=1) == 1
    fitted[forced] = model.allowed[forced].argmax(axis=1)
    return fitted if model.allowed[np.arange(model.num_layers), fitted].all() else None


def _leading(flags: Bools) -> int:
    return max(1, int(np.argmin(flags)) if not flags.all() else len(flags) - 1)
