"""Where the batch is in a tensor, and what each ATen operation does to it.

Enters: ATen calls on tensors whose batch is known. Leaves: where the batch is in the results, so that a row of a result
depends on the same row of the inputs and on what all rows share. Refused, by :class:`NotRowwise`: every operation that
mixes rows, and every operation this file has no rule for.

Legend: a tensor's dimension may hold the batch among others, as a flattened ``(heads, batch, length)`` does. Its index
then is ``(outer, row, inner)`` in row-major order. ``rows`` is the batch size of the trial, a prime larger than any
other size in the graph: a size that ``rows`` divides carries the batch, and no other does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from heterps_compile.fx.values import tensors


class NotRowwise(Exception):
    """Cutting the batch could change the result; the text says which operation does it."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Dimension ``dim`` is ``(outer, rows, inner)`` flattened."""

    dim: int
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True, slots=True)
class Partial:
    """A sum over rows, or a mean over rows: pieces add up, weighted by their rows for a mean."""

    kind: Literal["sum", "mean"]


@dataclass(frozen=True, slots=True)
class Ragged:
    """Dimension 0 lists the values of all bags, one row after the other; ``offsets`` names the input that cuts it."""

    offsets: str


@dataclass(frozen=True, slots=True)
class Offsets:
    """The positions at which the bags of an input begin."""

    offsets: str


Batch = Rows | Partial | Ragged | Offsets
"""None, in a signature, is a tensor that all rows share."""


@dataclass(frozen=True, slots=True)
class Call:
    """One ATen call with its arguments by name, its result, and where the batch is in each tensor argument."""

    name: str
    arguments: Mapping[str, Any]
    result: Any
    rows: int
    batch_of: Callable[[Any], Batch | None]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument by name, where the operation has it."""
        return self.arguments.get(name, default)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Tensor arguments, lists flattened."""
        return tensors(tuple(self.arguments.values()))

    def first(self) -> tuple[torch.Tensor, Rows]:
        """The first tensor argument, which must carry the batch."""
        tensor = next(self.tensors())
        return tensor, self.carrier(tensor)

    def carrier(self, tensor: torch.Tensor) -> Rows:
        """Where the batch is in an argument that must carry it."""
        batch = self.batch_of(tensor)
        if not isinstance(batch, Rows):
            raise NotRowwise(f"{self.name} reads a batch where its rule expects none")
        return batch

    def shared(self, *names: str) -> None:
        """Refuse a batch in arguments that every row must share."""
        for name in names:
            for tensor in tensors(self.get(name)):
                if self.batch_of(tensor) is not None:
                    raise NotRowwise(f"{self.name} takes its {name} from the batch, so rows share what other rows made")


Rule = Callable[[Call], Batch | list[Batch | None] | None]


def dim_of(dim: int, ndim: int) -> int:
    """A dimension counted from the front."""
    return dim % max(1, ndim)


def pointwise(call: Call) -> Batch:
    """Broadcast from the right: every batched operand must hold the batch in the same place of the result."""
    out = next(tensors(call.result))
    found = {_from_right(tensor, batch, out) for tensor in call.tensors() if (batch := call.batch_of(tensor))}
    if len(found) != 1:
        raise NotRowwise(f"{call.name} combines tensors that hold the batch in different dimensions")
    return found.pop()


def _from_right(tensor: torch.Tensor, batch: Batch, out: torch.Tensor) -> Rows:
    assert isinstance(batch, Rows)
    return replace(batch, dim=batch.dim + out.ndim - tensor.ndim)


def same(call: Call) -> Batch:
    """As in the first argument."""
    return call.first()[1]


