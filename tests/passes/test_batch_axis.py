"""What may be cut into microbatches, by the runtime's own cut and merge; and what may not, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heterps_compile.fx.values import size_hint
from heterps_compile.models import MODELS
from heterps_compile.passes.batch_axis import BatchAxis
from heterps_compile.row_split import Merge
from heterps_compile.runtime.row_split import cut, merge_pieces

BATCH = 7


def check_pieces_equal_whole(gm: Any, example_inputs: Any) -> tuple[Merge, ...]:
    """7 rows in 3 pieces (3, 2, 2) give the outputs of all 7."""
    verdict = BatchAxis()(gm, example_inputs)
    assert verdict.row_split is not None, verdict.reason
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    values = [size_hint(value) if isinstance(value, torch.SymInt) else value for value in example_inputs]
    inputs = dict(zip(names, values, strict=True))
    pieces = cut(verdict.row_split, inputs, 3)
    assert [piece.num_rows for piece in pieces] == [3, 2, 2]
    found = [gm.forward(*(piece.inputs.get(name, inputs[name]) for name in names)) for piece in pieces]
    for place, whole in enumerate(gm.forward(*values)):
        merged = merge_pieces(verdict.row_split.merge[place], [out[place] for out in found], [3, 2, 2])
        torch.testing.assert_close(merged, whole)
    return verdict.row_split.merge


def autocast_inside(m: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.a(x).float()


def writes_inside(m: nn.Module, x: Tensor) -> Tensor:
    y = m.a(x)
    y[:, 0] = 1
    y += 1
    y[:, 1:] *= x[:, :3]
    return y


X = torch.randn(BATCH, 6)
IDS = torch.randint(0, 40, (BATCH, 3))
ROWWISE: dict[str, tuple[Callable[[type], nn.Module], tuple[Tensor, ...]]] = {
    "batch norm in eval": (lambda _: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).eval(), (X,)),
    "transformer": (
        lambda _: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0),
        (torch.randn(BATCH, 5, 8),),
    ),
    "cnn": (
        lambda _: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.ReLU(True), nn.MaxPool2d(2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 2)
        ),
        (torch.randn(BATCH, 3, 8, 8),),
    ),
    "gru cell": (lambda _: nn.GRUCell(6, 4), (X, torch.zeros(BATCH, 4))),
    "softmax of a row": (lambda c: c(lambda m, x: F.softmax(x, 1).cumsum(1).sort(1).values), (X,)),
    "standardised row": (lambda c: c(lambda m, x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)), (X,)),
    "gather": (lambda c: c(lambda m, x: x.gather(1, x.argmax(1, keepdim=True))), (X,)),
    "flattened": (lambda c: c(lambda m, x: x.reshape(-1, 2).relu()), (X,)),
    "einsum": (lambda c: c(lambda m, x: torch.einsum("bi,ij->bj", x, m.w), w=nn.Parameter(torch.randn(6, 2))), (X,)),
    "autocast": (lambda c: c(autocast_inside, a=nn.Linear(6, 4)), (X,)),
    "writes to what it made": (lambda c: c(writes_inside, a=nn.Linear(6, 4)), (X,)),
    "bag of 2-D ids": (lambda c: c(lambda m, i: m.t(i), t=nn.EmbeddingBag(40, 4)), (IDS,)),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWWISE)
@pytest.mark.parametrize("dynamic", [False, True])
def test_pieces_equal_the_whole(name: str, dynamic: bool, record: Any, composed: type) -> None:
    build, inputs = ROWWISE[name]
    ((gm, example_inputs),) = record(build(composed), *inputs, dynamic=dynamic)
    assert {merge.kind for merge in check_pieces_equal_whole(gm, example_inputs)} == {"concat"}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_package_can_be_cut(name: str, record: Any) -> None:
    inputs = torch.randn(BATCH, 13), torch.randint(0, 40, (BATCH, 26))
    ((gm, example_inputs),) = record(MODELS[name]([40] * 26, 4), *inputs)
    check_pieces_equal_whole(gm, example_inputs)


def test_the_batch_may_end_in_another_dimension(record: Any, composed: type) -> None:
    ((gm, example_inputs),) = record(composed(lambda m, x: x.t()), X)
    assert check_pieces_equal_whole(gm, example_inputs) == (Merge(kind="concat", dim=1),)


LOSSES: dict[str, tuple[Callable[..., Tensor], str]] = {
    "mse": (lambda m, x, y: F.mse_loss(m.a(x), y), "mean"),
    "logits": (lambda m, x, y: 2 * F.binary_cross_entropy_with_logits(m.a(x), y.sigmoid()), "mean"),
    "sum": (lambda m, x, y: F.binary_cross_entropy(m.a(x).sigmoid(), y.sigmoid(), reduction="sum"), "sum"),
    "cross entropy": (lambda m, x, y: F.cross_entropy(m.a(x), y.argmax(1), reduction="sum"), "sum"),
    "regularised": (lambda m, x, y: (m.a(x) - y).abs().mean() + 0.1 * m.a.weight.square().sum(), "mean"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_joined_by_rows(name: str, record: Any, composed: type) -> None:
    call, kind = LOSSES[name]
    ((gm, example_inputs),) = record(composed(call, a=nn.Linear(6, 4)), X, torch.randn(BATCH, 4))
    (merge,) = check_pieces_equal_whole(gm, example_inputs)
    assert merge.kind == kind


@pytest.mark.parametrize("last", [False, True])
def test_bags_are_cut_by_their_offsets(last: bool, record: Any, composed: type) -> None:
    def call(m: nn.Module, values: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        return m.t(values, offsets) + m.u(values.long(), offsets, weights * 2)

    model = composed(
        call,
        t=nn.EmbeddingBag(40, 4, include_last_offset=last),
        u=nn.EmbeddingBag(40, 4, mode="sum", include_last_offset=last),
    )
    offsets = torch.tensor([0, 2, 2, 9, 20, 30, 33, *([40] if last else [])])
    ((gm, example_inputs),) = record(model, torch.randint(0, 40, (40,)), offsets, torch.rand(40))
    check_pieces_equal_whole(gm, example_inputs)


REFUSED: dict[str, tuple[Callable[[type], nn.Module], tuple[Tensor, ...], str]] = {
    "batch norm": (
        lambda _: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), (X,),
        "batch_norm in training mode .* in module 1",
    ),
    "batch norm without statistics": (
        lambda _: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False)), (X,),
        "batch_norm in training mode",
    ),
    "centred batch": (lambda c: c(lambda m, x: x - x.sum(0)), (X,), "sub uses a sum or mean over the batch"),
    "softmax over the batch": (lambda c: c(lambda m, x: F.softmax(x, 0)), (X,), "_softmax runs along the batch"),
    "sorted batch": (lambda c: c(lambda m, x: x.sort(0).values), (X,), "sort runs along the batch"),
    "in-batch negatives": (lambda c: c(lambda m, x: m.a(x) @ m.a(x).t(), a=nn.Linear(6, 4)), (X,), "one another"),
    "root of a mean": (lambda c: c(lambda m, x: x.square().mean().sqrt()), (X,), "sqrt uses a sum or mean"),
    "sum plus a penalty": (
        lambda c: c(lambda m, x: x.sum() + m.w.sum(), w=nn.Parameter(torch.ones(3))), (X,), "add uses a sum or mean",
    ),
    "batchmean": (
        lambda c: c(lambda m, x: F.kl_div(x.log_softmax(1), x.softmax(1), reduction="batchmean")), (X,),
        "calculates with the batch size",
    ),
    "mean cross entropy": (
        lambda c: c(lambda m, x: F.cross_entropy(x, x.argmax(1))), (X,), "divides by the targets not ignored",
    ),
    "buffer": (
        lambda c: c(lambda m, x: x * m.count.add_(1), count=nn.Parameter(torch.zeros(6), requires_grad=False)), (X,),
        "add_ writes to an input, parameter or buffer",
    ),
    "gradients by frequency": (
        lambda c: c(lambda m, i: m.t(i), t=nn.Embedding(40, 4, scale_grad_by_freq=True)), (IDS,), "scale_grad_by_freq",
    ),
    "bag gradients by frequency": (
        lambda c: c(lambda m, i: m.t(i), t=nn.EmbeddingBag(40, 4, mode="sum", scale_grad_by_freq=True)), (IDS,),
        "scale_grad_by_freq",
    ),
    "max_norm": (lambda c: c(lambda m, i: m.t(i), t=nn.Embedding(40, 4, max_norm=1.0)), (IDS,), "writes to an input"),
    "shared random numbers": (lambda c: c(lambda m, x: x * torch.rand(6)), (X,), "rand draws numbers"),
    "twice as many rows": (lambda c: c(lambda m, x: torch.cat([x, x])), (X,), "cat joins along the batch"),
    "part of the rows": (lambda c: c(lambda m, x: x[1:]), (X,), "slice takes a part of the batch"),
    "batch inside a dimension": (lambda c: c(lambda m, x: x.t().reshape(-1)), (X,), "inside a flattened dimension"),
    "literal in a view": (lambda c: c(lambda m, x: x.view(len(x), 2, -1)), (X,), "view works for a batch of 7 only"),
    "literal in zeros": (lambda c: c(lambda m, x: x.new_zeros(len(x), 1) + x), (X,), "works for a batch of 7 only"),
    "position in the batch": (
        lambda c: c(lambda m, x: x[torch.arange(len(x)), x.argmax(1)]), (X,), "works for a batch of 7 only",
    ),
    "one row": (lambda _: nn.Linear(6, 4), (X[:1],), "a batch of 1 has no rows to cut"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_rows_is_refused_with_the_reason(name: str, record: Any, composed: type) -> None:
    build, inputs, reason = REFUSED[name]
    ((gm, example_inputs),) = record(build(composed), *inputs)
    verdict = BatchAxis()(gm, example_inputs)
    assert not verdict.safe
    with pytest.raises(AssertionError, match=reason):
        check_pieces_equal_whole(gm, example_inputs)


@pytest.mark.parametrize("call", [lambda m, x: x.view(len(x), 2, -1), lambda m, x: x.new_zeros(len(x), 1) + x])
def test_a_symbolic_batch_size_in_a_shape_is_fine(call: Any, record: Any, composed: type) -> None:
    ((gm, example_inputs),) = record(composed(call), X, dynamic=True)
    check_pieces_equal_whole(gm, example_inputs)


def test_arithmetic_with_a_symbolic_batch_size_is_refused(record: Any, composed: type) -> None:
    ((gm, example_inputs),) = record(composed(lambda m, x: x * len(x)), X, dynamic=True)
    assert "mul calculates with the batch size" in BatchAxis()(gm, example_inputs).reason


def test_two_dimensions_of_the_batch_are_refused(record: Any, composed: type) -> None:
    ((gm, example_inputs),) = record(composed(lambda m, x: (x + 1, x.new_zeros(len(x), len(x)))), X, dynamic=True)
    assert "new_zeros gives a size that depends on the batch" in BatchAxis()(gm, example_inputs).reason


def test_the_trial_leaves_no_trace(record: Any, composed: type) -> None:
    model = composed(lambda m, x: autocast_inside(m, F.dropout(x)) @ x, a=nn.Linear(6, 7))  # fails inside autocast
    ((gm, example_inputs),) = record(model, X)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    assert not BatchAxis()(gm, example_inputs).safe
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    torch.testing.assert_close(model.state_dict(), weights)
