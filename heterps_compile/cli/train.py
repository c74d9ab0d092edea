"""``heterps train``: train a click-through-rate model of ``models.py`` with ``train_step``, and say how good it became.

Enters: a file in Criteo's format, or nothing: then clicks with a planted signal are generated. Leaves: AUC, log-loss
and samples per second on stdout, the progress bar on stderr, and a checkpoint if asked for. Refused: unreadable files.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from heterps_compile.comparison import click_loss
from heterps_compile.data import ClickLog, Recipe, generate, read_criteo
from heterps_compile.metrics import auc, log_loss
from heterps_compile.models import MODELS
from heterps_compile.training import train_step

OPTIMIZERS: dict[str, Any] = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}
DEFAULT_RATES = {"adagrad": 0.05, "sgd": 0.05}
OTHER_RATE = 0.001
HELD_OUT = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Clicks:
    """Training and held-out clicks; ``planted_auc`` is what the signal of generated clicks allows."""

    train: ClickLog
    test: ClickLog
    planted_auc: float | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Train, test, print; 0 when done."""
    given = parser().parse_args(argv)
    torch.manual_seed(given.seed)
    clicks = read(given)
    model = MODELS[given.model](clicks.train.rows, given.dim)
    rate = given.lr or DEFAULT_RATES.get(given.optimizer, OTHER_RATE)
    optimizer = OPTIMIZERS[given.optimizer](model.parameters(), lr=rate)
    samples_per_s = train(model, optimizer, clicks.train, given)
    print(f"{given.model}, {given.optimizer} lr {rate:g}, {len(clicks.train):,} samples, {given.epochs} epochs")
    print(f"{samples_per_s:,.0f} samples/s in steps of {given.batch_size:,}")
    print(quality(model, clicks, given.batch_size))
    if given.save:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, given.save)
        print(f"heterps: wrote {given.save}", file=sys.stderr)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line of ``heterps train``."""
    assert __doc__
    made = argparse.ArgumentParser(prog="heterps train", description=__doc__.splitlines()[0], allow_abbrev=False)
    made.add_argument("--train", metavar="FILE", help="clicks in Criteo's format; generated ones when left out")
    made.add_argument("--test", metavar="FILE", help="held-out clicks; the last fifth of --train when left out")
    made.add_argument("--samples", type=int, default=200_000, help="how many clicks to generate")
    made.add_argument("--model", choices=sorted(MODELS), default="dlrm")
    made.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adagrad")
    made.add_argument("--lr", type=float, help="default: 0.05 for adagrad and sgd, 0.001 for the others")
    made.add_argument("--rows", type=int, default=100_000, help="rows of each of the 26 tables")
    made.add_argument("--dim", type=int, default=16)
    made.add_argument("--batch-size", type=int, default=2048)
    made.add_argument("--epochs", type=int, default=1)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--plan", metavar="PLAN.json", help="run this plan")
    made.add_argument("--microbatches", type=int, default=1, help="pieces of a batch in a plan of several stages")
    made.add_argument(
        "--save", metavar="FILE", help="write the state of model and optimizer, as eager PyTorch reads it"
    )
    return made


def read(given: argparse.Namespace) -> Clicks:
    """The clicks asked for."""
    if given.train is None:
        rows = (given.rows,) * 26
        recipe = Recipe(num_samples=given.samples, test_samples=given.samples // 5, rows=rows, seed=given.seed)
        made = generate(recipe)
        return Clicks(train=made.train, test=made.test, planted_auc=made.planted_auc)
    for path in filter(None, (given.train, given.test)):
        with open(path, "rb"):  # a file that is not there is named before minutes of reading
            pass
    log = read_criteo(given.train, rows=given.rows)
    if given.test:
        return Clicks(train=log, test=read_criteo(given.test, rows=given.rows))
    training, held_out = log.split(HELD_OUT)
    return Clicks(train=training, test=held_out)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, log: ClickLog, given: argparse.Namespace) -> float:
    """Every epoch; returns samples per second, the first step (which compiles) left out."""
    options = {"plan": given.plan, "microbatches": given.microbatches} if given.plan else {}
    step = train_step(click_loss, optimizer=optimizer, **options)
    num_steps = given.epochs * log.num_batches(given.batch_size)
    steps, timed, started = 0, 0, time.perf_counter()
    with tqdm(total=num_steps, unit="step", disable=not sys.stderr.isatty()) as bar:
        for epoch in range(given.epochs):
            for batch in log.batches(given.batch_size, shuffle=True, seed=given.seed + epoch):
                loss = step(model, batch)
                steps += 1
                if steps == 1:
                    started = time.perf_counter()
                else:
                    timed += len(batch.labels)
                bar.update()
                bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
    return timed / (time.perf_counter() - started)


def quality(model: nn.Module, clicks: Clicks, batch_size: int) -> str:
    """AUC and log-loss on the held-out clicks; a file with one class has no AUC."""
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(batch.dense, batch.ids) for batch in clicks.test.batches(batch_size)])
    labels = clicks.test.labels
    both = bool(labels.min() != labels.max())
    shown = f"AUC {auc(labels, logits):.4f}" if both else "no AUC: the held-out clicks are all of one class"
    allowed = f" (the planted signal allows {clicks.planted_auc:.4f})" if clicks.planted_auc is not None else ""
    return f"{shown}{allowed}, log-loss {log_loss(labels, logits):.4f}, {len(labels):,} held-out samples"
