"""Four click-through-rate models in stock PyTorch: DLRM, DeepFM, DCN and Wide&Deep.

Enter ``dense`` (batch, 13) float32 and ``ids`` (batch, 26) int64, column t of which indexes table t; leaves one logit
per sample, (batch,). Nothing here knows of heterps: the models are what the demo, examples and benchmarks compile.
Options of each: ``rows`` per table, ``dim`` of a vector, ``sparse`` gradients, and ``use_bag`` for nn.EmbeddingBag in
place of nn.Embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

NUM_DENSE = 13
NUM_TABLES = 26
DEFAULT_ROWS = (200_000,) * NUM_TABLES


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers between consecutive widths, each with a ReLU behind it."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def new_table(rows: int, dim: int, *, sparse: bool, use_bag: bool) -> nn.Embedding | nn.EmbeddingBag:
    """A table that starts as the DLRM reference's does: uniform within 1 / sqrt(rows)."""
    table = nn.EmbeddingBag(rows, dim, mode="sum", sparse=sparse) if use_bag else nn.Embedding(rows, dim, sparse=sparse)
    nn.init.uniform_(table.weight, -(rows**-0.5), rows**-0.5)
    return table


class Tables(nn.Module):
    """One embedding table per column of ids: (batch, num_tables) -> (batch, num_tables, dim)."""

    def __init__(self, rows: Sequence[int], dim: int, *, sparse: bool = False, use_bag: bool = False) -> None:
        super().__init__()
        self.tables = nn.ModuleList(new_table(count, dim, sparse=sparse, use_bag=use_bag) for count in rows)
        self.use_bag = use_bag

    def forward(self, ids: Tensor) -> Tensor:
        """Look each column up in its table."""
        columns = ids.unbind(dim=1)
        if self.use_bag:
            columns = tuple(column.unsqueeze(1) for column in columns)  # bags of one id
        return torch.stack([table(column) for table, column in zip(self.tables, columns, strict=True)], dim=1)


class DotInteraction(nn.Module):
    """All pairwise dot products: (batch, num_vectors, dim) -> (batch, num_vectors * (num_vectors - 1) / 2)."""

    rows: Tensor
    columns: Tensor

    def __init__(self, num_vectors: int) -> None:
        super().__init__()
        rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)
        self.num_pairs = len(rows)

    def forward(self, vectors: Tensor) -> Tensor:
        """The strict lower triangle of each sample's Gram matrix, row by row."""
        return torch.bmm(vectors, vectors.transpose(1, 2))[:, self.rows, self.columns]


class DLRM(nn.Module):
    """Deep learning recommendation model (Naumov et al., arXiv 1906.00091)."""

    def __init__(
        self,
        rows: Sequence[int] = DEFAULT_ROWS,
        dim: int = 16,
        *,
        num_dense: int = NUM_DENSE,
        bottom: Sequence[int] = (512, 256),
        top: Sequence[int] = (512, 256),
        sparse: bool = False,
        use_bag: bool = False,
    ) -> None:
        super().__init__()
        self.embeddings = Tables(rows, dim, sparse=sparse, use_bag=use_bag)
        self.bottom = mlp([num_dense, *bottom, dim])
        self.interaction = DotInteraction(len(rows) + 1)
        self.top = mlp([dim + self.interaction.num_pairs, *top])
        self.output = nn.Linear(top[-1], 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Logits (batch,)."""
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom.unsqueeze(1), self.embeddings(ids)], dim=1)
        features = torch.cat([bottom, self.interaction(vectors)], dim=1)
        logits: Tensor = self.output(self.top(features))
        return logits.squeeze(1)


class DeepFM(nn.Module):
    """A factorisation machine beside a deep network on the same vectors (Guo et al., arXiv 1703.04247)."""

    def __init__(
        self,
        rows: Sequence[int] = DEFAULT_ROWS,
        dim: int = 16,
        *,
        num_dense: int = NUM_DENSE,
        deep: Sequence[int] = (512, 256),
        sparse: bool = False,
        use_bag: bool = False,
    ) -> None:
        super().__init__()
        self.embeddings = Tables(rows, dim, sparse=sparse, use_bag=use_bag)
        self.first_order = Tables(rows, 1, sparse=sparse, use_bag=use_bag)
        self.first_order_dense = nn.Linear(num_dense, 1)
        self.deep = mlp([num_dense + len(rows) * dim, *deep])
        self.output = nn.Linear(deep[-1], 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Logits (batch,): first order + second order + deep."""
        vectors = self.embeddings(ids)
        first = self.first_order(ids).sum(dim=1) + self.first_order_dense(dense)
        # Half of the sum's square less the squares' sum is the sum over pairs <v_i, v_j>, in time linear in the tables.
        second = 0.5 * (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1, keepdim=True)
        deep = self.output(self.deep(torch.cat([dense, vectors.flatten(1)], dim=1)))
        logits: Tensor = first + second + deep
        return logits.squeeze(1)


class CrossLayer(nn.Module):
    """One cross of DCN v1: x0 * (x . w) + b + x, all (batch, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Linear(width, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """The next x."""
        crossed: Tensor = x0 * self.weight(x) + self.bias + x
        return crossed


class DCN(nn.Module):
    """Deep & cross network, version 1 (Wang et al., arXiv 1708.05123)."""

    def __init__(
        self,
        rows: Sequence[int] = DEFAULT_ROWS,
        dim: int = 16,
        *,
        num_dense: int = NUM_DENSE,
        num_crosses: int = 3,
        deep: Sequence[int] = (512, 256),
        sparse: bool = False,
        use_bag: bool = False,
    ) -> None:
        super().__init__()
        width = num_dense + len(rows) * dim
        self.embeddings = Tables(rows, dim, sparse=sparse, use_bag=use_bag)
        self.crosses = nn.ModuleList(CrossLayer(width) for _ in range(num_crosses))
        self.deep = mlp([width, *deep])
        self.output = nn.Linear(width + deep[-1], 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Logits (batch,)."""
        x0 = torch.cat([dense, self.embeddings(ids).flatten(1)], dim=1)
        crossed = x0
        for cross in self.crosses:
            crossed = cross(x0, crossed)
        logits: Tensor = self.output(torch.cat([crossed, self.deep(x0)], dim=1))
        return logits.squeeze(1)


class WideDeep(nn.Module):
    """A linear model of the ids beside a deep network (Cheng et al., arXiv 1606.07792)."""

    def __init__(
        self,
        rows: Sequence[int] = DEFAULT_ROWS,
        dim: int = 16,
        *,
        num_dense: int = NUM_DENSE,
        deep: Sequence[int] = (512, 256),
        sparse: bool = False,
        use_bag: bool = False,
    ) -> None:
        super().__init__()
        self.embeddings = Tables(rows, dim, sparse=sparse, use_bag=use_bag)
        self.wide = Tables(rows, 1, sparse=sparse, use_bag=use_bag)
        self.wide_dense = nn.Linear(num_dense, 1)
        self.deep = mlp([num_dense + len(rows) * dim, *deep])
        self.output = nn.Linear(deep[-1], 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Logits (batch,): wide + deep."""
        wide = self.wide(ids).sum(dim=1) + self.wide_dense(dense)
        deep = self.output(self.deep(torch.cat([dense, self.embeddings(ids).flatten(1)], dim=1)))
        logits: Tensor = wide + deep
        return logits.squeeze(1)


MODELS: dict[str, type[DLRM] | type[DeepFM] | type[DCN] | type[WideDeep]] = {
    "dlrm": DLRM,
    "deepfm": DeepFM,
    "dcn": DCN,
    "widedeep": WideDeep,
}
