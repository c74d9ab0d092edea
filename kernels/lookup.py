"""Embedding look-ups of one group: one call forward, one backward, sparse gradients that are already coalesced.

Enters: a :class:`GroupSpec` and the tensors of each look-up, as ``F.embedding`` and ``F.embedding_bag`` take them.
Leaves: their outputs, differentiable in the tables and the per-sample weights. CPU kernels do what they can; the rest
of a group goes to ``reference.py``: ``max_norm``, tables that are not contiguous CPU float tensors,
``scale_grad_by_freq`` except for a dense gradient of a table with one ``F.embedding``, any backward under
``create_graph=True``, and every call that eager refuses, so that its error is eager's. Ids are checked before use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from heterps_compile.kernels import reference
from heterps_compile.kernels.cpu_units import prepare
from heterps_compile.kernels.group_call import BadOffsets, GroupCall, make_call
from heterps_compile.kernels.specs import GroupSpec, LookupSpec

__all__ = ["GroupSpec", "LookupSpec", "lookup_group", "prepare"]


def lookup_group(
    spec: GroupSpec,
    tables: Sequence[Tensor],
    ids: Sequence[Tensor],
    offsets: Sequence[Tensor | None],
    weights: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """The outputs of every look-up of ``spec``: ``ids.shape + (dim,)`` for mode ``"none"``, else ``(bags, dim)``.

    ``tables[k]`` is ``(rows, dim)``; ``ids``, ``offsets`` and ``weights`` have one entry per look-up. With layout
    ``"concat"``: a tuple of one tensor. Raises :class:`IdRangeError` (an ``IndexError``) for an id outside its table,
    and what eager raises for other misuse.
    """
    call = make_call(spec, tables, ids, offsets, weights)
    if call is None:
        return reference.lookup_group(spec, tables, ids, offsets, weights)
    inputs = [*tables, *(weight for weight in weights if weight is not None)]
    try:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            outputs = _Lookups.apply(call, *inputs)  # type: ignore[no-untyped-call]
        else:
            outputs = call.forward()
    except BadOffsets:
        return reference.lookup_group(spec, tables, ids, offsets, weights)
    return call.complete(outputs)


class _Lookups(torch.autograd.Function):
    """The look-ups of a call that kernels serve, as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, call: GroupCall, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*call.read_in_backward(inputs))
        return call.forward()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.saved_tensors  # noqa: B018  (raises if the graph was freed, or if what was saved has been changed in place)
        call: GroupCall = ctx.call
        wanted = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # create_graph=True: these gradients will be differentiated themselves
            return None, *call.differentiable_backward(grads, wanted)
        return None, *call.backward(grads, wanted)
