"""Compile a model in place, and make a training step out of a function that returns a loss.

``compile_`` keeps state_dict keys clean and reaches models whose class has a ``compile`` of its own. ``train_step``
owns forward, backward and update, which is what lets dense-gradient tables be updated at sparse cost. ``flush`` brings
rows that are behind up to date; state_dict, eval, copying and saving a model do it by themselves.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, overload
from weakref import WeakSet

import torch
from torch import Tensor, nn

from heterps_compile import optim
from heterps_compile.backend import heterps
from heterps_compile.capture import why_no_graph
from heterps_compile.errors import HeterpsWarning, OptionError
from heterps_compile.options import Options

M = TypeVar("M", bound=nn.Module)
P = ParamSpec("P")
Step = Callable[Concatenate[nn.Module, P], Tensor]


def compile_(model: M, **options: Any) -> M:
    """Compile ``model`` in place with backend heterps and return it; ``options`` as in :class:`Options`.

    Raises :class:`OptionError` at once for an unknown option, not at the first call.
    """
    Options.parse(options)
    _warn_of_backward_hooks(model)
    if options.get("lazy_tables"):
        optim.keep_current(model)
    nn.Module.compile(model, backend=heterps, options=options or None)
    return model


@overload
def train_step(step: Step[P], /, *, optimizer: torch.optim.Optimizer, **options: Any) -> Step[P]: ...
@overload
def train_step(*, optimizer: torch.optim.Optimizer, **options: Any) -> Callable[[Step[P]], Step[P]]: ...
def train_step(step: Any = None, /, *, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    """Turn ``step(model, *batch) -> loss`` into one whole training step that returns the detached loss.

    Each call zeroes gradients, runs forward and backward, and steps ``optimizer``. The model is compiled in place at
    the first call, with ``lazy_tables`` on unless said otherwise. Rows of tables that wait for updates are brought up
    to date by whatever reads them through the model or its state; before reading a weight itself, call :func:`flush`.
    Raises :class:`OptionError` for unknown options and for an optimizer that holds no parameter of the model.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(
            f"train_step(optimizer=...) got {type(optimizer).__name__} (allowed: a torch.optim.Optimizer)",
            hint="@heterps_compile.train_step(optimizer=torch.optim.Adam(model.parameters()))",
        )
    settings = {"lazy_tables": True, **options}
    Options.parse(settings)
    if step is None:
        return lambda function: _TrainStep(function, optimizer, settings)
    return _TrainStep(step, optimizer, settings)


class _TrainStep:
    """The callable that :func:`train_step` returns."""

    def __init__(self, step: Step[Any], optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> None:
        functools.update_wrapper(self, step)
        self.step, self.optimizer, self.options = step, optimizer, options
        self._compiled: WeakSet[nn.Module] = WeakSet()

    def __call__(self, model: nn.Module, *batch: Any, **named: Any) -> Tensor:
        if model not in self._compiled:
            self._demand_same_model(model)
            compile_(model, **self.options)
            self._compiled.add(model)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.step(model, *batch, **named)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise OptionError(
                f"{getattr(self.step, '__name__', 'the step')} returned {_describe(loss)} (allowed: one loss value)",
                hint="return loss_fn(model(batch.x), batch.y), reduced to a scalar",
            )
        loss.backward()  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            if self.options.get("strict"):
                warnings.simplefilter("error", HeterpsWarning)
            self.optimizer.step()
        return loss.detach()

    def _demand_same_model(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(
                f"the step got a {type(model).__name__} first (allowed: the model)",
                hint="def step(model, batch): ..., called as step(model, batch)",
            )
        stepped = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        if stepped.isdisjoint(id(p) for p in model.parameters()):
            raise OptionError(
                f"the optimizer of this step holds no parameter of the {type(model).__name__} it was called with",
                hint="build the optimizer from this model's parameters",
            )


def flush(model: nn.Module) -> None:
    """Bring every table row of ``model`` that waits for updates up to date; costs nothing when none does."""
    optim.flush(list(getattr(model, "_orig_mod", model).parameters()))


def _warn_of_backward_hooks(model: nn.Module) -> None:
    reason = why_no_graph(model)
    if "backward hook" in reason:
        warnings.warn(
            f"{type(model).__name__} will run in eager, whole or in part: {reason}", HeterpsWarning, stacklevel=3
        )


def _describe(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{type(value).__name__}"
