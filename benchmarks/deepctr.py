"""Training steps of unmodified deepctr-torch models with dense gradients: eager, its dense part, heterps; in turns.

    python benchmarks/deepctr.py [--models DeepFM,DCN] [--optimizer adam] [--rows N] [--batch-size N] [--steps N]

"dense part" is the same model in eager with tables of 100 rows: what a step costs when tables cost nothing. Wanted of
heterps: at most 1.3 times that plus 4 ms. L2 is off, as it moves every row at every step. Then both train ``--check``
steps side by side from equal weights: "loss" is the largest difference, "weights" and "state" the largest relative
differences after a flush. Times are medians over segments. Raises ImportError without deepctr-torch.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

import heterps_compile
from heterps_compile.comparison import Contender, Speed, Step, machine, race
from heterps_compile.data import Batch

MODELS = ("DeepFM", "DCN", "NFM", "WDL", "AutoInt", "PNN", "FiBiNET", "xDeepFM")
NUM_TABLES, NUM_DENSE, DIM = 26, 13, 16
DENSE_PART_ROWS = 100
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adam": lambda model: Adam(model.parameters(), lr=0.001),
    "adamw": lambda model: AdamW(model.parameters(), lr=0.001),
    "rmsprop": lambda model: RMSprop(model.parameters(), lr=0.001),
    "momentum": lambda model: SGD(model.parameters(), lr=0.01, momentum=0.9),
}
HEADER = (
    f"{'':10}{'eager ms':>10}{'dense part':>12}{'heterps ms':>12}{'wanted':>8}{'met':>5}{'vs eager':>10}"
    f"{'loss':>10}{'weights':>10}{'state':>10}"
)


def main() -> int:
    args = arguments()
    if find_spec("deepctr_torch") is None:
        print("skipped: needs deepctr-torch (pip install --no-deps deepctr-torch==0.3.0)", file=sys.stderr)
        return 0
    torch.set_num_threads(args.threads)
    print(f"{machine()}\n{NUM_TABLES} tables of {args.rows:,} x {DIM}, batch {args.batch_size}, {args.optimizer}")
    print(HEADER, flush=True)
    batches = make_batches(args)
    ratios = [compare(name, batches, args) for name in args.models.split(",")]
    print(f"geometric mean {statistics.geometric_mean(ratios):.2f} x")
    return 0


def make_batches(args: argparse.Namespace) -> tuple[Batch, ...]:
    """Ids spread evenly over all rows, which is the least reuse a batch can have."""
    generator = torch.Generator().manual_seed(0)
    shape = (args.batch_size, NUM_TABLES)
    return tuple(
        Batch(
            dense=torch.rand(args.batch_size, NUM_DENSE, generator=generator),
            ids=torch.randint(0, args.rows, shape, generator=generator),
            labels=torch.randint(0, 2, (args.batch_size,), generator=generator).float(),
        )
        for _ in range(args.steps)
    )


def compare(name: str, batches: tuple[Batch, ...], args: argparse.Namespace) -> float:
    """Print the row of a model; how many times faster than eager it trains."""
    make_optimizer = OPTIMIZERS[args.optimizer]
    model, small = build(name, args.rows), build(name, DENSE_PART_ROWS)
    contenders = [
        contender("eager", model, make_optimizer, args.rows),
        contender("dense part", small, make_optimizer, DENSE_PART_ROWS),
        contender("heterps", model, make_optimizer, args.rows),
    ]
    speeds = race(contenders, batches, num_segments=args.segments)
    eager_ms, dense_part_ms, heterps_ms = (step_ms(speed, args.batch_size) for speed in speeds)
    wanted_ms = 1.3 * dense_part_ms + 4
    met = "yes" if heterps_ms <= wanted_ms else "no"
    differences = differences_after(model, make_optimizer, batches, args) if args.check else ()
    print(
        f"{name:10}{eager_ms:10.1f}{dense_part_ms:12.1f}{heterps_ms:12.1f}{wanted_ms:8.1f}{met:>5}"
        f"{eager_ms / heterps_ms:8.2f} x" + "".join(f"{difference:10.1e}" for difference in differences),
        flush=True,
    )
    torch._dynamo.reset()  # the next model starts with no graphs of this one
    return eager_ms / heterps_ms


def build(name: str, rows: int) -> nn.Module:
    """The model as deepctr-torch makes it, with every L2 penalty off."""
    features, model_class = import_module("deepctr_torch.inputs"), getattr(import_module("deepctr_torch.models"), name)
    sparse = [features.SparseFeat(f"C{i}", vocabulary_size=rows, embedding_dim=DIM) for i in range(NUM_TABLES)]
    columns = sparse + [features.DenseFeat(f"I{i}", 1) for i in range(NUM_DENSE)]
    parameters = inspect.signature(model_class).parameters
    no_penalty = {parameter: 0 for parameter in parameters if parameter.startswith("l2_reg")}
    lists = (columns, columns) if "linear_feature_columns" in parameters else (columns,)
    model: nn.Module = model_class(*lists, task="binary", **no_penalty)
    return model


def contender(name: str, model: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer], rows: int) -> Contender:
    def make() -> Step:
        own = copy.deepcopy(model)
        return training_step(own, make_optimizer(own), rows, owned=name == "heterps")

    return Contender(name=name, make=make)


def training_step(model: nn.Module, optimizer: Optimizer, rows: int, *, owned: bool) -> Step:
    """The stock step, or the same under ``train_step`` if ``owned``; ids are taken modulo ``rows``."""
    loss_of = partial(click_loss, rows=rows)
    if owned:
        step = heterps_compile.train_step(loss_of, optimizer=optimizer)
        return lambda batch: step(model, batch)

    def stock(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return stock


def click_loss(model: nn.Module, batch: Batch, *, rows: int) -> Tensor:
    """Mean binary cross-entropy; the model takes ids and dense features side by side in one float32 matrix."""
    x = torch.cat(((batch.ids % rows).float(), batch.dense), 1)
    return binary_cross_entropy(model(x).squeeze(1), batch.labels)


def step_ms(speed: Speed, batch_size: int) -> float:
    if speed.failure:
        raise RuntimeError(f"{speed.name} failed: {speed.failure}")
    return 1e3 * batch_size / speed.samples_per_s


def differences_after(
    model: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    batches: Sequence[Batch],
    args: argparse.Namespace,
) -> tuple[float, float, float]:
    """Largest difference of the loss, and of weights and optimizer state relative to the largest of each tensor."""
    models = [copy.deepcopy(model), copy.deepcopy(model)]
    optimizers = [make_optimizer(own) for own in models]
    eager, ours = (
        training_step(own, optimizer, args.rows, owned=owned)
        for own, optimizer, owned in zip(models, optimizers, (False, True), strict=True)
    )
    of_loss = 0.0
    for number in range(args.check):
        batch = batches[number % len(batches)]
        of_loss = max(of_loss, abs(eager(batch).item() - ours(batch).item()))
    heterps_compile.flush(models[1])
    weights = [list(own.parameters()) for own in models]
    states = [
        [value for p in own.parameters() for value in optimizer.state[p].values() if isinstance(value, Tensor)]
        for own, optimizer in zip(models, optimizers, strict=True)
    ]
    return of_loss, largest_relative(*weights), largest_relative(*states)


def largest_relative(theirs: Sequence[Tensor], ours: Sequence[Tensor]) -> float:
    pairs = zip(theirs, ours, strict=True)
    return max((((a - b).abs().max() / a.abs().max().clamp_min(1e-30)).item() for a, b in pairs), default=0.0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adam")
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5, help="steps in a segment")
    parser.add_argument("--segments", type=int, default=7)
    parser.add_argument("--check", type=int, default=100, help="steps to train beside eager; 0 leaves it out")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
