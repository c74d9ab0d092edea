"""Prices and datasheet rates of resource types one can rent; plain data, any field can be overridden in a cluster file.

One unit is a physical core (two hardware threads where the cloud sells threads) or a card. Of a unit:

- ``flops_per_s``: dense fp32 peak without tensor cores, since that is what stock training code uses.
- ``tensor_flops_per_s``: dense bf16 peak of the tensor cores (fp16 where there is no bf16), without sparsity.
- ``memory_bytes_per_s``: bandwidth of its memory; of a core, its share of the socket's channels.
- ``interconnect_bytes_per_s``: to the other cards of its host, one direction (NVLink, Infinity Fabric or PCIe).
- ``network_bytes_per_s``: its share of its host's network.
- ``units_per_host``: of the instance that is priced, or of the host whose core is.

``source`` and ``date`` speak of the rates, ``price_source`` and ``price_date`` of the prices. A date is the month the
source was written, or that of reading a source that bears none. Prices differ by region and change, spot prices by the
hour: they are here to compare plans with, so check them before you rent. Spot is the cheapest zone of the region; 0
where none was found. Vendors' datasheets are given as the place named quotes them. "not confirmed" marks figures noted
down without a source at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_READ = "read 2026-12"
_GITHUB = "https://github.com"
_LIGHTNING = f"{_GITHUB}/Lightning-AI/pytorch-lightning @0810121 src/lightning/fabric/utilities/throughput.py"
_KLOCKWOOD = "https://glennklockwood.com/garden/processors"
_HETERPS = "HeterPS (https://arxiv.org/abs/2111.10635), experiments"
_SKYPILOT = f"{_GITHUB}/skypilot-org/skypilot-catalog"


def _core(
    *, clock_ghz: float, memory_bytes: float, memory_rate: float, network: float, per_host: int, source: str
) -> dict[str, Any]:
    """A core with two AVX-512 FMA units: 64 fp32 operations a cycle, at the nominal clock."""
    return {
        "device": "cpu",
        "unit": "core",
        "memory_bytes": memory_bytes,
        "flops_per_s": 64 * clock_ghz * 1e9,
        "memory_bytes_per_s": memory_rate,
        "network_bytes_per_s": network,
        "units_per_host": per_host,
        "billing_minimum_s": 60.0,
        "source": source,
        "date": _READ,
    }


def _card(memory_gb: float, tflops: float, tensor_tflops: float, memory_gb_per_s: float, source: str) -> dict[str, Any]:
    return {
        "device": "cuda",
        "unit": "card",
        "memory_bytes": memory_gb * 1e9,
        "flops_per_s": tflops * 1e12,
        "tensor_flops_per_s": tensor_tflops * 1e12,
        "memory_bytes_per_s": memory_gb_per_s * 1e9,
        "billing_minimum_s": 60.0,
        "source": source,
        "date": _READ,
    }


def _joined(interconnect: float, network: float, per_host: int) -> dict[str, Any]:
    return {
        "interconnect_bytes_per_s": interconnect,
        "network_bytes_per_s": network,
        "units_per_host": per_host,
    }


def _priced(price: float, spot: float, source: str, date: str) -> dict[str, Any]:
    return {
        "price_usd_per_h": price,
        "spot_price_usd_per_h": spot,
        "price_source": source,
        "price_date": date,
    }


def _aws(instance: str, units: int, price: float, spot: float) -> dict[str, Any]:
    """us-east-1, as of a snapshot that has the price cuts of June 2025; the snapshot itself bears no date."""
    source = f"AWS us-east-1, {instance} / {units}: {_SKYPILOT} @e385a0d catalogs/v8/aws/vms.csv"
    return _priced(round(price / units, 5), round(spot / units, 5), source, "2025-06 or later")


CATALOG: Mapping[str, Mapping[str, Any]] = {
    # the paper's figures: a core of a Xeon Gold 6271C, a V100 with InfiniBand 100 Gb/s shared by 8 cards
    "cpu": {
        **_core(
            clock_ghz=2.6,
            memory_bytes=4.0e9,
            memory_rate=5.9e9,
            network=2.6e8,
            per_host=48,
            source=f"{_HETERPS}: Xeon Gold 6271C, 24 cores at 2.6 GHz, 100 Gb/s for two sockets of "
            "6 channels of DDR4-2933; not confirmed",
        ),
        **_priced(0.04, 0.0, f"{_HETERPS}, price of a core", "2021-11"),
    },
    "v100": {
        **_card(32, 15.7, 125, 900, f"NVIDIA V100 datasheet (SXM2, fp16), by {_LIGHTNING}"),
        **_joined(1.5e11, 1.56e9, 8),
        **_priced(
            2.42,
            round(5.06 / 8, 5),
            f"{_HETERPS}, price of a card; spot: AWS us-east-1, p3dn.24xlarge / 8 (on demand 3.9015): "
            f"{_SKYPILOT} @e385a0d catalogs/v8/aws/vms.csv",
            "2021-11, spot 2025-06 or later",
        ),
    },
    "cpu-aws": {
        **_core(
            clock_ghz=2.4,
            memory_bytes=4.295e9,
            memory_rate=6.4e9,
            network=6.5e7,
            per_host=96,
            source="Xeon Platinum 8488C: 2.4 GHz, 48 cores on 8 channels of DDR5-4800, 50 Gb/s for 96; not confirmed",
        ),
        **_aws("c7i.48xlarge", 96, 8.568, 2.4212),
    },
    "cpu-gcp": {
        **_core(
            clock_ghz=2.0,
            memory_bytes=4.295e9,
            memory_rate=7.0e9,
            network=1.76e8,
            per_host=44,
            source="Xeon Platinum 8481C: 44 of its cores on 8 channels of DDR5-4800, 62 Gb/s for them; not confirmed",
        ),
        **_priced(
            round(3.74229 / 44, 5),
            round(0.57235 / 44, 5),
            f"GCP us-central1, c3-highcpu-88 / 44: {_SKYPILOT} @006059e catalogs/v8/gcp/vms.csv",
            "2025-06 or later",
        ),
    },
    "cpu-azure": {
        **_core(
            clock_ghz=2.7,
            memory_bytes=4.295e9,
            memory_rate=5.4e9,
            network=1.04e8,
            per_host=36,
            source="the oldest host of Fsv2, a Xeon Platinum 8168: 2.7 GHz, 30 Gb/s for 36 cores; not confirmed",
        ),
        **_priced(
            0.0846,
            0.00931,
            f"Azure East US, F2s_v2: {_SKYPILOT} @098741e catalogs/v6/azure/vms.csv",
            "2024 or later",
        ),
    },
    "t4": {
        **_card(
            16,
            8.1,
            65,
            320,
            f"NVIDIA T4 datasheet (fp16), by {_LIGHTNING}; memory: https://sysrqmts.com/en/gpus/nvidia/tesla/t4",
        ),
        **_joined(1.6e10, 6.25e8, 1),
        **_aws("g4dn.xlarge", 1, 0.526, 0.2069),
    },
    "a10g": {
        **_card(
            24,
            31.2,
            125,
            600,
            f"NVIDIA A10 datasheet, by {_LIGHTNING}; memory: https://www.baseten.co/blog/"
            "nvidia-a10-vs-a10g-for-ml-model-inference/, which says that the A10G's own FLOP/s differ; not confirmed",
        ),
        **_joined(3.2e10, 1.25e9, 1),
        **_aws("g5.xlarge", 1, 1.006, 0.4591),
    },
    "l4": {
        **_card(
            24,
            30.3,
            121,
            300,
            "https://fpsbench.com/compare/gpu/nvidia-l4-vs-nvidia-tesla-m40; "
            "tensor: half of the sparse rate in https://grokipedia.com/page/NVIDIA_L4_vs_L40S",
        ),
        **_joined(3.2e10, 1.25e9, 1),
        **_aws("g6.xlarge", 1, 0.8048, 0.4007),
    },
    "a100-40": {
        **_card(40, 19.5, 312, 1555, f"NVIDIA A100 SXM datasheet, by {_KLOCKWOOD}/A100"),
        **_joined(3.0e11, 6.25e9, 8),
        **_aws("p4d.24xlarge", 8, 21.957642, 6.289),
    },
    "a100-80": {
        **_card(80, 19.5, 312, 2039, f"NVIDIA A100 SXM datasheet, by {_KLOCKWOOD}/A100"),
        **_joined(3.0e11, 6.25e9, 8),
        **_aws("p4de.24xlarge", 8, 27.44705, 9.7262),
    },
    "h100": {
        **_card(80, 67, 989.5, 3350, f"NVIDIA H100 SXM datasheet, by {_LIGHTNING}; memory: {_KLOCKWOOD}/h100"),
        **_joined(4.5e11, 5.0e10, 8),
        **_aws("p5.48xlarge", 8, 55.04, 14.246),
    },
    "h200": {
        **_card(141, 67, 989.5, 4800, "https://aiwiki.ai/wiki/nvidia_h200: memory of its own, FLOP/s of the H100"),
        **_joined(4.5e11, 5.0e10, 8),
        **_aws("p5en.48xlarge", 8, 63.296, 19.1652),
    },
    "mi300x": {
        **_card(
            192,
            163.4,
            1307.4,
            5300,
            "https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/"
            "amd-instinct-mi300x-data-sheet.pdf, as quoted by others; network: 8 x 400 Gb/s a host, not confirmed",
        ),
        **_joined(4.48e11, 5.0e10, 8),
        **_priced(
            6.00,
            1.71,
            "Azure list price, spot of Crusoe: https://www.cliffcenter.com/research/amd-inference-economics",
            "2026-05",
        ),
    },
    "kunlun": {
        **_card(32, 32, 128, 512, "Kunlun 2, R200 and R300 (fp16): https://www.kunlunxin.com, as quoted by others"),
        **_joined(3.2e10, 1.56e9, 8),
        **_priced(1.50, 0.0, "not confirmed: no public price was found, this one is our assumption", ""),
        "device": "xpu",
    },
    # the simulated accelerator of this package: runs on CPU memory, its price and rates stand for a small card
    "sim": {
        **_card(16, 10, 10, 500, "simulated accelerator; invented figures"),
        **_joined(1.25e9, 1.25e9, 1),
        **_priced(1.00, 0.0, "invented", ""),
        "device": "sim",
        "billing_minimum_s": 0.0,
        "date": "",
    },
}