def reshape(call: Call) -> Batch:
    """Find the new dimension that holds the batch; what was slower stays slower, what was faster stays faster."""
    source, batch = call.first()
    old, new = source.shape, next(tensors(call.result)).shape
    before = math.prod(old[: batch.dim]) * batch.outer
    after = math.prod(old[batch.dim + 1 :]) * batch.inner
    holders = [dim for dim, size in enumerate(new) if size % call.rows == 0]
    if len(holders) == 1:
        dim = holders[0]
        outer, rest = divmod(before, math.prod(new[:dim]))
        inner, left = divmod(after, math.prod(new[dim + 1 :]))
        if not rest and not left and outer * call.rows * inner == new[dim]:
            return Rows(dim, outer, inner)
    raise NotRowwise(f"{call.name} to {_sizes(new, call.rows)} cuts through the batch")


def permute(call: Call) -> Batch:
    """Where the batch's dimension goes."""
    source, batch = call.first()
    order = [dim_of(dim, source.ndim) for dim in call["dims"]]
    return replace(batch, dim=order.index(batch.dim))


def transpose(call: Call) -> Batch:
    """Where the batch's dimension goes; ``t`` swaps the two of a matrix."""
    source, batch = call.first()
    a, b = (dim_of(call[name], source.ndim) for name in ("dim0", "dim1")) if "dim0" in call.arguments else (0, 1)
    return replace(batch, dim={a: b, b: a}.get(batch.dim, batch.dim)) if source.ndim > 1 else batch


def unsqueeze(call: Call) -> Batch:
    """Dimensions behind the new one move up."""
    source, batch = call.first()
    dim = dim_of(call["dim"], source.ndim + 1)
    return replace(batch, dim=batch.dim + (dim <= batch.dim))


def squeeze(call: Call) -> Batch:
    """Dimensions of size 1 go; the batch's is never one of them."""
    source, batch = call.first()
    out = next(tensors(call.result))
    if out.ndim == source.ndim:
        return batch
    dims = call.get("dim")
    dims = range(source.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {dim_of(dim, source.ndim) for dim in dims if source.shape[dim] == 1}
    return replace(batch, dim=batch.dim - sum(dim < batch.dim for dim in gone))


def expand(call: Call) -> Batch:
    """Aligned from the right; the batch's own dimension is never of size 1."""
    return _from_right(*call.first(), next(tensors(call.result)))


def pick(call: Call) -> Batch | list[Batch | None]:
    """select, slice, split, unbind: free along any dimension but the batch's."""
    source, batch = call.first()
    dim = dim_of(call.get("dim", 0), source.ndim)
    results = list(tensors(call.result))
    if dim == batch.dim:
        if len(results) == 1 and results[0].shape == source.shape:
            return batch
        raise NotRowwise(f"{call.name} takes a part of the batch")
    lost = results[0].ndim < source.ndim and dim < batch.dim
    return [replace(batch, dim=batch.dim - lost) for _ in results]


def along(call: Call) -> Batch:
    """Operations along one dimension that keep the shape: softmax, cumsum, sort, flip."""
    source, batch = call.first()
    dims = call.get("dims", call.get("dim", -1))
    dims = [dims] if isinstance(dims, int) else dims or range(source.ndim)
    if batch.dim in [dim_of(dim, source.ndim) for dim in dims]:
        raise NotRowwise(f"{call.name} runs along the batch")
    return batch


def reduce(call: Call) -> Batch:
    """Reductions over other dimensions keep the batch; a sum or mean over it gives a partial result."""
    source, batch = call.first()
    dims = call.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims) if dims else list(range(source.ndim))
    dims = [dim_of(dim, source.ndim) for dim in dims]
    if batch.dim in dims:
        if call.name in ("sum", "mean"):
            return Partial("sum" if call.name == "sum" else "mean")
        raise NotRowwise(f"{call.name} reduces the batch")
    lost = 0 if call.get("keepdim") else sum(dim < batch.dim for dim in dims)
    return replace(batch, dim=batch.dim - lost)


