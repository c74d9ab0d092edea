"""A trial run on fake tensors that follows the batch through every ATen operation.

Enters: fake tensors marked with where their batch is, then whatever runs under the mode. Leaves: the same marks for the
results. Refused: see ``fx/rows.py``; also writes to a tensor the trial was given, and random numbers that all rows of a
batch would share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # torch 2.13.0: no public name

from heterps_compile.fx import rows as rule
from heterps_compile.fx.rows import Batch, Call, NotRowwise, Offsets, Partial, Ragged, Rows
from heterps_compile.fx.values import tensors


def _table(**rows: str) -> dict[str, rule.Rule]:
    return {name: getattr(rule, chosen) for chosen, names in rows.items() for name in names.split()}


RULES: Mapping[str, rule.Rule] = _table(
    pointwise="""_to_copy copy fill zero bernoulli floor_divide masked_fill _prelu_kernel prelu where rsub hardswish
        log_sigmoid_forward rrelu_with_noise rrelu_with_noise_functional lift_fresh""",
    same="""detach alias clone lift_fresh_copy zeros_like ones_like full_like empty_like rand_like randn_like
        native_dropout dropout uniform normal exponential contiguous""",
    reshape="view reshape _unsafe_view _reshape_alias view_as flatten",
    permute="permute",
    transpose="transpose t",
    unsqueeze="unsqueeze",
    squeeze="squeeze",
    expand="expand broadcast_to",
    pick="""select slice narrow split split_with_sizes unbind chunk tensor_split
        unsafe_split unsafe_split_with_sizes unsafe_chunk""",
    along="_softmax _log_softmax softmax log_softmax cumsum cumprod logcumsumexp sort topk flip glu cummax cummin roll",
    reduce="""sum mean amax amin argmax argmin max min any all prod var std var_mean std_mean logsumexp
        linalg_vector_norm norm median mode kthvalue nansum""",
    product="mm bmm mv addmm baddbmm addmv dot",
    linear="linear",
    embedding="embedding",
    join="cat stack",
    gather="gather scatter scatter_add",
    index_select="index_select",
    index="index _unsafe_index",
    layer_norm="native_layer_norm _fused_rms_norm",
    batch_norm="""native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm
        _batch_norm_with_update _batch_norm_no_update""",
    leading="""convolution _convolution mkldnn_convolution native_group_norm max_pool2d_with_indices avg_pool2d
        max_pool3d_with_indices avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d
        upsample_nearest2d upsample_bilinear2d constant_pad_nd reflection_pad1d reflection_pad2d pixel_shuffle
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
        _scaled_dot_product_efficient_attention _scaled_dot_product_attention_math""",
    loss="""mse_loss binary_cross_entropy binary_cross_entropy_with_logits l1_loss smooth_l1_loss huber_loss
        soft_margin_loss""",
    nll_loss="nll_loss_forward nll_loss2d_forward",
)
"""Operations whose ``Tag.pointwise`` is set need no entry."""

FILLED = ("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "rand", "randn", "expand")
"""Operations whose result, made from sizes alone, holds rows that do not depend on one another."""
CASTS = ("_to_copy", "clone", "detach", "alias", "lift_fresh_copy", "view", "reshape")


class Trial(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own class is untyped
    """Marks tensors; ``rows`` is the batch size of the trial, a prime above all other sizes."""

    def __init__(self, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows
        self._marks: dict[int, tuple[torch.Tensor, Batch]] = {}
        self._given: set[int] = set()

    def give(self, tensor: torch.Tensor, batch: Batch | None) -> torch.Tensor:
        """Hand in an input; it must not be written to."""
        self.mark(tensor, batch)
        self._given.add(_storage(tensor))
        return tensor

    def mark(self, tensor: torch.Tensor, batch: Batch | None) -> None:
        """Say where the batch of a tensor is; the tensor is kept alive, so that its id stays its own."""
        if batch is not None:
            self._marks[id(tensor)] = (tensor, batch)

    def batch_of(self, value: Any) -> Batch | None:
        """Where the batch of a tensor is; None for what all rows share."""
        return self._marks[id(value)][1] if id(value) in self._marks else None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation on the fake tensors, then follow the batch."""
        result = func(*args, **(kwargs or {}))
        arguments = _by_name(func, args, kwargs or {})
        call = Call(func.overloadpacket.__name__.rstrip("_"), arguments, result, self.rows, self.batch_of)
        if not any(True for _ in tensors(result)):
            return _without_tensor(call)
        before = [(tensor, self.batch_of(tensor)) for tensor in _written(func, arguments)]
        if any(_storage(tensor) in self._given for tensor, _ in before):
            raise NotRowwise(f"{func.overloadpacket.__name__} writes to an input, parameter or buffer")
        self._check_numbers(func, arguments)
        marks = self._follow(func, call)
        for tensor, batch in zip(tensors(result), marks, strict=False):
            self._check(call, tensor, batch)
            self.mark(tensor, batch)
        for _, batch in before:
            if batch != next(iter(marks), None):
                raise NotRowwise(f"{func.overloadpacket.__name__} writes rows of the batch to memory all rows share")
        return result

    def _follow(self, func: Any, call: Call) -> list[Batch | None]:
        count = len(list(tensors(call.result)))
        kinds = {type(batch) for tensor in call.tensors() if (batch := self.batch_of(tensor)) is not None}
        if not kinds or call.name.startswith("new_"):
            return self._from_nothing(func, call)
        if Ragged in kinds or Offsets in kinds:
            return [_per_value(func, call)] * count
        if Partial in kinds:
            return [rule.linear_in_partials(call)] * count
        chosen = RULES.get(call.name) or (rule.pointwise if torch.Tag.pointwise in func.tags else None)
        if chosen is None:
            raise NotRowwise(f"{func} has no rule, so nothing is known of its rows")
        found = chosen(call)
        return found if isinstance(found, list) else [found] * count

    def _from_nothing(self, func: Any, call: Call) -> list[Batch | None]:
        marks: list[Batch | None] = []
        for tensor in tensors(call.result):
            holders = [dim for dim, size in enumerate(tensor.shape) if size and size % self.rows == 0]
            exact = len(holders) == 1 and tensor.shape[holders[0]] == self.rows and call.name in FILLED
            marks.append(Rows(holders[0]) if exact else None)
        if torch.Tag.nondeterministic_seeded in func.tags and None in marks:
            raise NotRowwise(f"{call.name} draws numbers that all rows of a batch share")
        return marks

    def _check_numbers(self, func: Any, arguments: Mapping[str, Any]) -> None:
        """A factor such as 1 / batch, which functions like ``kl_div`` make for themselves, differs between pieces."""
        for slot in func._schema.arguments:
            value = arguments.get(slot.name)
            scalar = isinstance(slot.type, (torch.NumberType, torch.TensorType))
            if scalar and isinstance(value, (int, float)) and value:
                for number in (abs(value), abs(1 / value)):
                    if self.rows / 2 < number < 2**53 and abs(number - self.rows * round(number / self.rows)) < 1.5:
                        raise NotRowwise(f"{func.overloadpacket.__name__} calculates with the batch size")

    def _check(self, call: Call, tensor: torch.Tensor, batch: Batch | None) -> None:
        """A size that the batch divides, and no other, must be marked: this catches batch sizes written as literals."""
        holders = [dim for dim, size in enumerate(tensor.shape) if size and size % self.rows == 0]
        expected = [batch.dim] if isinstance(batch, Rows) else [0] if isinstance(batch, Offsets) and holders else []
        if holders != expected:
            raise NotRowwise(f"{call.name} gives a size that depends on the batch in a way that is not followed")


