"""Prices and datasheet rates of resource types one can rent; any field can be overridden in a cluster file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CATALOG: Mapping[str, Mapping[str, Any]] = {
    "cpu": {"device": "cpu", "unit": "core", "price_usd_per_h": 0.04, "memory_bytes": 4e9, "flops_per_s": 4e10,
            "memory_bytes_per_s": 1e10, "network_bytes_per_s": 5e8},
    "v100": {"device": "cuda", "price_usd_per_h": 2.42, "memory_bytes": 32e9, "flops_per_s": 15.7e12,
             "memory_bytes_per_s": 9e11, "network_bytes_per_s": 1.25e10},
    "sim": {"device": "sim", "price_usd_per_h": 1.0, "memory_bytes": 16e9, "flops_per_s": 1e13,
            "memory_bytes_per_s": 5e11, "network_bytes_per_s": 1.25e10},
}  # fmt: skip