def product(call: Call) -> Batch:
    """mm, bmm, mv, addmm, ...: a dimension of the result stays, the summed one must not hold the batch."""
    operands = list(call.tensors())
    biased = call.name in ("addmm", "baddbmm", "addmv")
    left, right = operands[-2:] if biased else operands[:2]
    out = next(tensors(call.result))
    found: set[Batch] = set()
    if call.batch_of(left) is not None:
        batch = call.carrier(left)
        found.add(batch if batch.dim < left.ndim - 1 else _summed(call))
    if call.batch_of(right) is not None:
        batch = call.carrier(right)
        last = right.ndim >= 2 and batch.dim == right.ndim - 1
        found.add(replace(batch, dim=out.ndim - 1) if last else batch if batch.dim < right.ndim - 2 else _summed(call))
    if biased and call.batch_of(operands[0]) is not None:
        found.add(_from_right(operands[0], call.carrier(operands[0]), out))
    if len(found) != 1:
        raise NotRowwise(f"{call.name} multiplies rows of the batch with one another")
    return found.pop()


def _summed(call: Call) -> Batch:
    raise NotRowwise(f"{call.name} sums over the batch")


def linear(call: Call) -> Batch:
    """Rows of the input, along any dimension but the last."""
    call.shared("weight", "bias")
    source, batch = call.first()
    if batch.dim == source.ndim - 1:
        raise NotRowwise(f"{call.name} sums over the batch")
    return batch


def embedding(call: Call) -> Batch:
    """A row per id, where the ids hold the batch."""
    call.shared("weight")
    if call.get("scale_grad_by_freq"):
        raise NotRowwise("embedding scales gradients by how often an id is in the batch (scale_grad_by_freq)")
    return call.carrier(call["indices"])


def join(call: Call) -> Batch:
    """cat along another dimension; all parts hold the batch alike."""
    parts = [tensor for tensor in call.tensors() if tensor.numel() or tensor.ndim > 1]
    found = {call.batch_of(tensor) for tensor in parts}
    out = next(tensors(call.result))
    batch = next(iter(found))
    if len(found) != 1 or not isinstance(batch, Rows):
        raise NotRowwise(f"{call.name} joins tensors that hold the batch in different dimensions")
    if call.name == "stack":
        return replace(batch, dim=batch.dim + (dim_of(call["dim"], out.ndim) <= batch.dim))
    if dim_of(call["dim"], out.ndim) == batch.dim:
        raise NotRowwise(f"{call.name} joins along the batch")
    return batch


def gather(call: Call) -> Batch:
    """Along another dimension, with an index that holds the batch alike."""
    source, batch = call.first()
    if dim_of(call["dim"], source.ndim) == batch.dim:
        raise NotRowwise(f"{call.name} picks rows of the batch")
    others = [call.batch_of(value) for name in ("index", "src") if isinstance(value := call.get(name), torch.Tensor)]
    if any(other not in (batch, None) for other in others):
        raise NotRowwise(f"{call.name} combines tensors that hold the batch in different dimensions")
    return batch


def index_select(call: Call) -> Batch:
    """Either the tensor or the index holds the batch, not both."""
    source, batch = next(call.tensors()), call.batch_of(next(call.tensors()))
    dim = dim_of(call["dim"], source.ndim)
    chosen = call.batch_of(call["index"])
    if batch is None and isinstance(chosen, Rows):
        return replace(chosen, dim=dim)
    if chosen is not None or not isinstance(batch, Rows) or batch.dim == dim:
        raise NotRowwise(f"{call.name} picks rows of the batch")
    return batch


def index(call: Call) -> Batch:
    """``x[:, i, j]``: either the indexed tensor or the indices hold the batch, not both."""
    source, indices = call["self"], list(call["indices"])
    places = [dim for dim, item in enumerate(indices) if item is not None]
    if any(item.dtype in (torch.bool, torch.uint8) for item in indices if item is not None):
        raise NotRowwise("index by a mask gives a number of rows that depends on the data")
    picked = [item for item in indices if item is not None]
    width = max(item.ndim for item in picked)
    adjacent = places == list(range(places[0], places[-1] + 1))
    start = places[0] if adjacent else 0
    batch = call.batch_of(source)
    chosen = {
        replace(b, dim=b.dim + width - item.ndim) for item in picked if isinstance(b := call.batch_of(item), Rows)
    }
    if batch is None and len(chosen) == 1:
        found = chosen.pop()
        return replace(found, dim=found.dim + start)
    if chosen or not isinstance(batch, Rows) or batch.dim in places:
        raise NotRowwise("index picks rows of the batch")
    before = sum(place < batch.dim for place in places)
    moved = batch.dim - before + (width if not adjacent or places[0] < batch.dim else 0)
    return replace(batch, dim=moved)


