"""Whole training steps of the four click models: heterps, eager and Inductor, in turns in one run.

    python benchmarks/ctr.py [--models dlrm,deepfm] [--rows N] [--batch-size N] [--no-inductor]

Sparse tables: Adagrad, ``torch.compile(model, backend=...)`` and the stock loop for all. Dense tables: Adam; heterps
runs ``@heterps_compile.train_step``, which is where dense gradients come at sparse cost. Ratios are of medians.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import torch
from torch import nn

from heterps_compile.comparison import Speed, contender, machine, race, speed_table
from heterps_compile.data import Batch, Recipe, generate
from heterps_compile.models import MODELS, NUM_TABLES


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.01)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.001)


def main() -> int:
    args = arguments()
    print(machine())
    recipe = Recipe(
        num_samples=args.steps * args.batch_size, test_samples=args.batch_size, rows=(args.rows,) * NUM_TABLES
    )
    batches = tuple(generate(recipe).train.batches(args.batch_size))
    for name in args.models.split(","):
        for sparse in (True, False):
            kind = "sparse gradients, Adagrad" if sparse else "dense gradients, Adam"
            print(f"\n{name}, 26 tables of {args.rows:,} x 16, batch {args.batch_size}, {kind}", flush=True)
            print(speed_table(compare(name, sparse, batches, args)), flush=True)
    return 0


def compare(name: str, sparse: bool, batches: tuple[Batch, ...], args: argparse.Namespace) -> tuple[Speed, ...]:
    torch.manual_seed(0)
    model = MODELS[name]((args.rows,) * NUM_TABLES, 16, sparse=sparse)
    entry = partial(contender, model=model, make_optimizer=adagrad if sparse else adam)
    contenders = [entry("heterps", backend="heterps" if sparse else "train_step"), entry("eager", backend="eager")]
    if not args.no_inductor:
        contenders.append(entry("inductor", backend="inductor"))
    speeds = race(contenders, batches, num_segments=args.segments)
    torch._dynamo.reset()  # the next model starts with no graphs of this one
    return speeds


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=4, help="steps in a segment")
    parser.add_argument("--segments", type=int, default=5)
    parser.add_argument("--no-inductor", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
