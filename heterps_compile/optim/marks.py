"""What is known of a parameter: whether it is a table of a planned graph, and whether its readers are watched.

Plain attributes on the parameter, not weak references, because ``torch.utils.swap_tensors`` refuses tensors that have
weak references; strings and booleans, so that a pickled parameter needs nothing from here.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

TABLE, WATCHED = "_heterps_table", "_heterps_watched"
SPARSE, LAZY = "sparse", "lazy"


def mark(tables: Iterable[Tensor], kind: str) -> None:
    """Remember that these are tables; lazy is not taken back."""
    for table in tables:
        if table.__dict__.get(TABLE) not in (kind, LAZY):
            setattr(table, TABLE, kind)


def kind_of(parameter: Tensor) -> str | None:
    """``"sparse"``, ``"lazy"``, or None for what is not a table of a planned graph."""
    kind: str | None = parameter.__dict__.get(TABLE)
    return kind


def watch(parameter: Tensor) -> None:
    """Remember that whoever reads this parameter through its module brings it up to date first."""
    setattr(parameter, WATCHED, True)


def is_watched(parameter: Tensor) -> bool:
    """See :func:`watch`."""
    return WATCHED in parameter.__dict__
