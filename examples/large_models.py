"""Models too large for this machine, to plan fleets for: their parameters have shapes and no memory.

    heterps plan examples.large_models:dlrm --cluster examples/fleet.yaml --data-rate 200000
    heterps plan examples.large_models:deepfm --cluster examples/fleet.yaml --data-rate 200000
    heterps plan examples.large_models:matchnet --cluster examples/fleet.yaml --data-rate 200000

Run from the root of the repository. What is on torch's ``meta`` device cannot be measured, so times are estimates from
the rates of the resource types.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heterps_compile.models import DLRM, NUM_DENSE, NUM_TABLES, DeepFM, MatchNet

BATCH_SIZE = 8192
ROWS = 40_000_000
TOP = (4096, 4096, 2048, 1024)


def click_inputs() -> tuple[Tensor, Tensor]:
    """``dense`` and ``ids`` of a batch, shapes only."""
    dense, ids = (BATCH_SIZE, NUM_DENSE), (BATCH_SIZE, NUM_TABLES)
    return torch.empty(dense, device="meta"), torch.empty(ids, dtype=torch.int64, device="meta")


def dlrm() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """26 tables of 40 million rows of 64, 266 GB, under wide layers: memory for some, arithmetic for others."""
    with torch.device("meta"):
        return DLRM((ROWS,) * NUM_TABLES, dim=64, bottom=(512, 256), top=TOP, sparse=True), click_inputs()


def deepfm() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """26 tables of 40 million rows of 16, and as many of width 1: 71 GB of rows."""
    with torch.device("meta"):
        return DeepFM((ROWS,) * NUM_TABLES, dim=16, deep=(1024, 1024, 1024), sparse=True), click_inputs()


def matchnet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A table of 200 million users and one of as many items, which is looked up twice; rows of 32."""
    with torch.device("meta"):
        return MatchNet(rows=200_000_000, dim=32, sparse=True), click_inputs()
