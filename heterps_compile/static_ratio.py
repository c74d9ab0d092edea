"""StaRatio and StaPSRatio: the provisioning by fixed ratios that HeterPS compares its own with.

Enters: a cost model, the placement as type indices, and the ratio. Leaves: units per stage, or None when no multiple of
the ratio reaches the floor within the limits. Refused: ratios that are not positive or leave out a type in use.

- StaRatio rents CPU cores and cards in the fixed proportion of a box, whatever the stages need of each.
- StaPSRatio balances the stages, and adds parameter-server cores in fixed proportion to the workers.

HeterPS (arXiv 2111.10635) names both baselines and publishes neither their ratios nor their code: defaults are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from heterps_compile.cluster import ResourceType
from heterps_compile.cost_model import CostModel, Floats, Ints, cost_usd_per_million_samples, stage_time_s
from heterps_compile.cost_terms import BOTH_WAYS
from heterps_compile.costs import CostTable
from heterps_compile.errors import OptionError
from heterps_compile.provision import Provision, Stages

SERVERS_PER_WORKER = 1.0
"""A parameter-server core beside each worker, the usual layout of a CPU job; the paper gives no number."""
ROUNDING = 1e-9
"""Part by which a quotient may miss the whole number it stands for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Workers and the parameter-server cores beside them; price and cost are of both."""

    workers: Provision
    server_units: int
    price_usd_per_h: float
    cost_usd_per_million_samples: float


def sta_ratio(model: CostModel, chosen: Ints, box: Mapping[str, int] | None = None) -> Provision | None:
    """The smallest multiple of ``box`` (type -> units) with which the placement (L,) reaches the floor, or None.

    Only types the placement uses are rented. Without ``box`` the ratio is that of the cluster's limits: one unit of the
    scarcest type in use with its share of the others. Units beyond what reaches the floor go to the stages in
    proportion to their need. Raises :class:`OptionError` for a box that lacks a type in use.
    """
    stages = Stages.of(model, chosen[None])
    fewest = stages.fewest(model.slowest_s)
    used = np.unique(stages.kind)
    ratio = _ratio(model, used, box)
    required = np.bincount(stages.kind, fewest, model.num_types)[used]
    boxes = float(np.max(np.floor((required - 1) / ratio + ROUNDING) + 1))  # the fewest: ceil(boxes * ratio) suffices
    rented = np.ceil(boxes * ratio - ROUNDING)
    if (rented > model.limit[used]).any():  # also where no number of units is enough
        return None
    units = fewest.copy()
    for kind, count in zip(used, rented, strict=True):
        here = stages.kind == kind
        units[here] += shared_out(int(count - fewest[here].sum()), fewest[here])
    made = _provision(model, stages, units)
    return made if made.slowest_s <= model.slowest_s * (1 + ROUNDING) else None  # replicas can be in each other's way


def sta_ps_ratio(
    model: CostModel,
    chosen: Ints,
    costs: CostTable,
    server: ResourceType,
    servers_per_worker: float = SERVERS_PER_WORKER,
) -> Served | None:
    """The fewest workers that reach the floor while their servers, in fixed proportion, hold and serve the tables.

    Where the servers of the balanced workers are too few, more of both are rented. Servers count towards the limit of
    ``server``, and the pipeline is no faster than they serve. Raises :class:`OptionError` for a ratio that is not
    positive.
    """
    if not 0 < servers_per_worker < math.inf:
        raise OptionError(f"servers_per_worker is {servers_per_worker} (allowed: a number > 0)")
    stages = Stages.of(model, chosen[None])
    units = stages.fewest(model.slowest_s)
    if not np.isfinite(units).all():
        return None
    needed = parameter_server_units(costs, server, 1 / model.slowest_s)
    balanced = int(units.sum())
    num_workers = max(balanced, math.floor((needed - 1) / servers_per_worker) + 1)
    units += shared_out(num_workers - balanced, units)
    servers = math.ceil(num_workers * servers_per_worker - ROUNDING)
    beside = np.array([servers if name == server.name else 0 for name in model.types])
    usage = np.bincount(stages.kind, units, model.num_types) + beside
    if (usage > model.limit).any() or (server.name not in model.types and servers > server.limit):
        return None
    serving_s = served_s(costs, server, servers)
    workers = _provision(model, stages, units, serving_s)
    if workers.slowest_s > model.slowest_s * (1 + ROUNDING):
        return None
    price = servers * server.price_usd_per_h
    cost = float(cost_usd_per_million_samples(price, model.paid_s(max(workers.slowest_s, serving_s))))
    return Served(
        workers=workers,
        server_units=servers,
        price_usd_per_h=workers.price_usd_per_h + price,
        cost_usd_per_million_samples=workers.cost_usd_per_million_samples + cost,
    )


def parameter_server_units(costs: CostTable, resource: ResourceType, throughput: float) -> int:
    """Cores that hold the tables and serve their rows at ``throughput`` samples/s: the larger of the two; 0 without.

    Held are the parameters and training state of the layers that read table rows, over ``memory_bytes``. Served are
    pulls and pushes, ``2 x touched bytes per sample x throughput``, over ``network_bytes_per_s``. A memory or rate of 0
    is not stated and asks for nothing.
    """
    tables = [layer for layer in costs.layers if layer.touched_bytes_per_sample > 0]
    held_bytes = sum(layer.parameter_bytes + layer.state_bytes for layer in tables)
    holding = held_bytes / resource.memory_bytes if resource.memory_bytes else 0.0
    serving = served_s(costs, resource, 1) * throughput
    return math.ceil(max(holding, serving, 1.0 if tables else 0.0) * (1 - ROUNDING))


def served_s(costs: CostTable, resource: ResourceType, servers: int) -> float:
    """Seconds per sample in which ``servers`` cores send the rows of the tables and take their gradients."""
    touched = sum(layer.touched_bytes_per_sample for layer in costs.layers)
    return BOTH_WAYS * touched / resource.network_bytes_per_s / servers if resource.network_bytes_per_s else 0.0


def shared_out(count: int, need: Floats) -> Floats:
    """``count`` units over stages in proportion to ``need`` (S,), in whole numbers: largest remainders first."""
    shares = count * need / need.sum()
    units: Floats = np.floor(shares)
    remainder = np.argsort(units - shares, kind="stable")[: count - int(units.sum())]
    units[remainder] += 1
    return units


def _ratio(model: CostModel, used: Ints, box: Mapping[str, int] | None) -> Floats:
    """Units of each used type in one box."""
    if box is None:
        limits: Floats = model.limit[used]
        shape: Floats = limits / limits.min()
        return shape
    names = [model.types[kind] for kind in used]
    for name in names:
        if box.get(name, 0) < 1:
            raise OptionError(f"box holds {box.get(name, 0)} units of {name}, which the placement uses (allowed: >= 1)")
    return np.array([float(box[name]) for name in names])


def _provision(model: CostModel, stages: Stages, units: Floats, least_s: float = 0.0) -> Provision:
    """Price and cost of ``units`` for a pipeline that takes at least ``least_s`` per sample."""
    usage = np.bincount(stages.kind, units, model.num_types).astype(float)
    return Provision(
        starts=stages.starts,
        kinds=stages.kind,
        units=units.astype(np.int64),
        stage_s=stage_time_s(stages.terms, units),
        price_usd_per_h=float(model.price_usd_per_h @ usage),
        cost_usd_per_million_samples=float(model.bill(usage, max(float(stages.pipeline_s(units)[0]), least_s))),
        stretch=float(stages.stretch[0]),
    )
