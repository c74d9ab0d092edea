"""What ``heterps demo`` shows, on generated clicks and a DLRM, in under two minutes on this machine.

In order: the layers and what limits each; a plan for a fleet that need not be here (estimated) with its gap to the
optimum; training under ``torch.compile(model, backend="heterps")`` with stock code, and the held-out AUC beside the
best that the planted signal allows; then heterps, eager and Inductor on the same steps of the same run.
Text goes to stdout, the progress bar to stderr. Exit code 1 when the AUC stays more than 0.01 below the planted limit.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from tqdm import tqdm

from heterps_compile import comparison
from heterps_compile.cluster import Cluster
from heterps_compile.data import ClickLog, PlantedClicks, Recipe, generate
from heterps_compile.errors import InfeasibleError
from heterps_compile.inspection import explain
from heterps_compile.metrics import auc, log_loss
from heterps_compile.models import DLRM
from heterps_compile.planner import model_graph, plan
from heterps_compile.report.graph_table import layer_table

AUC_TOLERANCE = 0.01
FLEET = {
    "version": 1,
    "resources": [
        {"name": "cpu", "price_usd_per_h": 0.04, "limit": 32},
        {"name": "v100", "price_usd_per_h": 2.42, "limit": 32},
        {"name": "a100-40", "price_usd_per_h": 4.10, "limit": 16},
    ],
    "links": [
        {"between": ["cpu", "v100"], "bandwidth_bytes_per_s": 1.25e10, "latency_s": 2.0e-5},
        {"between": ["cpu", "a100-40"], "bandwidth_bytes_per_s": 1.25e10, "latency_s": 2.0e-5},
    ],
}
FLEET_SAMPLES_PER_S = 500_000.0
NUM_REPORTS = 8

Model = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Sizes of the demo. The model is a DLRM with MLPs 512-256-16 and 512-256-1 and 26 tables.

    Of each table ``active_rows`` are in use, so that one pass sees a row often enough to learn what was planted there.
    """

    num_samples: int = 696_320  # whole batches, for the same reason as in recipe()
    rows: int = 200_000
    dim: int = 16
    batch_size: int = 2048
    active_rows: int = 2_000
    table_learning_rate: float = 0.03
    dense_learning_rate: float = 0.01
    race_steps: int = 6
    race_segments: int = 5
    backends: tuple[str, ...] = ("heterps", "eager", "inductor")
    seed: int = 0

    def recipe(self) -> Recipe:
        """What to generate."""
        rows = (self.rows,) * 26
        return Recipe(
            num_samples=self.num_samples,
            test_samples=25 * self.batch_size,  # whole batches: a smaller last one would be one more graph
            rows=rows,
            active_rows=self.active_rows,
            shift=30.0,
            seed=self.seed,
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Stock Adagrad; its first steps are as long as its learning rate, which tables bear and wide MLPs do not."""
        tables = [p for name, p in model.named_parameters() if name.startswith("embeddings.")]
        others = [p for name, p in model.named_parameters() if not name.startswith("embeddings.")]
        groups: list[dict[str, Any]] = [{"params": tables, "lr": self.table_learning_rate}, {"params": others}]
        return torch.optim.Adagrad(groups, lr=self.dense_learning_rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """How good the trained model is on held-out clicks."""

    auc: float
    log_loss: float
    planted_auc: float

    @property
    def reached(self) -> bool:
        """Whether the AUC is within the tolerance of the planted limit."""
        return self.auc >= self.planted_auc - AUC_TOLERANCE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 when the model learned what was planted."""
    settings = parse(argv)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse invariant checks", UserWarning)  # of torch's own sparse Adagrad
        return run(settings)


def run(settings: Settings) -> int:
    """Every part in order."""
    started = time.perf_counter()
    torch.manual_seed(settings.seed)
    clicks = generate(settings.recipe())
    model = DLRM(clicks.train.rows, settings.dim, sparse=True)
    inputs = tuple(next(clicks.train.batches(settings.batch_size)))[:2]
    _show("Layers of a DLRM, and what limits each on one unit of a type", layers_text(model, inputs))
    _show(f"Plan for a fleet at {FLEET_SAMPLES_PER_S:,.0f} samples/s (times estimated)", plan_text(model, inputs))
    compiled = cast(nn.Module, torch.compile(model, backend="heterps"))
    _show('Training here: model = torch.compile(model, backend="heterps")', f"{len(clicks.train):,} generated clicks")
    train(compiled, settings.optimizer(model), clicks.train, settings.batch_size)
    quality = evaluate(compiled, clicks, settings.batch_size)
    _show("Quality on held-out clicks", quality_text(quality))
    _show("What heterps decided here", explain(compiled))
    speeds = race(model, clicks.train, settings)
    _show("Samples per second, in turns on the same batches from the same weights", comparison.speed_table(speeds))
    print(f"{comparison.machine()}\nwhole demo: {time.perf_counter() - started:.0f} s")
    return 0 if quality.reached else 1


def layers_text(model: nn.Module, inputs: tuple[Tensor, ...]) -> str:
    """The layer table, classed against two types of the fleet."""
    fleet = Cluster.from_dict(FLEET)
    return layer_table(model_graph(model, inputs), [fleet["cpu"], fleet["v100"]])


def plan_text(model: nn.Module, inputs: tuple[Tensor, ...]) -> str:
    """What to rent, from estimates; an infeasible request says what is reachable."""
    try:
        return plan(model, inputs, cluster=FLEET, min_throughput=FLEET_SAMPLES_PER_S, profile="estimate").explain()
    except InfeasibleError as error:
        return str(error)


def train(model: Model, optimizer: torch.optim.Optimizer, clicks: ClickLog, batch_size: int) -> None:
    """One pass over the clicks with the stock loop; prints loss and speed as it goes."""
    step = comparison.stock_step(model, optimizer)
    num_batches = clicks.num_batches(batch_size)
    report_every = max(1, num_batches // NUM_REPORTS)
    losses: list[Tensor] = []
    started = time.perf_counter()
    bar = tqdm(clicks.batches(batch_size), total=num_batches, unit="step", disable=not sys.stderr.isatty(), leave=False)
    for index, batch in enumerate(bar, start=1):
        losses.append(step(batch))
        if index % report_every == 0:
            rate = index * batch_size / (time.perf_counter() - started)
            loss = torch.stack(losses[-report_every:]).mean()
            print(f"step {index:4} of {num_batches}   loss {loss:.4f}   {rate:9,.0f} samples/s", flush=True)


def evaluate(model: Model, clicks: PlantedClicks, batch_size: int) -> Quality:
    """AUC and log-loss on the held-out clicks."""
    with torch.no_grad():
        logits = torch.cat([model(batch.dense, batch.ids) for batch in clicks.test.batches(batch_size)])
    labels = clicks.test.labels
    return Quality(auc=auc(labels, logits), log_loss=log_loss(labels, logits), planted_auc=clicks.planted_auc)


def quality_text(quality: Quality) -> str:
    """AUC beside the planted limit."""
    verdict = "reached" if quality.reached else "NOT reached"
    return (
        f"AUC {quality.auc:.4f}, log-loss {quality.log_loss:.4f}\n"
        f"the planted signal allows AUC {quality.planted_auc:.4f}: {verdict} within {AUC_TOLERANCE} "
        f"(short by {quality.planted_auc - quality.auc:.4f})"
    )


def race(model: nn.Module, clicks: ClickLog, settings: Settings) -> tuple[comparison.Speed, ...]:
    """The backends on the same few batches, each on its own copy of the trained model."""
    batches = tuple(islice(clicks.batches(settings.batch_size), settings.race_steps))
    contenders = [comparison.contender(name, model, settings.optimizer, name) for name in settings.backends]
    return comparison.race(contenders, batches, num_segments=settings.race_segments)


def parse(argv: Sequence[str] | None) -> Settings:
    """Settings from the command line."""
    defaults = Settings()
    parser = argparse.ArgumentParser(prog="heterps demo", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--samples", type=int, default=defaults.num_samples, help="clicks to train on")
    parser.add_argument("--rows", type=int, default=defaults.rows, help="rows of each of the 26 tables")
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--no-inductor", action="store_true", help="leave out Inductor, which compiles for long")
    given = parser.parse_args(argv)
    backends = tuple(name for name in defaults.backends if not (given.no_inductor and name == "inductor"))
    return Settings(
        num_samples=given.samples, rows=given.rows, batch_size=given.batch_size, seed=given.seed, backends=backends
    )


def _show(title: str, text: str) -> None:
    print(f"\n== {title}\n\n{text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
