"""Look-up, backward and Adagrad of a set of embedding tables: heterps beside eager and FBGEMM, in one run.

    python benchmarks/sparse.py --batch 2048 4096 16384

Every repeat runs each contender once, so that whatever else the machine does hits all of them; medians over repeats.
The bytes that have to move (rows read and written, gradients, Adagrad's state) over the bandwidth of a large copy bound
them all. FBGEMM takes part if it can be imported: ``pip install --no-deps fbgemm-gpu-cpu==1.8.0`` beside torch 2.13.0.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heterps_compile import optim
from heterps_compile.kernels.lookup import GroupSpec, LookupSpec, lookup_group, prepare

Step = Callable[[Tensor, Tensor], None]
LEARNING_RATE, EPS = 0.01, 1e-10


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Tables and ids of one run; a bag of one id is an ``nn.Embedding``, a longer one a sum."""

    tables: int
    rows: int
    dim: int
    ids_per_bag: int

    def bytes_per_sample(self) -> int:
        """Read rows, write outputs, read their gradient, read and write rows and state; ids; float32."""
        row = 4 * self.dim
        return self.tables * (self.ids_per_bag * (row + 4 * row + 8) + 2 * row)


def make_tables(sizes: Sizes) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(sizes.rows, sizes.dim, generator=generator)) for _ in range(sizes.tables)]


def columns(ids: Tensor, sizes: Sizes) -> list[Tensor]:
    """``(batch, tables * ids_per_bag)`` into one tensor per table, all views."""
    if sizes.ids_per_bag == 1:
        return list(ids.unbind(1))
    return list(ids.view(-1, sizes.tables, sizes.ids_per_bag).unbind(1))


def training(tables: list[nn.Parameter], forward: Callable[[Tensor], Tensor]) -> Step:
    """Forward, backward and step of torch's own Adagrad."""
    optimizer = torch.optim.Adagrad(tables, lr=LEARNING_RATE, eps=EPS)

    def step(ids: Tensor, grad: Tensor) -> None:
        optimizer.zero_grad()
        forward(ids).backward(grad)
        optimizer.step()

    return step


def heterps(sizes: Sizes) -> Step:
    tables = make_tables(sizes)
    prepare([(sizes.dim, torch.float32)], strict=True)
    optim.install()
    optim.track(tables)
    mode = "none" if sizes.ids_per_bag == 1 else "sum"
    lookups = tuple(LookupSpec(table=k, mode=mode, sparse=True) for k in range(sizes.tables))
    spec, none = GroupSpec(lookups=lookups, layout="concat"), [None] * sizes.tables
    return training(tables, lambda ids: lookup_group(spec, tables, columns(ids, sizes), none, none)[0])


def eager(sizes: Sizes) -> Step:
    tables = make_tables(sizes)

    def forward(ids: Tensor) -> Tensor:
        pairs = zip(columns(ids, sizes), tables, strict=True)
        if sizes.ids_per_bag == 1:
            return torch.cat([F.embedding(column, table, sparse=True) for column, table in pairs], 1)
        return torch.cat([F.embedding_bag(column, table, mode="sum", sparse=True) for column, table in pairs], 1)

    return training(tables, forward)


def fbgemm(sizes: Sizes, optimizer: str) -> Step:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        EmbeddingLocation,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    table = (sizes.rows, sizes.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [table] * sizes.tables, optimizer=EmbOptimType[optimizer], learning_rate=LEARNING_RATE, eps=EPS
    )

    def step(ids: Tensor, grad: Tensor) -> None:
        batch = ids.shape[0]
        flat = ids.view(batch, sizes.tables, sizes.ids_per_bag).transpose(0, 1).reshape(-1)
        offsets = torch.arange(0, flat.numel() + 1, sizes.ids_per_bag)
        module(flat, offsets).backward(grad)

    return step


def contenders(sizes: Sizes) -> dict[str, Step]:
    steps = {"heterps": heterps(sizes), "eager sparse": eager(sizes)}
    if importlib.util.find_spec("fbgemm_gpu"):
        steps["FBGEMM exact"] = fbgemm(sizes, "EXACT_ADAGRAD")
        steps["FBGEMM row-wise"] = fbgemm(sizes, "EXACT_ROWWISE_ADAGRAD")
    else:
        print("FBGEMM is absent: pip install --no-deps fbgemm-gpu-cpu==1.8.0\n")
    return steps


def measure(
    steps: dict[str, Step], sizes: Sizes, batch: int, repeats: int, pick: Callable[[list[float]], float]
) -> dict[str, float]:
    """``pick`` (the median) of the seconds per step of each contender; a repeat runs all of them on the same ids."""
    grad = torch.randn(batch, sizes.tables * sizes.dim)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 2):
        ids = torch.randint(0, sizes.rows, (batch, sizes.tables * sizes.ids_per_bag))
        for name, step in steps.items():
            start = time.perf_counter()
            step(ids, grad)
            if repeat > 1:  # the first two warm up
                seconds[name].append(time.perf_counter() - start)
    return {name: pick(times) for name, times in seconds.items()}


def copy_bandwidth_bytes_per_s() -> float:
    """Bytes read and written per second by copies far larger than the caches."""
    source = torch.zeros(2**26)
    target = torch.empty_like(source)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[2048, 4096, 16384])
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--ids-per-bag", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--fastest", action="store_true", help="the fastest repeat, for a machine that others use too")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    sizes = Sizes(tables=options.tables, rows=options.rows, dim=options.dim, ids_per_bag=options.ids_per_bag)
    bandwidth = copy_bandwidth_bytes_per_s()
    print(f"{sizes}, {options.threads} threads, torch {torch.__version__}, copies at {bandwidth / 1e9:.1f} GB/s\n")
    steps = contenders(sizes)
    names = [*steps, "bytes / bandwidth"]
    print(
        "| batch | "
        + " | ".join(f"{name}, ms" for name in names)
        + " | "
        + " | ".join(f"{n} / heterps" for n in names[1:])
        + " |"
    )
    print("|---" * (2 * len(names)) + "|")
    for batch in options.batch:
        seconds = measure(steps, sizes, batch, options.repeats, min if options.fastest else statistics.median)
        seconds["bytes / bandwidth"] = batch * sizes.bytes_per_sample() / bandwidth
        times = " | ".join(f"{seconds[name] * 1e3:.1f}" for name in names)
        ratios = " | ".join(f"{seconds[name] / seconds['heterps']:.2f}" for name in names[1:])
        print(f"| {batch} | {times} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
