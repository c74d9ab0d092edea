"""The models of the HeterPS paper in stock PyTorch: CTRDNN, MATCHNET, 2EMB and NCE.

The paper names them; their bodies follow the public example programs of FleetX, branch old_develop, folder
examples/heter_pipeline_ps (network_conf.py, matchnet.py, 2emb.py), down to the widths. Of NCE no file is public: ours
is a plain noise-contrastive estimation net with as many layers as the paper is said to give it.

Layers are counted as ``passes/trace.py`` counts them: a look-up in a group of tables is one layer, so is each linear
with its activation; concatenation, pooling, cosine and the loss belong to a neighbour.

``ctrdnn``, ``matchnet``, ``two_embeddings`` and ``nce`` return ``(model, example_inputs)``, which is what
``heterps plan heterps_compile.models:matchnet`` asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, softplus

from heterps_compile.models.click import NUM_DENSE, NUM_TABLES, mlp, new_table

BATCH_SIZE = 1000
ROWS = 1_000_001
DIM = 10
NUM_USER_SLOTS = 12
NUM_ITEM_SLOTS = NUM_TABLES - NUM_USER_SLOTS
NUM_SMALL_SLOTS = 5

Example = tuple[nn.Module, tuple[Tensor, ...]]


class CTRDNN(nn.Module):
    """One table for all 26 slots, then linear layers of equal width; ``num_layers`` counts the look-up and all linears.

    The public file has 5 layers (three of width 400); the paper varies their number up to 20.
    """

    def __init__(
        self, num_layers: int = 16, *, rows: int = ROWS, dim: int = DIM, width: int = 400, sparse: bool = False
    ) -> None:
        super().__init__()
        self.table = new_table(rows, dim, sparse=sparse, use_bag=False)
        self.tower = mlp([NUM_DENSE + NUM_TABLES * dim, *[width] * (num_layers - 2)])
        self.output = nn.Linear(width, 2)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Logits of no click and click (batch, 2) of ``dense`` (batch, 13) and ``ids`` (batch, 26)."""
        vectors = self.table(ids).flatten(1)
        logits: Tensor = self.output(self.tower(torch.cat([vectors, dense], dim=1)))
        return logits


class MatchNet(nn.Module):
    """A user tower (12 slots) against an item tower (14 slots and the dense features), each with a table of its own.

    The ``num_negatives`` smallest entries of the item vector's softmax are looked up in the **item table again**: the
    table is used at both ends of the item tower, and the layers form no chain.
    """

    def __init__(
        self,
        *,
        rows: int = ROWS,
        dim: int = DIM,
        widths: tuple[int, ...] = (400, 400, 50),
        num_negatives: int = 20,
        margin: float = 0.8,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.users = new_table(rows, dim, sparse=sparse, use_bag=False)
        self.items = new_table(rows, dim, sparse=sparse, use_bag=False)
        self.user_tower = mlp([NUM_USER_SLOTS * dim, *widths])
        self.item_tower = mlp([NUM_ITEM_SLOTS * dim + NUM_DENSE, *widths])
        self.negative_tower = mlp([num_negatives * dim, widths[0], widths[-1]])
        self.num_negatives = num_negatives
        self.margin = margin

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Pairwise hinge loss per sample (batch,): ``max(0, margin - cos(user, item) + cos(user, negative))``."""
        user = self.user_tower(self.users(ids[:, :NUM_USER_SLOTS]).flatten(1))
        vectors = self.items(ids[:, NUM_USER_SLOTS:]).flatten(1)
        item = self.item_tower(torch.cat([vectors, dense], dim=1))
        smallest = item.softmax(dim=1).topk(self.num_negatives, dim=1, largest=False).indices
        negative = self.negative_tower(self.items(smallest).flatten(1))
        excess = self.margin - cosine_similarity(user, item) + cosine_similarity(user, negative)
        return excess.clamp(min=0)


class TwoEmbeddings(nn.Module):
    """2EMB: a big table for all 26 slots, and one of 100 rows for the first five, which fits on any accelerator."""

    def __init__(
        self,
        *,
        rows: int = ROWS,
        small_rows: int = 100,
        dim: int = DIM,
        widths: tuple[int, ...] = (400, 400, 50),
        small_width: int = 128,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.big = new_table(rows, dim, sparse=sparse, use_bag=False)
        self.small = new_table(small_rows, dim, sparse=sparse, use_bag=False)
        self.tower = mlp([NUM_TABLES * dim + NUM_DENSE, *widths])
        self.small_tower = mlp([NUM_SMALL_SLOTS * dim, small_width])
        self.output = nn.Sequential(nn.Linear(widths[-1] + small_width, 2), nn.Linear(2, 2))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Logits of no click and click (batch, 2); ids of the first five slots are folded into the small table."""
        main = self.tower(torch.cat([self.big(ids).flatten(1), dense], dim=1))
        folded = ids[:, :NUM_SMALL_SLOTS].remainder(self.small.num_embeddings)
        small = self.small_tower(self.small(folded).flatten(1))
        logits: Tensor = self.output(torch.cat([main, small], dim=1))
        return logits


class NCE(nn.Module):
    """Noise-contrastive estimation (Gutmann & Hyvarinen, 2010) of the item that follows 26 slots of context.

    Context look-up, two linears, look-up of the candidates' vectors, scores with the loss: five layers.
    """

    def __init__(
        self,
        *,
        rows: int = ROWS,
        dim: int = DIM,
        widths: tuple[int, int] = (400, 50),
        num_noise: int = 10,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.context = new_table(rows, dim, sparse=sparse, use_bag=False)
        self.candidates = new_table(rows, widths[-1], sparse=sparse, use_bag=False)
        self.tower = mlp([NUM_TABLES * dim, *widths])
        self.log_noise = math.log(num_noise / rows)  # log of num_noise times a uniform draw's probability

    def forward(self, ids: Tensor, candidates: Tensor) -> Tensor:
        """Loss per sample (batch,); ``candidates`` (batch, 1 + num_noise) holds the true item first, then the noise."""
        context = self.tower(self.context(ids).flatten(1))
        scores = torch.bmm(self.candidates(candidates), context.unsqueeze(2)).squeeze(2) - self.log_noise
        return softplus(-scores[:, 0]) + softplus(scores[:, 1:]).sum(dim=1)


def click_inputs(rows: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """``dense`` (batch, 13) and uniformly random ``ids`` (batch, 26)."""
    return torch.rand(batch_size, NUM_DENSE), torch.randint(rows, (batch_size, NUM_TABLES))


def ctrdnn(num_layers: int = 16, batch_size: int = BATCH_SIZE) -> Example:
    """CTRDNN with that many layers, and inputs."""
    return CTRDNN(num_layers), click_inputs(ROWS, batch_size)


def matchnet(batch_size: int = BATCH_SIZE) -> Example:
    """MATCHNET and inputs."""
    return MatchNet(), click_inputs(ROWS, batch_size)


def two_embeddings(batch_size: int = BATCH_SIZE) -> Example:
    """2EMB and inputs."""
    return TwoEmbeddings(), click_inputs(ROWS, batch_size)


def nce(batch_size: int = BATCH_SIZE) -> Example:
    """NCE and inputs."""
    return NCE(), (torch.randint(ROWS, (batch_size, NUM_TABLES)), torch.randint(ROWS, (batch_size, 11)))


PAPER_MODELS: Mapping[str, Callable[[], Example]] = {
    **{f"ctrdnn-{count}": partial(ctrdnn, count) for count in (8, 12, 16, 20)},
    "matchnet": matchnet,
    "2emb": two_embeddings,
    "nce": nce,
}
