"""The eager definition of a group of look-ups: what the kernels must equal, and what runs where they cannot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from heterps_compile.kernels.specs import GroupSpec, LookupSpec


def lookup_one(
    lookup: LookupSpec, table: Tensor, ids: Tensor, offsets: Tensor | None, weights: Tensor | None, *, sparse: bool
) -> Tensor:
    """One look-up as eager does it: ``ids.shape + (dim,)`` for mode ``"none"``, else ``(bags, dim)``."""
    if lookup.mode == "none":
        return F.embedding(
            ids, table, lookup.padding_idx, lookup.max_norm, lookup.norm_type, lookup.scale_grad_by_freq, sparse
        )
    return F.embedding_bag(
        ids,
        table,
        offsets,
        lookup.max_norm,
        lookup.norm_type,
        lookup.scale_grad_by_freq,
        lookup.mode,
        sparse,
        weights,
        lookup.include_last_offset,
        lookup.padding_idx,
    )


def lookup_group(
    spec: GroupSpec,
    tables: Sequence[Tensor],
    ids: Sequence[Tensor],
    offsets: Sequence[Tensor | None],
    weights: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """Every look-up of a group as eager does it; same arguments and outputs as ``lookup.lookup_group``.

    ``spec.lazy`` is not looked at: a table keeps the kind of gradient eager gives it.
    """
    outputs = tuple(
        lookup_one(lookup, tables[lookup.table], ids[k], offsets[k], weights[k], sparse=lookup.sparse)
        for k, lookup in enumerate(spec.lookups)
    )
    return (torch.cat(outputs, -1),) if spec.layout == "concat" else outputs
