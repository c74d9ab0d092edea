"""Learn who likes which film: matrix factorisation and an MLP on MovieLens, under ``@heterps_compile.train_step``.

    python examples/train_movielens.py ratings.parquet                      # user_id, movie_id, rating, timestamp

Dense gradients with Adam, as most people write it: heterps updates the tables at sparse cost, exactly.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm

import heterps_compile
from heterps_compile.data import ClickLog, read_movielens
from heterps_compile.metrics import auc, log_loss


class FilmTaste(nn.Module):
    """Matrix factorisation with biases beside an MLP on the same vectors (neural collaborative filtering)."""

    def __init__(self, num_users: int, num_films: int, dim: int = 32) -> None:
        super().__init__()
        self.user, self.film = nn.Embedding(num_users, dim), nn.Embedding(num_films, dim)
        self.user_bias, self.film_bias = nn.Embedding(num_users, 1), nn.Embedding(num_films, 1)
        self.mlp = nn.Sequential(nn.Linear(2 * dim, 64), nn.ReLU(), nn.Linear(64, 1))
        for table in (self.user, self.film, self.user_bias, self.film_bias):
            nn.init.normal_(table.weight, std=0.05)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (batch,) of ids (batch, 2): user, film."""
        users, films = ids.unbind(dim=1)
        user, film = self.user(users), self.film(films)
        bias = self.user_bias(users) + self.film_bias(films)
        logits = (user * film).sum(dim=1, keepdim=True) + bias + self.mlp(torch.cat([user, film], dim=1))
        return logits.squeeze(1)


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(model(ids), labels)


def train(model: nn.Module, clicks: ClickLog, args: argparse.Namespace, *, use_heterps: bool) -> float:
    """Train in place; returns samples per second, the first step (which compiles) left out."""
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    step = heterps_compile.train_step(loss_of, optimizer=optimizer) if use_heterps else eager_step(optimizer)
    num_batches = clicks.num_batches(args.batch_size)
    name = "heterps" if use_heterps else "eager"
    started = 0.0
    with tqdm(total=args.epochs * num_batches, desc=name, unit="step", disable=not sys.stderr.isatty()) as bar:
        for epoch in range(args.epochs):
            for batch in clicks.batches(args.batch_size, shuffle=True, seed=args.seed + epoch):
                step(model, batch.ids, batch.labels)
                bar.update()
                started = started or time.perf_counter()
    seconds = time.perf_counter() - started
    return (args.epochs * len(clicks) - args.batch_size) / seconds


def eager_step(optimizer: torch.optim.Optimizer):
    def step(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, ids, labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def main() -> int:
    args = arguments()
    torch.manual_seed(args.seed)
    clicks = read_movielens(args.ratings)
    training, held_out = clicks.split(0.2, seed=None if args.split == "time" else args.seed)
    print(f"users {clicks.rows[0]}, films {clicks.rows[1]}, training ratings {len(training)}, held out {len(held_out)}")
    start = FilmTaste(*clicks.rows)
    scores = {}
    for name in ("heterps", "eager"):
        model = copy.deepcopy(start)
        samples_per_s = train(model, training, args, use_heterps=name == "heterps")
        model.eval()
        with torch.no_grad():
            logits = model(held_out.ids)
        scores[name] = auc(held_out.labels, logits)
        loss = log_loss(held_out.labels, logits)
        print(f"{name:9} AUC {scores[name]:.4f}   log-loss {loss:.4f}   {samples_per_s:,.0f} samples/s")
    print(f"AUC differs from eager by {scores['heterps'] - scores['eager']:+.5f}")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ratings", metavar="FILE", help="parquet file with user_id, movie_id, rating, timestamp")
    parser.add_argument("--split", choices=("random", "time"), default="random", help="how a fifth is held out")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
