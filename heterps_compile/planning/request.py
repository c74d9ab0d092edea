"""What a plan is asked for: one frozen value that the planner's parts hand on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from heterps_compile.cost_model import FullMode
from heterps_compile.errors import OptionError

Mode = Literal["paper", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Every field can be left out.

    min_throughput: samples per second to reach.
    policy, seed: the policy taken as it is; without one ``rl`` and ``exact`` both run and the cheaper is taken.
    pin: layer glob -> resource type. replicas: resource type -> units, forced.
    mode: the cost model, ``paper`` (HeterPS as published) or ``full``, with its options (see :class:`FullMode`):
    microbatches a batch is cut into, training samples in all, samples per second that arrive, and which of its terms to
    leave out.
    compare: run every policy. quick: ``exact`` alone where it proves the optimum.
    time_limit_s: when searching stops; what is proven by then is said.
    """

    min_throughput: float | None = None
    policy: str | None = None
    seed: int = 0
    pin: Mapping[str, str] = field(default_factory=dict)
    replicas: Mapping[str, int] = field(default_factory=dict)
    mode: Mode = "paper"
    microbatches: int = 8
    samples: float | None = None
    data_rate: float | None = None
    without: tuple[str, ...] = ()
    compare: bool = False
    quick: bool = False
    time_limit_s: float = 60.0

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise OptionError(f"mode is {self.mode!r} (allowed: {', '.join(get_args(Mode))})")
        if self.data_rate and self.min_throughput and self.min_throughput > self.data_rate:
            raise OptionError(
                f"min_throughput is {self.min_throughput:g} where {self.data_rate:g} samples per second arrive "
                "(allowed: at most the data rate)"
            )
        if self.data_rate is not None and self.mode == "paper":
            raise OptionError("data_rate is given in paper mode, which pays by the sample", hint="ask for mode full")

    @property
    def floor(self) -> float | None:
        """Samples per second to reach: what was asked for, or what arrives."""
        return self.min_throughput if self.min_throughput is not None else self.data_rate

    @property
    def full(self) -> FullMode | None:
        """Options of ``full`` mode, None in ``paper`` mode."""
        if self.mode == "paper":
            return None
        return FullMode(
            microbatches=self.microbatches, samples=self.samples, data_rate=self.data_rate, without=self.without
        )
