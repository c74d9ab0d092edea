"""Train a click-through-rate model with stock PyTorch code, with or without heterps, and compare the two.

    python examples/train_ctr.py                                            # generated clicks, DLRM, Adagrad
    python examples/train_ctr.py --train train.csv --test test.csv --model deepfm --compare-eager

Files are Criteo's (CSV or TSV, ``Label,I1-I13,C1-C26``). Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm

import heterps_compile
from heterps_compile.data import Batch, ClickLog, Recipe, generate, read_criteo
from heterps_compile.metrics import auc, log_loss
from heterps_compile.models import MODELS

OPTIMIZERS = {
    name.lower(): cls
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}
OPTIMIZERS |= {"sparse_adam": torch.optim.SparseAdam}
for unfit in ("lbfgs", "muon"):  # one wants a closure, the other takes matrices only
    OPTIMIZERS.pop(unfit, None)
TAKES_SPARSE_GRADIENTS = ("adagrad", "sgd", "sparse_adam", "sparseadam")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one training run gave."""

    logits: Tensor
    samples_per_s: float


def main() -> int:
    args = arguments()
    torch.manual_seed(args.seed)
    train, test, planted_auc = load(args)
    model = MODELS[args.model](train.rows, args.dim, sparse=args.sparse)
    backends = [args.backend, *(["eager"] if args.compare_eager and args.backend != "eager" else [])]
    print(f"model {args.model}, {args.optimizer} lr {args.lr}, {'sparse' if args.sparse else 'dense'} gradients")
    print(f"training samples {len(train)}, held-out samples {len(test)}, batch size {args.batch_size}")
    results = {name: train_and_test(copy.deepcopy(model), name, train, test, args) for name in backends}
    for name, result in results.items():
        print(f"{name:9} {quality(test.labels, result.logits)}   {result.samples_per_s:,.0f} samples/s")
    if planted_auc is not None:
        print(f"the planted signal allows AUC {planted_auc:.4f}")
    if len(results) == 2:
        compare(test.labels, results[args.backend], results["eager"])
    return 0


def train_and_test(model: nn.Module, backend: str, train: ClickLog, test: ClickLog, args: argparse.Namespace) -> Result:
    """Train a copy of the model under one backend; seeds fix the order of batches, so backends see the same."""
    optimizers = make_optimizers(args.optimizer, model, args.lr)
    compiled = compile_for(model, backend, lazy_tables=not args.sparse)
    num_steps = args.epochs * train.num_batches(args.batch_size)
    full_size = min(args.batch_size, len(train))
    steps, seconds, timed_samples = 0, 0.0, 0
    with tqdm(total=num_steps, desc=backend, unit="step", disable=not sys.stderr.isatty()) as bar:
        for epoch in range(args.epochs):
            for batch in train.batches(args.batch_size, shuffle=True, seed=args.seed + epoch):
                started = time.perf_counter()
                loss = train_step(compiled, optimizers, batch)
                if steps > 0 and len(batch.labels) == full_size:  # the first step, and a shorter last one, compile
                    seconds += time.perf_counter() - started
                    timed_samples += len(batch.labels)
                steps += 1
                bar.update()
                bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
    model.eval()
    with torch.no_grad():
        logits = torch.cat([compiled(batch.dense, batch.ids) for batch in test.batches(args.batch_size)])
    return Result(logits=logits, samples_per_s=timed_samples / seconds if seconds else 0.0)


def compile_for(model: nn.Module, backend: str, *, lazy_tables: bool) -> nn.Module:
    """``lazy_tables``: dense gradients of tables at sparse cost, exactly; rows are brought up to date by ``eval()``."""
    if backend == "heterps":
        return heterps_compile.compile_(model, lazy_tables=lazy_tables)
    return model if backend == "eager" else torch.compile(model, backend=backend)


def train_step(model: nn.Module, optimizers: list[torch.optim.Optimizer], batch: Batch) -> Tensor:
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = binary_cross_entropy_with_logits(model(batch.dense, batch.ids), batch.labels)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.detach()


def make_optimizers(name: str, model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """One optimizer; SparseAdam takes nothing but sparse gradients, so the rest of the model gets Adam beside it."""
    if OPTIMIZERS[name] is not torch.optim.SparseAdam:
        return [OPTIMIZERS[name](model.parameters(), lr=lr)]
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    sparse = [p for p in model.parameters() if id(p) in tables]
    dense = [p for p in model.parameters() if id(p) not in tables]
    return [torch.optim.SparseAdam(sparse, lr=lr), torch.optim.Adam(dense, lr=lr)]


def load(args: argparse.Namespace) -> tuple[ClickLog, ClickLog, float | None]:
    """Training and held-out clicks, and the planted AUC of generated ones."""
    if args.train is None:
        rows = (args.rows,) * 26
        recipe = Recipe(
            num_samples=args.samples,
            test_samples=args.samples // 5,
            rows=rows,
            active_rows=2000,
            shift=30.0,
            seed=args.seed,
        )
        clicks = generate(recipe)
        return clicks.train, clicks.test, clicks.planted_auc
    train = read_criteo(args.train, rows=args.rows)
    if args.test is None:
        return *train.split(0.2), None
    test = read_criteo(args.test, rows=args.rows)
    if test.labels.min() == test.labels.max():
        print(
            f"{args.test} holds one class only ({len(test)} labels of {test.labels[0]:.0f}), which has no AUC: "
            "the last fifth of the training file is held out instead",
            file=sys.stderr,
        )
        return *train.split(0.2), None
    return train, test, None


def quality(labels: Tensor, logits: Tensor) -> str:
    return f"AUC {auc(labels, logits):.4f}   log-loss {log_loss(labels, logits):.4f}"


def compare(labels: Tensor, ours: Result, eager: Result) -> None:
    difference = auc(labels, ours.logits) - auc(labels, eager.logits)
    print(
        f"AUC differs from eager by {difference:+.5f}"
        + (f", speed is {ours.samples_per_s / eager.samples_per_s:.2f} x eager" if eager.samples_per_s else "")
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", metavar="FILE", help="Criteo file; generated clicks when left out")
    parser.add_argument("--test", metavar="FILE", help="held-out Criteo file; the last fifth of --train when left out")
    parser.add_argument("--samples", type=int, default=500_000, help="how many clicks to generate")
    parser.add_argument("--model", choices=MODELS, default="dlrm")
    parser.add_argument(
        "--optimizer", choices=sorted(OPTIMIZERS), default="adagrad", metavar="NAME", help="of torch.optim"
    )
    parser.add_argument("--lr", type=float, help="default: 0.02 for adagrad, 0.05 for sgd, 0.001 for the others")
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of each of the 26 tables")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--backend", default="heterps", help="heterps, eager, inductor")
    parser.add_argument("--compare-eager", action="store_true", help="train an eager copy too")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.sparse = args.optimizer in TAKES_SPARSE_GRADIENTS
    args.lr = args.lr or {"adagrad": 0.02, "sgd": 0.05}.get(args.optimizer, 0.001)
    return args


if __name__ == "__main__":
    sys.exit(main())
