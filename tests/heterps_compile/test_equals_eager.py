"""Outputs, gradients and ten optimizer steps under the backend equal eager, whatever the model and the batch size."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heterps_compile
from heterps_compile import models

ROWS = (40, 7, 300, 5, 11, 90)
Batch = tuple[Tensor, ...]


def click_batch(size: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randint(0, rows, (size,), generator=generator) for rows in ROWS], dim=1)
    return torch.rand(size, 13, generator=generator), ids


def dense_batch(*shape: int) -> Callable[[int, int], Batch]:
    def make(size: int, seed: int) -> Batch:
        return (torch.randn(size, *shape, generator=torch.Generator().manual_seed(seed)),)

    return make


class TableUsedTwice(nn.Module):
    """Two columns looked up in one table, and a bag over the same table."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(90, 8, sparse=True)
        self.head = nn.Linear(16, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        shown, clicked = self.items(ids[:, 3]), self.items(ids[:, 4])
        return self.head(torch.cat([shown, clicked], dim=1)).squeeze(1) + (shown * clicked).sum(1) * dense[:, 0]


def batch_norm_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 1))


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 4 * 4, 3)
    )


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Batch]]] = {
    "dlrm sparse": (lambda: models.DLRM(ROWS, 8, bottom=(16,), top=(16,), sparse=True), click_batch),
    "dlrm dense": (lambda: models.DLRM(ROWS, 8, bottom=(16,), top=(16,)), click_batch),
    "dlrm bags": (lambda: models.DLRM(ROWS, 8, bottom=(16,), top=(16,), sparse=True, use_bag=True), click_batch),
    "deepfm": (lambda: models.DeepFM(ROWS, 8, deep=(16,), sparse=True), click_batch),
    "dcn": (lambda: models.DCN(ROWS, 8, deep=(16,), sparse=True), click_batch),
    "wide and deep": (lambda: models.WideDeep(ROWS, 8, deep=(16,)), click_batch),
    "table used twice": (TableUsedTwice, click_batch),
    "batch norm mlp": (batch_norm_mlp, dense_batch(6)),
    "transformer layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        dense_batch(5, 8),
    ),
    "cnn": (small_cnn, dense_batch(2, 8, 8)),
}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.grad.to_dense() if p.grad.layout is torch.sparse_coo else p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", CASES)
def test_outputs_gradients_and_ten_steps_equal_eager(name: str) -> None:
    build, make_batch = CASES[name]
    eager = build()
    ours = copy.deepcopy(eager)
    compiled = torch.compile(ours, backend="heterps")
    optimizers = [torch.optim.Adagrad(model.parameters(), lr=0.05) for model in (eager, ours)]
    sizes = [32, 32, 7, 64, 32, 7, 64, 32, 32, 7] if name == "batch norm mlp" else [32, 7, 1, 64, 32, 7, 1, 64, 32, 7]
    for step, size in enumerate(sizes):
        batch = make_batch(size, step)
        outputs = [model(*batch) for model in (eager, compiled)]
        close(outputs[1], outputs[0])
        for _model, output, optimizer in zip((eager, ours), outputs, optimizers, strict=True):
            optimizer.zero_grad()
            output.square().mean().backward()
        close(gradients(ours), gradients(eager))
        for optimizer in optimizers:
            optimizer.step()
    close(ours.state_dict(), eager.state_dict())
    assert heterps_compile.is_planned(compiled)


def test_gradients_keep_the_layout_eager_gives_them() -> None:
    for sparse in (True, False):
        model = models.DLRM(ROWS, 8, bottom=(16,), top=(16,), sparse=sparse)
        torch.compile(model, backend="heterps")(*click_batch(9, 0)).sum().backward()
        layouts = {table.weight.grad.layout for table in model.embeddings.tables}
        assert layouts == {torch.sparse_coo if sparse else torch.strided}
