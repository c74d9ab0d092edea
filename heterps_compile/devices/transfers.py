"""How much has crossed between the CPU and the simulated accelerator, so that tests and reports can say so."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfers:
    """What has crossed between CPU and ``sim`` since the start; subtract an earlier value to measure a span."""

    num_to_sim: int = 0
    bytes_to_sim: int = 0
    num_to_cpu: int = 0
    bytes_to_cpu: int = 0

    def __sub__(self, earlier: Transfers) -> Transfers:
        return Transfers(
            num_to_sim=self.num_to_sim - earlier.num_to_sim,
            bytes_to_sim=self.bytes_to_sim - earlier.bytes_to_sim,
            num_to_cpu=self.num_to_cpu - earlier.num_to_cpu,
            bytes_to_cpu=self.bytes_to_cpu - earlier.bytes_to_cpu,
        )


class Odometer:
    """Running totals for the one device of this process; autograd moves gradients from threads of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.total = Transfers()

    def count(self, moved: torch.Tensor, *, to_sim: bool) -> None:
        """Add one crossing of a real tensor; tracing with fake tensors moves nothing."""
        if type(moved) not in (torch.Tensor, torch.nn.Parameter):
            return
        size = 0 if moved.layout is not torch.strided else moved.numel() * moved.element_size()
        with self._lock:
            now = self.total
            self.total = Transfers(
                num_to_sim=now.num_to_sim + to_sim,
                bytes_to_sim=now.bytes_to_sim + size * to_sim,
                num_to_cpu=now.num_to_cpu + (not to_sim),
                bytes_to_cpu=now.bytes_to_cpu + size * (not to_sim),
            )


ODOMETER = Odometer()


def transfers() -> Transfers:
    """The running totals of what crossed between CPU and ``sim`` in this process."""
    return ODOMETER.total
