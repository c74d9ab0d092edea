"""How a batch may be cut by rows: which inputs carry it, and how the pieces of each output become one.

Made by ``passes/batch_axis.py`` with a proof that cutting changes no result; carried out by ``runtime/row_split.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Merge:
    """How the pieces of one output are joined.

    ``concat`` along ``dim``; ``mean`` weighted by the rows of each piece (a mean loss over uneven pieces); ``sum``;
    ``same`` for what does not depend on the batch: the first piece stands for all.
    """

    kind: Literal["concat", "mean", "sum", "same"] = "concat"
    dim: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Bags:
    """An EmbeddingBag's inputs: ``offsets`` (batch,) say where in each of ``values`` (total,) a row begins.

    A piece gets its rows' part of the values, and offsets that count from the start of that part.
    """

    offsets: str
    values: tuple[str, ...]
    include_last_offset: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSplit:
    """Which graph inputs carry the batch on dimension 0 (``split``), and how each graph output is joined (``merge``).

    ``rows`` names the integer inputs that hold the batch size (Dynamo passes it along under dynamic shapes). Every
    other input is shared by all pieces.
    """

    split: tuple[str, ...]
    merge: tuple[Merge, ...]
    rows: tuple[str, ...] = ()
    bags: tuple[Bags, ...] = ()
