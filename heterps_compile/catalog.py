"""Prices and datasheet rates of resource types one can rent; plain data, any field can be overridden in a cluster file.

One unit is a physical core (two hardware threads where the cloud sells threads) or a card. ``flops_per_s`` is the
dense fp32 peak without tensor cores, since that is what stock training code uses; bandwidths are peaks. Rates follow
the vendors' datasheets and prices the list prices of the region named, but both were **noted down from memory at the
date given**: check them before you rent, and override what differs. ``network_bytes_per_s`` is a unit's share of its
host's network. Spot prices are 0 where not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_AWS = "AWS on-demand us-east-1"
_DATE = "2025-06"


def _core(price: float, spot: float, flops: float, memory_rate: float, network: float, source: str) -> dict[str, Any]:
    return {
        "device": "cpu",
        "unit": "core",
        "price_usd_per_h": price,
        "spot_price_usd_per_h": spot,
        "memory_bytes": 4.0e9,
        "flops_per_s": flops,
        "memory_bytes_per_s": memory_rate,
        "network_bytes_per_s": network,
        "billing_minimum_s": 60.0,
        "source": source,
        "date": _DATE,
    }


def _card(
    price: float, spot: float, memory: float, flops: float, memory_rate: float, network: float, source: str
) -> dict[str, Any]:
    return {
        "device": "cuda",
        "unit": "card",
        "price_usd_per_h": price,
        "spot_price_usd_per_h": spot,
        "memory_bytes": memory,
        "flops_per_s": flops,
        "memory_bytes_per_s": memory_rate,
        "network_bytes_per_s": network,
        "billing_minimum_s": 60.0,
        "source": source,
        "date": _DATE,
    }


CATALOG: Mapping[str, Mapping[str, Any]] = {
    # the paper's figures: a core of a Xeon Gold 6271C, a V100 with InfiniBand 100 Gb/s shared by 8 cards
    "cpu": _core(
        0.04, 0.0, 8.3e10, 5.9e9, 2.6e8, "HeterPS price per core; Xeon Gold 6271C datasheet: 2.6 GHz, AVX-512"
    ),
    "v100": _card(
        2.42, 0.92, 32e9, 15.7e12, 9.0e11, 1.56e9, "HeterPS price; NVIDIA V100 SXM2 32 GB datasheet; spot as AWS p3"
    ),
    "cpu-aws": _core(0.0893, 0.036, 1.2e11, 6.4e9, 1.5e8, f"{_AWS}, c7i per 2 vCPU; Xeon Platinum 8488C datasheet"),
    "cpu-gcp": _core(0.0840, 0.027, 1.2e11, 7.0e9, 1.5e8, "GCP on-demand us-central1, c3-highcpu per 2 vCPU"),
    "cpu-azure": _core(0.0846, 0.025, 1.1e11, 6.4e9, 1.5e8, "Azure pay-as-you-go East US, Fsv2 per 2 vCPU"),
    "t4": _card(0.526, 0.16, 16e9, 8.1e12, 3.2e11, 6.0e8, f"{_AWS}, g4dn.xlarge; NVIDIA T4 datasheet"),
    "a10g": _card(1.006, 0.40, 24e9, 3.12e13, 6.0e11, 1.2e9, f"{_AWS}, g5.xlarge; NVIDIA A10 datasheet"),
    "l4": _card(0.805, 0.32, 24e9, 3.03e13, 3.0e11, 1.2e9, f"{_AWS}, g6.xlarge; NVIDIA L4 datasheet"),
    "a100-40": _card(4.10, 1.50, 40e9, 1.95e13, 1.555e12, 6.25e9, f"{_AWS}, p4d.24xlarge / 8; NVIDIA A100 datasheet"),
    "a100-80": _card(5.12, 1.90, 80e9, 1.95e13, 2.039e12, 6.25e9, f"{_AWS}, p4de.24xlarge / 8; NVIDIA A100 datasheet"),
    "h100": _card(6.88, 3.10, 80e9, 6.7e13, 3.35e12, 5.0e10, f"{_AWS}, p5.48xlarge / 8; NVIDIA H100 SXM datasheet"),
    "h200": _card(7.91, 0.0, 141e9, 6.7e13, 4.8e12, 5.0e10, f"{_AWS}, p5en.48xlarge / 8; NVIDIA H200 SXM datasheet"),
    "mi300x": _card(
        6.00, 0.0, 192e9, 1.634e14, 5.3e12, 5.0e10, "Azure ND MI300X v5 / 8 in East US; AMD Instinct MI300X datasheet"
    ),
    "kunlun": {
        **_card(1.50, 0.0, 32e9, 3.2e13, 5.12e11, 1.56e9, "Kunlun 2 (R200) datasheet; the price is our assumption"),
        "device": "xpu",
    },
    # the simulated accelerator of this package: runs on CPU memory, its price and rates stand for a small card
    "sim": {
        **_card(1.00, 0.0, 16e9, 1.0e13, 5.0e11, 1.25e9, "simulated accelerator; invented figures"),
        "device": "sim",
        "billing_minimum_s": 0.0,
        "date": "",
    },
}
