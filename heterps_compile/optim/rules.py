"""When an update that touches only the rows with a gradient equals what torch's optimizer does: all of it, in one
place.

Enters: a stock optimizer and one of its param groups. Leaves: a :class:`Recipe`, or a :class:`Refusal` that says what
to change. A row without a gradient, under torch's own formulas with a gradient of zeros:

- SGD without momentum, Adagrad: does not move, nor does its state. Always exact.
- RMSprop (no momentum, not centered): does not move; its second moment decays by a known factor.
- SGD with momentum, Adam, AdamW: moves by a rule that needs nothing but its own state and the rates of the steps it
  missed, so it can be caught up when it is next read (``lazy.py``).
- Anything that mixes the row itself into the gradient (coupled ``weight_decay``), takes a maximum over time
  (``amsgrad``), or lets torch keep numbers on the device (``capturable``, ``fused``), stays dense.

Tables with ``sparse=True`` follow eager's sparse semantics instead: only SGD without momentum and Adagrad are taken
over, and everything else is left to torch, errors included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from heterps_compile.kernels.cpu_update import Rule

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How a group steps: ``first`` and ``second`` are keys of ``optimizer.state[p]``; ``rates(group, t)`` is step t,
    from 1 on.

    ``rows_move``: rows without a gradient move. ``state_decays``: at least their state changes.
    """

    rule: Rule
    rates: Callable[[Group, int], StepRates]
    first: str | None = None
    second: str | None = None
    counts_steps: bool = True
    rows_move: bool = False
    state_decays: bool = False


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


_ADAGRAD = Recipe(rule=Rule.ADAGRAD, rates=_adagrad, second="sum")
_SGD = Recipe(rule=Rule.SGD, rates=_sgd, counts_steps=False)
_RMSPROP = Recipe(rule=Rule.RMSPROP, rates=_rmsprop, second="square_avg", state_decays=True)
_MOMENTUM, _NESTEROV = (
    Recipe(rule=rule, rates=_momentum, first="momentum_buffer", counts_steps=False, rows_move=True, state_decays=True)
    for rule in (Rule.MOMENTUM, Rule.NESTEROV)
)
_ADAM = Recipe(rule=Rule.ADAM, rates=_adam, first="exp_avg", second="exp_avg_sq", rows_move=True, state_decays=True)


def sparse_recipe(optimizer: Optimizer, group: Group) -> Recipe | None:
    """The recipe for sparse gradients of ``sparse=True`` tables, or None where torch does it as it always did."""
    if _left_to_torch(group) or group.get("weight_decay"):
        return None
    if type(optimizer) is SGD and not group["momentum"]:
        return _SGD
    return _ADAGRAD if type(optimizer) is Adagrad else None


def dense_recipe(optimizer: Optimizer, group: Group) -> Recipe | Refusal:
    """The recipe that equals torch's step on dense gradients, whichever rows had one."""
    kind = type(optimizer)
    name = kind.__name__
    if kind not in (SGD, Adagrad, RMSprop, Adam, AdamW):
        return Refusal(
            reason=f"{name} is not one of SGD, Adagrad, RMSprop, Adam and AdamW of torch.optim",
            hint="give the embedding tables one of those",
        )
    if what := _left_to_torch(group):
        return Refusal(reason=f"{name} runs with {what}", hint=f"construct it without {what}")
    if group["weight_decay"] and not group.get("decoupled_weight_decay"):
        return Refusal(
            reason=f"weight_decay={group['weight_decay']} of {name} moves every row at every step",
            hint="use AdamW, or put the tables in a param group of their own with weight_decay=0",
        )
    for option in ("amsgrad", "centered"):
        if group.get(option):
            return Refusal(reason=f"{name}({option}=True) has no rule for rows it skips", hint=f"leave out {option}")
    if kind is not SGD and not group["eps"] > 0:
        return Refusal(reason=f"{name}(eps=0) divides 0 by 0 in rows without a gradient", hint="use a positive eps")
    if kind is RMSprop and group["momentum"]:
        return Refusal(
            reason="RMSprop with momentum has no rule for rows it skips", hint="leave out momentum, or use Adam"
        )
    if kind is SGD and group["momentum"]:
        return _NESTEROV if group["nesterov"] else _MOMENTUM
    return {SGD: _SGD, Adagrad: _ADAGRAD, RMSprop: _RMSPROP}.get(kind, _ADAM)


def _left_to_torch(group: Group) -> str:
    """The option of a group that only torch's own code honours, or an empty string."""
    for option in ("fused", "capturable", "differentiable"):
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
