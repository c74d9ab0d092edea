"""The fused update inside a stock optimizer's step.

Enters: whatever ``optimizer.step()`` finds in ``p.grad``. Leaves: tables and ``optimizer.state[p]`` as torch would have
left them, in torch's layout, and ``p.grad`` as the user had it. The stock step sees the gradients taken over as absent.
What no recipe covers is left to torch. Hooks are global in torch, registered once, by :func:`install` only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from heterps_compile.optim import marks
from heterps_compile.optim.ready import steps_of
from heterps_compile.optim.updates import apply

_hidden: WeakKeyDictionary[Optimizer, list[tuple[Tensor, Tensor]]] = WeakKeyDictionary()
"""Gradients out of sight between the two hooks; global because torch's hooks are."""


@functools.cache
def install() -> None:
    """Take part in every optimizer step from now on; parameters that nobody tracks are left alone."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def track(tables: Iterable[Tensor], *, lazy: bool = False) -> None:
    """Say that these parameters are embedding tables of a planned graph; cheap enough for every call.

    ``lazy``: their gradient is sparse although their ``sparse`` flag says otherwise.
    """
    marks.mark(tables, marks.LAZY if lazy else marks.SPARSE)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _show(optimizer)  # a step that raised has left its gradients hidden
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        _take_over(optimizer)
        return None
    wrapped = functools.partial(_run_closure, closure, optimizer)
    return ((args[0], wrapped, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": wrapped})


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    del args, kwargs
    _show(optimizer)


def _run_closure(closure: Callable[[], Any], optimizer: Optimizer) -> Any:
    _show(optimizer)
    loss = closure()
    _take_over(optimizer)
    return loss


def _show(optimizer: Optimizer) -> None:
    for parameter, grad in _hidden.pop(optimizer, ()):
        parameter.grad = grad


@torch.no_grad()
def _take_over(optimizer: Optimizer) -> None:
    """Apply what recipes cover, and hide those gradients until the step is over."""
    if not any(marks.kind_of(p) for group in optimizer.param_groups for p in group["params"]):
        return
    steps = steps_of(optimizer)
    if not steps.updates:
        return
    apply(steps.updates)
    for record in steps.records:
        record.stepped()
    _hidden[optimizer] = [(update.table, update.grad) for update in steps.updates]
    for update in steps.updates:
        update.table.grad = None
