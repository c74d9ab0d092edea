"""Random tables of costs and floors, for benchmarks and tests: layers of both kinds, cheap slow types, dear fast ones.

``random_table`` makes small ones that can be checked by brute force: limits are tight in a third, some layers share a
table, and not every floor can be reached. ``long_table`` makes long chains with a floor that a plan with stages of
random length reaches, and limits near what that plan uses.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Table = dict[str, Any]
FLOORS = (1000.0, 3000.0, 8000.0, 20000.0)
"""Samples per second."""


def random_table(seed: int, most_layers: int = 6, most_types: int = 3) -> Table:
    """2 to ``most_layers`` layers, 2 to ``most_types`` types."""
    rng = np.random.default_rng(seed)
    num_layers, num_types = int(rng.integers(2, most_layers + 1)), int(rng.integers(2, most_types + 1))
    highest = (6, 25, 60)[seed % 3]
    resources = [_resource(rng, t) | {"limit": int(rng.integers(1, highest))} for t in range(num_types)]
    costs = {f"l{i}": _layer(rng, num_types) for i in range(num_layers)}
    shared = [["l0", f"l{num_layers - 1}"]] if seed % 4 == 0 and num_layers > 2 else []
    return _table(resources, costs) | {"bound": shared}


def random_floor(seed: int) -> float | None:
    """Samples per second, or none."""
    return None if seed % 10 == 9 else FLOORS[seed // 3 % 4]


def long_table(num_layers: int, num_types: int, seed: int) -> tuple[Table, float]:
    """A table and a floor in samples per second, which stages a fifth to three quarters serial can reach."""
    rng = np.random.default_rng(seed)
    resources = [_resource(rng, t) for t in range(num_types)]
    costs = {f"l{i}": _layer(rng, num_types) for i in range(num_layers)}
    table = _table(resources, costs)
    stages = _random_stages(rng, table)
    terms = [_stage_terms(table, names, t) for names, t in stages]
    time_s = max(serial for parts in terms for serial, _ in parts) * rng.uniform(1.3, 6)
    used = np.zeros(num_types)
    for (_, t), parts in zip(stages, terms, strict=True):
        used[t] += max(1, *(int(np.ceil(parallel / (time_s - serial))) for serial, parallel in parts))
    for t, resource in enumerate(resources):
        near = used[t] > 0 and rng.random() < 0.5
        resource["limit"] = int(np.ceil(used[t] * rng.uniform(1, 1.5))) if near else int(2 * used.sum())
    return table, 1 / time_s


def _resource(rng: np.random.Generator, t: int) -> Table:
    price = float(rng.uniform(0.03, 0.1) * (rng.uniform(5, 60) if t else 1))
    return {"name": f"t{t}", "device": "cuda" if t else "cpu", "price_usd_per_h": price}


def _layer(rng: np.random.Generator, num_types: int) -> Table:
    """Four in ten move data, which dear types do little faster than cores."""
    moves_data = rng.random() < 0.4
    row = {}
    for t in range(num_types):
        speed = 1.0 if t == 0 else rng.uniform(0.5, 2) if moves_data else rng.uniform(5, 60)
        row[f"t{t}"] = {
            "compute_s": float(rng.uniform(0.02, 0.5) / speed),
            "communication_s": float(rng.uniform(0.01, 0.3) / (rng.uniform(0.3, 3) if t else 1)),
            "compute_parallel": float(rng.uniform(0.85, 1)),
            "communication_parallel": float(rng.uniform(0.8, 1)),
        }
    return row


def _table(resources: list[Table], costs: Table) -> Table:
    layers = [{"name": name} for name in costs]
    return {"batch_size": 1000, "resources": resources, "layers": layers, "costs": costs}


def _random_stages(rng: np.random.Generator, table: Table) -> list[tuple[list[str], int]]:
    """Between a twentieth and a quarter as many stages as layers, each on a type that is roughly its cheapest."""
    names, resources = list(table["costs"]), table["resources"]
    count = int(rng.integers(max(2, len(names) // 20), max(3, len(names) // 4)))
    cuts = np.sort(rng.choice(np.arange(1, len(names)), size=min(count, len(names) - 1), replace=False)).tolist()
    stages: list[tuple[list[str], int]] = []
    for begin, end in zip([0, *cuts], [*cuts, len(names)], strict=True):
        inside = names[begin:end]
        dear = [
            sum(table["costs"][name][r["name"]]["compute_s"] for name in inside) * r["price_usd_per_h"]
            for r in resources
        ]
        wanted = np.array(dear) * rng.uniform(0.7, 1.4, len(resources))
        if stages:
            wanted[stages[-1][1]] = np.inf
        stages.append((inside, int(np.argmin(wanted))))
    return stages


def _stage_terms(table: Table, names: list[str], t: int) -> list[tuple[float, float]]:
    """(serial, parallel) seconds per sample of computing and of communicating."""
    rows = [table["costs"][name][f"t{t}"] for name in names]
    parts = []
    for part in ("compute", "communication"):
        total = sum(row[f"{part}_s"] for row in rows) / table["batch_size"]
        parallel = sum(row[f"{part}_s"] * row[f"{part}_parallel"] for row in rows) / table["batch_size"]
        parts.append((total - parallel, parallel))
    return parts
