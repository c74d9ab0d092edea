"""How a batch is cut into microbatches and how the pieces of each output become one again.

Enters: the flat inputs by name and a :class:`RowSplit`, whose maker has proved that cutting changes no result. Leaves:
one :class:`Piece` per microbatch; later the joined outputs. Refuses inputs that disagree on the number of rows.
Rows are cut as ``torch.tensor_split`` does: 7 rows in 3 pieces are 3, 2, 2; never more pieces than rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from heterps_compile.errors import PlanError
from heterps_compile.row_split import Bags, Merge, RowSplit

__all__ = ["Bags", "Merge", "Piece", "RowSplit", "cut", "merge_pieces"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One microbatch: its number of rows and its own value of each input that is not shared."""

    num_rows: int
    inputs: Mapping[str, Any]


def cut(split: RowSplit, inputs: Mapping[str, Any], num_microbatches: int) -> tuple[Piece, ...]:
    """At most ``num_microbatches`` pieces of at least one row; an empty batch is one piece. Raises PlanError."""
    total = _num_rows(split, inputs)
    count = max(1, min(num_microbatches, total))
    if count == 1:
        return (Piece(num_rows=total, inputs={}),)
    columns = {name: torch.tensor_split(inputs[name], count) for name in split.split}
    for bags in split.bags:
        columns.update(_cut_bags(bags, inputs, total, count))
    sizes = [total // count + (index < total % count) for index in range(count)]
    return tuple(
        Piece(
            num_rows=size,
            inputs={name: pieces[index] for name, pieces in columns.items()} | dict.fromkeys(split.rows, size),
        )
        for index, size in enumerate(sizes)
    )


def merge_pieces(merge: Merge, pieces: Sequence[Any], num_rows: Sequence[int]) -> Any:
    """One whole output; ``pieces[i]`` was computed from ``num_rows[i]`` rows."""
    if len(pieces) == 1 or merge.kind == "same" or pieces[0] is None:
        return pieces[0]
    if merge.kind == "concat":
        return torch.cat(list(pieces), dim=merge.dim)
    if merge.kind == "sum":
        return sum(pieces[1:], start=pieces[0])
    weighted = [piece * (rows / sum(num_rows)) for piece, rows in zip(pieces, num_rows, strict=True)]
    return sum(weighted[1:], start=weighted[0])


def _num_rows(split: RowSplit, inputs: Mapping[str, Any]) -> int:
    found = {name: int(inputs[name].shape[0]) for name in split.split}
    found |= {bags.offsets: int(inputs[bags.offsets].shape[0]) - bags.include_last_offset for bags in split.bags}
    found |= {name: int(inputs[name]) for name in split.rows}
    if len(set(found.values())) != 1:
        listed = ", ".join(f"{name}: {rows}" for name, rows in found.items()) or "no input has rows"
        raise PlanError(
            f"the inputs to cut into microbatches disagree on the number of rows ({listed})",
            hint='set options={"microbatches": 1}',
        )
    return next(iter(found.values()))


def _cut_bags(bags: Bags, inputs: Mapping[str, Any], total: int, count: int) -> dict[str, tuple[torch.Tensor, ...]]:
    offsets = inputs[bags.offsets]
    parts = torch.tensor_split(offsets[:total], count)
    length = int(inputs[bags.values[0]].shape[0])
    ends = int(offsets[total]) if bags.include_last_offset else length
    edges = [*(int(part[0]) for part in parts), ends]
    columns = {name: tuple(inputs[name][a:b] for a, b in pairwise(edges)) for name in bags.values}
    rebased = [part - start for part, start in zip(parts, edges, strict=False)]
    if bags.include_last_offset:
        last = [part.new_tensor([b - a]) for part, (a, b) in zip(parts, pairwise(edges), strict=True)]
        rebased = [torch.cat([part, end]) for part, end in zip(rebased, last, strict=True)]
    return {**columns, bags.offsets: tuple(rebased)}