def _without_tensor(call: Call) -> Any:
    """Sizes, devices and dtypes are free to ask for; values are not."""
    if call.name in ("_local_scalar_dense", "equal") and any(call.batch_of(tensor) for tensor in call.tensors()):
        raise NotRowwise(f"{call.name} reads a value of the batch")
    return call.result


def _per_value(func: Any, call: Call) -> Batch:
    """Values of bags may be cast and changed one by one; offsets only cast."""
    found = {batch for tensor in call.tensors() if (batch := call.batch_of(tensor)) is not None}
    if len(found) == 1:
        batch = next(iter(found))
        flat = all(tensor.ndim <= 1 for tensor in call.tensors())
        kept = next(tensors(call.result)).ndim == 1
        each = torch.Tag.pointwise in func.tags and isinstance(batch, Ragged)
        if flat and kept and (each or call.name in CASTS):
            return batch
    raise NotRowwise(f"{call.name} on the values of bags, which only embedding_bag may cut by rows")


def _by_name(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    slots = func._schema.arguments
    named = {slot.name: slot.default_value for slot in slots if slot.has_default_value()}
    named.update((slot.name, value) for slot, value in zip(slots, args, strict=False))
    named.update(kwargs)
    return named


def _written(func: Any, arguments: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for slot in func._schema.arguments:
        if slot.alias_info is not None and slot.alias_info.is_write:
            yield from tensors(arguments.get(slot.name))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # the storage object's address, tried on torch 2.13.0
