"""Clicks in memory: what every reader and generator returns, and the batches that training takes.

Enter three tensors with one row per sample; leave ``Batch`` tuples. Nothing here loops over rows: a batch is a slice of
the tensors, or one gather when shuffled. It refuses tensors whose lengths or types do not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """Some samples: dense (batch, num_dense) float32, ids (batch, num_tables) int64, labels (batch,) float32."""

    dense: Tensor
    ids: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClickLog:
    """Samples: dense (n, num_dense) float32, ids (n, num_tables) int64, labels (n,) float32 of 0 and 1.

    ``rows`` says how many rows the table of each id column needs.
    """

    dense: Tensor
    ids: Tensor
    labels: Tensor
    rows: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that the parts fit.

        Raises:
            ValueError: lengths differ, a dtype is wrong, or ``rows`` has not one entry per id column.
        """
        for name, dtype, dims in (("dense", torch.float32, 2), ("ids", torch.int64, 2), ("labels", torch.float32, 1)):
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != dtype or tensor.dim() != dims or len(tensor) != len(self.labels):
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}; expected {dtype}, {dims} dimension(s) "
                    f"and {len(self.labels)} samples as in labels"
                )
        if len(self.rows) != self.num_tables:
            raise ValueError(f"rows has {len(self.rows)} entries for {self.num_tables} columns of ids")

    def __len__(self) -> int:
        """How many samples."""
        return len(self.labels)

    @property
    def num_dense(self) -> int:
        """How many dense columns."""
        return self.dense.shape[1]

    @property
    def num_tables(self) -> int:
        """How many id columns."""
        return self.ids.shape[1]

    def take(self, samples: slice | Tensor) -> ClickLog:
        """The samples of a slice (a view) or of an index tensor (a copy)."""
        return ClickLog(dense=self.dense[samples], ids=self.ids[samples], labels=self.labels[samples], rows=self.rows)

    def split(self, test_fraction: float, *, seed: int | None = None) -> tuple[ClickLog, ClickLog]:
        """Training and test part: the last samples in file order, or drawn with ``seed``.

        Raises:
            ValueError: the fraction leaves one of the parts empty.
        """
        num_test = round(len(self) * test_fraction)
        if not 0 < num_test < len(self):
            raise ValueError(f"test_fraction {test_fraction} of {len(self)} samples leaves an empty part")
        if seed is None:
            return self.take(slice(None, -num_test)), self.take(slice(-num_test, None))
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return self.take(order[num_test:]), self.take(order[:num_test])

    def num_batches(self, batch_size: int) -> int:
        """How many batches ``batches`` yields."""
        return -(-len(self) // batch_size)

    def batches(self, batch_size: int, *, shuffle: bool = False, seed: int = 0) -> Iterator[Batch]:
        """Every sample once, in batches of ``batch_size``; the last may be smaller. Equal seeds give equal order.

        Raises:
            ValueError: the batch size is below 1.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed)) if shuffle else None
        for start in range(0, len(self), batch_size):
            chosen = slice(start, start + batch_size) if order is None else order[start : start + batch_size]
            yield Batch(self.dense[chosen], self.ids[chosen], self.labels[chosen])
