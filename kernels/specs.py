"""What a group of look-ups is: the static half of every call, hashable, so that layouts can be cached by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["none", "sum", "mean", "max"]
Layout = Literal["separate", "packed", "concat"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LookupSpec:
    """One call of ``F.embedding`` (mode ``"none"``) or ``F.embedding_bag``: its table's index and static arguments.

    ``padding_idx`` may be negative, counted from the end as eager does. ``name`` is only for error messages.
    """

    table: int
    mode: Mode = "none"
    padding_idx: int | None = None
    include_last_offset: bool = False
    scale_grad_by_freq: bool = False
    has_offsets: bool = False
    has_weights: bool = False
    sparse: bool = False
    max_norm: float | None = None
    norm_type: float = 2.0
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpec:
    """Look-ups that one call serves.

    ``lazy``: every table gets a coalesced sparse gradient, also those with ``sparse=False`` (the optimizer half,
    which makes that exact, is ``heterps_compile.optim``).

    ``layout`` of the outputs: ``"separate"`` gives each output the strides eager gives it. ``"packed"`` lays the
    outputs side by side in one ``(rows, sum of dims)`` buffer, so that a ``torch.cat(outputs, -1)`` that follows
    reads one stream; right only if nothing that follows depends on strides (``view``, ``is_contiguous``).
    ``"concat"`` returns that buffer itself: a tuple of one tensor, equal to ``(torch.cat(outputs, -1),)``, without
    the copy and with one gradient coming back.
    """

    lookups: tuple[LookupSpec, ...]
    lazy: bool = False
    layout: Layout = "separate"
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.lookups, self.lazy, self.layout)))

    def __hash__(self) -> int:  # computed once: a spec is a dictionary key in every call
        return self._hash
