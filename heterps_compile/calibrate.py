"""What this machine's CPU does: matrix products, streaming, random rows, copies. Measured once, then remembered.

Enters: nothing but the machine. Leaves: a :class:`Calibration`, rates of ONE core with torch's own operations, about
half a second of work. Other load on the machine lowers what is measured, so the best of several runs counts.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch

from heterps_compile import cache
from heterps_compile.cluster import Cluster, ResourceType, num_cores

MATMUL_SIZE = 768
STREAM_BYTES = 2**26
"""Beyond the caches of one core; the copy reads as much and writes as much."""
ROW_BYTES = 64
RUNS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Rates of one core: products in float32, bytes read and written by a sum, bytes of random rows, bytes copied."""

    flops_per_s: float
    stream_bytes_per_s: float
    gather_bytes_per_s: float
    copy_bytes_per_s: float
    cores: int

    def applied(self, cluster: Cluster) -> Cluster:
        """The cluster with these rates for its CPU types, so that classes and estimates fit this machine.

        What a stage reads here lies in memory: it comes at the rate of a copy, not of a network.
        """
        return Cluster(resources=tuple(self._own(resource) for resource in cluster), links=cluster.links)

    def _own(self, resource: ResourceType) -> ResourceType:
        if resource.is_accelerator:
            return resource
        return replace(
            resource,
            flops_per_s=self.flops_per_s,
            memory_bytes_per_s=self.stream_bytes_per_s,
            network_bytes_per_s=self.copy_bytes_per_s,
            source="measured by calibrate() on the machine that planned",
        )


def calibrate(*, refresh: bool = False) -> Calibration:
    """The calibration of this machine, from the cache unless ``refresh``; a cache that cannot be read is made anew."""
    key = _machine_key()
    names = {item.name for item in fields(Calibration)}
    saved = None if refresh else cache.load("calibration", key)
    if saved is not None and set(saved) == names and all(isinstance(v, (int, float)) for v in saved.values()):
        return Calibration(**saved)
    found = _measure()
    cache.save("calibration", key, asdict(found))
    return found


def _measure() -> Calibration:
    threads = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    try:
        torch.set_num_threads(1)
        with torch.inference_mode():
            return Calibration(
                flops_per_s=_matmul_rate(generator),
                stream_bytes_per_s=_stream_rate(),
                gather_bytes_per_s=_gather_rate(generator),
                copy_bytes_per_s=_copy_rate(),
                cores=num_cores(),
            )
    finally:
        torch.set_num_threads(threads)


def _matmul_rate(generator: torch.Generator) -> float:
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, generator=generator) for _ in range(2))
    out = torch.empty(MATMUL_SIZE, MATMUL_SIZE)
    return 2 * MATMUL_SIZE**3 / _best_s(lambda: torch.mm(a, b, out=out))


def _stream_rate() -> float:
    """Bytes of an in-place addition, which reads and writes each."""
    a = torch.ones(STREAM_BYTES // 4)
    return 2 * STREAM_BYTES / _best_s(lambda: a.add_(1.0))


def _copy_rate() -> float:
    a, b = torch.ones(STREAM_BYTES // 4), torch.ones(STREAM_BYTES // 4)
    return STREAM_BYTES / _best_s(lambda: b.copy_(a))


def _gather_rate(generator: torch.Generator) -> float:
    """Bytes of rows of ``ROW_BYTES`` gathered at random from a table beyond the caches."""
    table = torch.ones(4 * STREAM_BYTES // ROW_BYTES, ROW_BYTES // 4)
    ids = torch.randint(0, len(table), (2**17,), generator=generator)
    out = torch.empty(len(ids), ROW_BYTES // 4)
    return len(ids) * ROW_BYTES / _best_s(lambda: torch.index_select(table, 0, ids, out=out))


def _best_s(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def _machine_key() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    model = next((line for line in lines if line.startswith("model name")), platform.processor())
    text = f"{platform.node()} {platform.machine()} {model} {num_cores()} {torch.__version__}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]
