"""Cutting a batch and joining outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from heterps_compile.errors import PlanError
from heterps_compile.runtime.row_split import Bags, Merge, RowSplit, cut, merge_pieces

CONCAT = (Merge(),)


@pytest.mark.parametrize(
    ("rows", "microbatches", "sizes"),
    [(7, 3, [3, 2, 2]), (8, 4, [2, 2, 2, 2]), (3, 8, [1, 1, 1]), (1, 4, [1]), (0, 4, [0]), (5, 1, [5])],
)
def test_pieces_are_as_even_as_tensor_splits(rows: int, microbatches: int, sizes: list[int]) -> None:
    split = RowSplit(split=("x", "ids"), merge=CONCAT, rows=("n",))
    inputs = {"x": torch.randn(rows, 2), "ids": torch.arange(rows), "n": rows, "w": torch.ones(2)}
    pieces = cut(split, inputs, microbatches)
    assert [piece.num_rows for piece in pieces] == sizes
    if len(pieces) == 1:
        assert not pieces[0].inputs
        return
    assert [piece.inputs["n"] for piece in pieces] == sizes
    assert torch.equal(torch.cat([piece.inputs["x"] for piece in pieces]), inputs["x"])
    assert all("w" not in piece.inputs for piece in pieces)


def test_a_mean_over_uneven_pieces_is_weighted_by_rows() -> None:
    x = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 27.0])
    parts = torch.tensor_split(x, 3)
    means = [part.mean() for part in parts]
    joined = merge_pieces(Merge(kind="mean"), means, [len(part) for part in parts])
    torch.testing.assert_close(joined, x.mean())
    assert abs(torch.stack(means).mean() - x.mean()) > 0.5  # unweighted is plainly wrong


def test_other_ways_to_join() -> None:
    a, b = torch.ones(2, 3), torch.zeros(2, 1)
    assert merge_pieces(Merge(dim=1), [a, b], [3, 1]).shape == (2, 4)
    assert merge_pieces(Merge(kind="sum"), [torch.tensor(2.0), torch.tensor(3.0)], [3, 1]).item() == 5.0
    assert merge_pieces(Merge(kind="sum"), [3, 1], [3, 1]) == 4
    assert merge_pieces(Merge(kind="same"), [a, b], [3, 1]) is a
    assert merge_pieces(Merge(), [None, None], [3, 1]) is None


@pytest.mark.parametrize("include_last", [False, True])
@pytest.mark.parametrize("offsets", [[0, 2, 2, 5, 6], [0, 0, 0, 0, 0], [0, 6, 6, 6, 6]])
def test_bags_are_cut_by_rows_and_count_from_their_own_start(offsets: list[int], include_last: bool) -> None:
    table, values = torch.randn(9, 3), torch.tensor([8, 1, 3, 3, 0, 5])
    starts = torch.tensor(offsets + [len(values)] * include_last)
    weights = torch.rand(len(values))
    inputs: dict[str, Any] = {"values": values, "weights": weights, "offsets": starts}
    bags = Bags(offsets="offsets", values=("values", "weights"), include_last_offset=include_last)

    def pool(part: Any) -> torch.Tensor:
        return F.embedding_bag(
            part["values"],
            table,
            part["offsets"],
            mode="sum",
            per_sample_weights=part["weights"],
            include_last_offset=include_last,
        )

    pieces = cut(RowSplit(split=(), merge=CONCAT, bags=(bags,)), inputs, 3)
    assert [piece.num_rows for piece in pieces] == [2, 2, 1]
    torch.testing.assert_close(torch.cat([pool(piece.inputs) for piece in pieces]), pool(inputs))


def test_inputs_that_disagree_are_listed() -> None:
    split = RowSplit(split=("x", "y"), merge=CONCAT)
    with pytest.raises(PlanError, match=r"disagree on the number of rows \(x: 3, y: 2\).*\n.*microbatches"):
        cut(split, {"x": torch.ones(3), "y": torch.ones(2)}, 2)
    with pytest.raises(PlanError, match="no input has rows"):
        cut(RowSplit(split=(), merge=CONCAT), {}, 2)
