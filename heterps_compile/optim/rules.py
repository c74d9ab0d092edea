"""When an update that touches only the rows with a gradient equals what the optimizer does in eager: all of it, in one
place.

Enters: an optimizer and one of its param groups. Leaves: a :class:`Recipe`, or a :class:`Refusal` that says what
to change. A row without a gradient, under torch's own formulas with a gradient of zeros:

- SGD without momentum, Adagrad, our own RowWiseAdagrad and FTRL: does not move, nor does its state. Always exact.
- RMSprop (no momentum, not centered): does not move; its second moment decays by a known factor.
- SGD with momentum, Adam, AdamW: moves by a rule that needs nothing but its own state and the rates of the steps it
  missed, so it can be caught up when it is next read (``lazy.py``).
- Anything that mixes the row itself into the gradient (coupled ``weight_decay``), takes a maximum over time
  (``amsgrad``), or lets torch keep numbers on the device (``capturable``), stays dense. So does ``fused`` where it is
  more than another way to the same numbers: under a ``GradScaler``, which it unscales for, and in half precision.

Tables with ``sparse=True`` follow eager's sparse semantics instead: SGD without momentum, Adagrad, SparseAdam and our
own are taken over, and everything else is left to torch, errors included. SparseAdam knows no other semantics: its
lazy tables step as sparse ones do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop, SparseAdam

from heterps_compile.kernels.cpu_update import Rule
from heterps_compile.optim.ftrl import FTRL
from heterps_compile.optim.rowwise_adagrad import RowWiseAdagrad

Group = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRates:
    """The numbers of one step; fields as the C++ struct ``Step``."""

    rate: float
    bias2: float = 1.0
    beta1: float = 0.0
    beta2: float = 0.0
    gain: float = 1.0
    eps: float = 0.0
    decay: float = 1.0
    l1: float = 0.0
    l2: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How a group steps: ``first`` and ``second`` are keys of ``optimizer.state[p]``; ``rates(group, t)`` is step t,
    from 1 on.

    ``rows_move``: rows without a gradient move. ``state_decays``: at least their state changes. ``make``: makes the
    state at the first step; by default zeros like the table.
    """

    rule: Rule
    rates: Callable[[Group, int], StepRates]
    first: str | None = None
    second: str | None = None
    counts_steps: bool = True
    rows_move: bool = False
    state_decays: bool = False
    make: Callable[[Group, Tensor], dict[str, Tensor]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why a group stays dense, and what to change."""

    reason: str
    hint: str


def _sign(group: Group) -> float:
    return -1.0 if group["maximize"] else 1.0


def _sgd(group: Group, t: int) -> StepRates:
    del t
    return StepRates(rate=float(group["lr"]), gain=_sign(group))


def _momentum(group: Group, t: int) -> StepRates:
    # torch's first step stores the gradient itself, undamped
    damping = 1.0 if t == 1 else 1.0 - group["dampening"]
    sign = _sign(group)
    return StepRates(rate=float(group["lr"]), beta1=group["momentum"], beta2=sign, gain=sign * damping)


def _adagrad(group: Group, t: int) -> StepRates:
    rate = float(group["lr"]) / (1 + (t - 1) * group["lr_decay"])
    return StepRates(rate=rate, gain=_sign(group), eps=group["eps"])


def _rmsprop(group: Group, t: int) -> StepRates:
    del t
    return StepRates(rate=float(group["lr"]), beta2=group["alpha"], gain=_sign(group), eps=group["eps"])


def _adam(group: Group, t: int) -> StepRates:
    lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
    return StepRates(
        rate=lr / (1 - beta1**t),
        bias2=math.sqrt(1 - beta2**t),
        beta1=beta1,
        beta2=beta2,
        gain=_sign(group),
        eps=group["eps"],
        decay=1 - lr * group["weight_decay"],
    )


def _sparse_adam(group: Group, t: int) -> StepRates:
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    rate = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
    return StepRates(rate=rate, beta1=beta1, beta2=beta2, gain=_sign(group), eps=group["eps"])


def _rowwise_adagrad(group: Group, t: int) -> StepRates:
    del t
    return StepRates(rate=float(group["lr"]), gain=_sign(group), eps=group["eps"])


def _ftrl(group: Group, t: int) -> StepRates:
    del t
    return StepRates(rate=float(group["lr"]), gain=_sign(group), eps=group["beta"], l1=group["l1"], l2=group["l2"])


_ADAGRAD = Recipe(rule=Rule.ADAGRAD, rates=_adagrad, second="sum")
_SGD = Recipe(rule=Rule.SGD, rates=_sgd, counts_steps=False)
_RMSPROP = Recipe(rule=Rule.RMSPROP, rates=_rmsprop, second="square_avg", state_decays=True)
_MOMENTUM, _NESTEROV = (
    Recipe(rule=rule, rates=_momentum, first="momentum_buffer", counts_steps=False, rows_move=True, state_decays=True)
    for rule in (Rule.MOMENTUM, Rule.NESTEROV)
)
_ADAM = Recipe(rule=Rule.ADAM, rates=_adam, first="exp_avg", second="exp_avg_sq", rows_move=True, state_decays=True)
_SPARSE_ADAM = Recipe(rule=Rule.SPARSE_ADAM, rates=_sparse_adam, first="exp_avg", second="exp_avg_sq")
_ROWWISE_ADAGRAD = Recipe(
    rule=Rule.ROWWISE_ADAGRAD,
    rates=_rowwise_adagrad,
    second="sum",
    counts_steps=False,
    make=RowWiseAdagrad.new_state,
)
_FTRL = Recipe(rule=Rule.FTRL, rates=_ftrl, first="z", second="n", counts_steps=False, make=FTRL.new_state)
_ALWAYS_EXACT: dict[type[Optimizer], Recipe] = {
    SGD: _SGD,
    Adagrad: _ADAGRAD,
    SparseAdam: _SPARSE_ADAM,
    RowWiseAdagrad: _ROWWISE_ADAGRAD,
    FTRL: _FTRL,
}
"""Rules under which a row without gradient stays as it is; of SGD without momentum."""


def sparse_recipe(optimizer: Optimizer, group: Group) -> Recipe | None:
    """The recipe for sparse gradients of ``sparse=True`` tables, or None where torch does it as it always did."""
    if group.get("fused") or _left_to_torch(optimizer, group) or group.get("weight_decay") or group.get("momentum"):
        return None
    return _ALWAYS_EXACT.get(type(optimizer))


def dense_recipe(optimizer: Optimizer, group: Group) -> Recipe | Refusal:
    """The recipe that equals the optimizer's step on dense gradients, whichever rows had one."""
    kind = type(optimizer)
    name = kind.__name__
    if kind not in (*_ALWAYS_EXACT, RMSprop, Adam, AdamW):
        return Refusal(
            reason=f"{name} is not one of SGD, Adagrad, RMSprop, Adam and AdamW of torch.optim",
            hint="give the embedding tables one of those",
        )
    if what := _left_to_torch(optimizer, group):
        return Refusal(reason=f"{name} runs with {what}", hint=f"construct it without {what}")
    if group.get("weight_decay") and not group.get("decoupled_weight_decay"):
        return Refusal(
            reason=f"weight_decay={group['weight_decay']} of {name} moves every row at every step",
            hint="use AdamW, or put the tables in a param group of their own with weight_decay=0",
        )
    for option in ("amsgrad", "centered"):
        if group.get(option):
            return Refusal(reason=f"{name}({option}=True) has no rule for rows it skips", hint=f"leave out {option}")
    if kind in (Adagrad, RMSprop, Adam, AdamW) and _is_zero_somewhere(group["eps"], group):
        return Refusal(
            reason=f"{name}(eps={group['eps']}) divides 0 by 0 in rows without a gradient",
            hint="use an eps that is positive in the dtype of the tables: 1e-7 or more in float16",
        )
    if kind is RMSprop and group["momentum"]:
        return Refusal(
            reason="RMSprop with momentum has no rule for rows it skips", hint="leave out momentum, or use Adam"
        )
    if kind is SGD and group["momentum"]:
        return _NESTEROV if group["nesterov"] else _MOMENTUM
    return {**_ALWAYS_EXACT, RMSprop: _RMSPROP}.get(kind, _ADAM)


def _is_zero_somewhere(eps: float, group: Group) -> bool:
    """Whether eps is 0 as the dtype of a table of this group holds it; torch adds it in that dtype."""
    return any(not torch.tensor(eps, dtype=dtype) > 0 for dtype in {table.dtype for table in group["params"]})


def _left_to_torch(optimizer: Optimizer, group: Group) -> str:
    """The option of a group that only torch's own code honours, or an empty string."""
    if group.get("fused"):
        if getattr(optimizer, "grad_scale", None) is not None:  # set by GradScaler for one step (torch 2.13.0)
            return "fused=True under a GradScaler"
        if any(parameter.dtype.itemsize < 4 for parameter in group["params"]):
            return "fused=True in half precision"
    for option in ("capturable", "differentiable"):
        if group.get(option):
            return f"{option}=True"
    lr = group["lr"]
    return "a learning rate that requires grad" if isinstance(lr, torch.Tensor) and lr.requires_grad else ""


def horizon(rates: StepRates) -> int:
    """Steps without a gradient after which momentum moves a row by less than 1e-9 of the first of them.

    A step of Adam shrinks by beta1 / sqrt(beta2) each time, one of SGD by its momentum.
    """
    shrink = rates.beta1 / math.sqrt(rates.beta2) if 0 < rates.beta2 < 1 else rates.beta1
    if shrink <= 0:
        return 1
    return min(math.ceil(math.log(1e-9) / math.log(shrink)), 2**31) if shrink < 1 else 2**31
