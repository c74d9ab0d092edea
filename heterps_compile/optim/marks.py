"""Which parameters are embedding tables of a planned graph: a plain attribute on the parameter itself.

An attribute, not a weak reference, because ``torch.utils.swap_tensors`` refuses tensors that have weak references; a
string, so that a pickled parameter needs nothing from here.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

MARK = "_heterps_table"
SPARSE, LAZY = "sparse", "lazy"


def mark(tables: Iterable[Tensor], kind: str) -> None:
    """Remember that these are tables; lazy is not taken back."""
    for table in tables:
        if table.__dict__.get(MARK) not in (kind, LAZY):
            setattr(table, MARK, kind)


def kind_of(parameter: Tensor) -> str | None:
    """``"sparse"``, ``"lazy"``, or None for what is not a table of a planned graph."""
    return parameter.__dict__.get(MARK)
