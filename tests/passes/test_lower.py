"""Rows that are only read side by side are written so by the kernel; and nothing of the result gives that away."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heterps_compile.compiled import compiled_graphs
from heterps_compile.errors import HeterpsWarning, IdRangeError

ROWS, DIM = (7, 40, 5), 6
Combine = Callable[[list[Tensor]], Tensor]


class Columns(nn.Module):
    """Looks up one id per sample and table, as a column (batch, 1) or flat (batch,), and combines the rows."""

    def __init__(self, combine: Combine, *, flat: bool = False) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, DIM) for rows in ROWS)
        self.combine, self.flat = combine, flat

    def forward(self, ids: Tensor) -> Tensor:
        columns = [ids[:, k] if self.flat else ids[:, k : k + 1] for k in range(len(ROWS))]
        return self.combine([table(column) for table, column in zip(self.tables, columns, strict=True)])


def ids_of(batch: int) -> Tensor:
    return torch.stack([torch.randint(0, rows, (batch,)) for rows in ROWS], 1)


def check_equals_eager(model: nn.Module, inputs: Tensor, num_concat: int) -> None:
    """Output, its strides and gradients, and as many calls that write rows side by side as expected."""
    reference, ours = copy.deepcopy(model), model
    weights = torch.linspace(-1, 1, reference(inputs).numel())
    results = []
    for module, forward in ((reference, reference), (ours, torch.compile(ours, backend="heterps"))):
        output = forward(inputs)
        (output.flatten() * weights).sum().backward()
        results.append((output.detach(), output.stride(), [p.grad for p in module.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)
    calls = [call for graph in compiled_graphs(ours) for call in grouped_calls(graph.run)]
    assert sum(call.spec.layout == "concat" for call in calls) == num_concat


def grouped_calls(pipeline: Any) -> list[Any]:
    modules = [stage.run.__self__ for stage in pipeline.stages]
    return [child for module in modules for child in module.children() if hasattr(child, "spec")]


@pytest.mark.parametrize(
    ("combine", "flat"),
    [
        (lambda rows: torch.cat(rows, -1), False),
        (lambda rows: torch.cat(rows, 2), False),
        (lambda rows: torch.cat(rows, dim=1), False),
        (lambda rows: torch.cat(rows, 1), True),
        (lambda rows: torch.stack(rows, 1), True),
        (lambda rows: torch.cat(rows, 1).sum(1) + torch.cat(rows, -1).flatten(1)[:, :DIM] ** 2, False),
    ],
    ids=["last", "last from the front", "rows of a matrix", "flat", "stack", "read twice"],
)
def test_rows_read_side_by_side_are_looked_up_so(combine: Combine, flat: bool) -> None:
    check_equals_eager(Columns(combine, flat=flat), ids_of(9), num_concat=1)


@pytest.mark.parametrize(
    "combine",
    [
        lambda rows: torch.cat(rows, 0),
        lambda rows: torch.cat(rows, 1) * rows[0],
        lambda rows: torch.cat(rows, 1).sum(1) + torch.cat(rows[::-1], 1).amax(1),
        lambda rows: torch.cat(rows, 1).mul_(2).sum(1) + torch.cat(rows, -1).flatten(1)[:, :DIM],
    ],
    ids=["other dim", "read alone too", "two orders", "one of two written"],
)
def test_rows_that_something_else_needs_stay_apart(combine: Combine) -> None:
    check_equals_eager(Columns(combine), ids_of(9), num_concat=0)


def test_two_results_that_leave_the_graph_do_not_share_memory() -> None:
    model = Columns(lambda rows: (torch.cat(rows, 1), torch.cat(rows, -1)))  # type: ignore[arg-type, return-value]
    apart, side_by_side = torch.compile(model, backend="heterps")(ids_of(4))
    assert apart.data_ptr() != side_by_side.data_ptr()


def test_a_write_to_something_else_does_not_part_rows() -> None:
    def combine(rows: list[Tensor]) -> Tensor:
        total = torch.zeros(9, DIM)
        total += 1
        return total + torch.cat(rows, 1).sum(1)

    check_equals_eager(Columns(combine), ids_of(9), num_concat=1)


class WrittenBetween(nn.Module):
    """The table is written between its look-up and the node that reads the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, DIM) for rows in ROWS)

    def forward(self, ids: Tensor) -> Tensor:
        rows = [table(ids[:, k : k + 1]) for k, table in enumerate(self.tables)]
        with torch.no_grad():
            self.tables[0].weight.mul_(2)
        return torch.cat(rows, 1)


def test_rows_are_read_before_their_table_is_written() -> None:
    model = WrittenBetween()
    reference, ids = copy.deepcopy(model), ids_of(5)
    torch.testing.assert_close(torch.compile(model, backend="heterps")(ids), reference(ids))


def test_any_batch_size_fits_the_buffer() -> None:
    model = Columns(lambda rows: torch.cat(rows, 1))
    compiled = torch.compile(model, backend="heterps", dynamic=True)
    for batch in (3, 8, 0):
        ids = ids_of(batch)
        rows = [table(ids[:, k : k + 1]) for k, table in enumerate(model.tables)]
        torch.testing.assert_close(compiled(ids), torch.cat(rows, 1))


class FloatColumns(nn.Module):
    """Ids travel in one float matrix, as in deepctr-torch; ``written``: a column of it is changed after."""

    def __init__(self, rows: tuple[int, ...] = ROWS, *, written: bool = False) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(r, DIM) for r in rows)
        self.written = written

    def forward(self, x: Tensor) -> Tensor:
        first = x[:, :1].long()
        if self.written:
            first.zero_()
        rows = [table(x[:, k : k + 1].long()) for k, table in enumerate(self.tables)]
        return torch.cat(rows, 1).sum(1) * x[:, -1:] + first


def float_matrix(batch: int) -> Tensor:
    return torch.cat((ids_of(batch).float(), torch.rand(batch, 2)), 1)


def conversions(model: nn.Module) -> int:
    graphs = [stage.run.__self__.graph for graph in compiled_graphs(model) for stage in graph.run.stages]
    return sum(node.op == "call_method" and node.target in ("long", "to") for graph in graphs for node in graph.nodes)


@pytest.mark.parametrize(("written", "expected"), [(False, 1), (True, 2)])
def test_a_float_matrix_of_ids_is_converted_once(written: bool, expected: int) -> None:
    """But a column that is written to is a copy: who looks the same column up must not see that."""
    model = FloatColumns(written=written)
    check_equals_eager(model, float_matrix(9), num_concat=1)
    assert conversions(model) == expected


@pytest.mark.parametrize("bad", [-1.0, 40.0])
def test_ids_outside_their_table_are_named_when_they_travel_as_floats(bad: float) -> None:
    x = float_matrix(9)
    x[4, 1] = bad
    with pytest.raises(
        IdRangeError, match=rf"id {bad:.0f} at position \(4, 0\) is outside table 1 .*which has 40 rows"
    ):
        torch.compile(FloatColumns(), backend="heterps")(x)


@pytest.mark.parametrize(("dtype", "rows", "warns"), [("float16", 2049, True), ("float16", 2048, False)])
def test_ids_that_floats_cannot_tell_apart_are_warned_of(dtype: str, rows: int, warns: bool) -> None:
    x = float_matrix(5).to(getattr(torch, dtype))
    model = torch.compile(FloatColumns((7, rows, 5)), backend="heterps")
    if warns:
        with pytest.warns(HeterpsWarning, match=r"tables.1.weight, a table of 2,049 rows, .* only up to 2,048"):
            model(x)
    else:
        model(x)