def layer_norm(call: Call) -> Batch:
    """Statistics over the trailing dimensions."""
    call.shared("weight", "bias")
    source, batch = call.first()
    if batch.dim >= source.ndim - len(call["normalized_shape"]):
        raise NotRowwise(f"{call.name} normalises over the batch")
    return batch


def batch_norm(call: Call) -> list[Batch | None]:
    """Running statistics only; those of the batch mix its rows."""
    training = call.get("training", call.get("train", "no_training" not in call.name and "no_stats" in call.name))
    if training or call.get("running_mean") is None:
        raise NotRowwise("batch_norm in training mode normalises over the batch; call .eval() or set microbatches to 1")
    call.shared("weight", "bias", "running_mean", "running_var")
    batch = call.first()[1]
    if batch.dim == 1:
        raise NotRowwise("batch_norm takes the batch for its channels")
    return [batch, *(None for _ in list(tensors(call.result))[1:])]


def leading(call: Call) -> Batch:
    """Convolutions, pooling, attention, group norm: independent along dimension 0."""
    call.shared("weight", "bias")
    found = {batch for tensor in call.tensors() if (batch := call.batch_of(tensor)) is not None}
    batch = next(iter(found))
    if len(found) != 1 or not isinstance(batch, Rows) or batch.dim != 0:
        raise NotRowwise(f"{call.name} needs the batch in its first dimension")
    return batch


def loss(call: Call) -> Batch:
    """Element losses: unreduced like a pointwise operation, else a partial sum or mean over the rows."""
    aligned = pointwise(replace(call, result=call["self"]))
    reduction = call.get("reduction", 1)
    return aligned if reduction == 0 else Partial("mean" if reduction == 1 else "sum")


def nll_loss(call: Call) -> list[Batch | None]:
    """A mean divides by the rows whose target is not ignored, which pieces cannot know of one another."""
    call.shared("weight")
    if call["reduction"] == 1:
        raise NotRowwise("a mean cross entropy divides by the targets not ignored; reduction='sum' can be cut")
    target = call.carrier(call["target"])
    return [target, None] if call["reduction"] == 0 else [Partial("sum"), Partial("sum")]


def linear_in_partials(call: Call) -> Batch:
    """What may be done to sums and means over rows: scale by what rows share, negate, view, and add of their kind."""
    batches = [call.batch_of(tensor) for tensor in call.tensors()]
    kinds = {batch for batch in batches if batch is not None}
    if len(kinds) == 1 and isinstance(kind := next(iter(kinds)), Partial):
        alone = len([batch for batch in batches if batch is not None]) == 1
        if call.name in _SCALE and alone and (call.name != "div" or call.batch_of(call["self"]) == kind):
            return kind
        shared = (len(batches) > 1 and None in batches) or isinstance(call.get("other"), (int, float))
        if call.name in ("add", "sub") and (kind.kind == "mean" or not shared):
            return kind
    raise NotRowwise(f"{call.name} uses a sum or mean over the batch")


_SCALE = ("mul", "div", "neg", "sum", "_to_copy", "clone", "detach", "alias", "view", "reshape", "_unsafe_view",
          "squeeze", "unsqueeze", "expand")  # fmt: skip


def _sizes(sizes: Sequence[int], rows: int) -> str:
    return f"({', '.join('batch' if size == rows else str(size) for size in sizes)})"
