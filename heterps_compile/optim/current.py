"""Who reads a table or its optimizer state brings it up to date first: every public way that passes through a hook.

Enters: a model (:func:`keep_current`) or an optimizer (:func:`watch_optimizer`). Leaves: hooks, so that
``state_dict``, ``load_state_dict``, ``eval``, ``half`` and other casts, ``copy.deepcopy``, ``pickle`` and
``torch.save`` of either, and an eager ``forward`` of the module that owns a table, see rows as torch would have left
them. What reads a weight with none of these in between (``model.emb.weight[3]``, ``optimizer.state[p]``) has to call
:func:`heterps_compile.flush` first.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from heterps_compile.optim import lazy, marks

_hooked: WeakSet[Optimizer] = WeakSet()
OURS = ("__getstate__", "_apply", "train")  # methods replaced on instances; a copy goes back to those of its class


def keep_current(model: nn.Module) -> None:
    """Let every read of a weight of ``model`` that passes through a hook find it up to date. Safe to call again.

    Call it before the model is compiled: it adds a forward pre-hook to modules that hold a matrix, except
    ``nn.Linear``.
    """
    for module in model.modules():
        weights = [p for p in module.parameters(recurse=False) if p.dim() == 2]
        if module is not model and (not weights or isinstance(module, nn.Linear)):
            continue
        if "__getstate__" not in module.__dict__:
            module.register_state_dict_pre_hook(_flush_before_state_dict)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_flush_before_load)  # type: ignore[no-untyped-call]
            module.register_forward_pre_hook(_flush_before_forward)
            object.__setattr__(module, "__getstate__", functools.partial(_module_state, module))
            # _apply: what half(), double(), to() and share_memory() go through (torch 2.11 to 2.13)
            object.__setattr__(module, "_apply", functools.partial(_apply, module))
        for weight in weights:
            marks.watch(weight)
    if "train" not in model.__dict__:
        object.__setattr__(model, "train", functools.partial(_train, model))


def flush_module(module: nn.Module) -> None:
    """Bring every table of a module up to date."""
    lazy.flush(module.parameters())


def _flush_before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    del prefix, keep_vars
    flush_module(module)


def _flush_before_load(module: nn.Module, *arguments: Any) -> None:
    del arguments
    flush_module(module)


def _flush_before_forward(module: nn.Module, inputs: Any) -> None:
    """Only in eager: a planned graph catches up the rows it reads, and no others."""
    del inputs
    if not torch.compiler.is_compiling():
        lazy.flush(module.parameters(recurse=False))


def _module_state(module: nn.Module) -> Any:
    flush_module(module)
    state: Any = type(module).__getstate__(module)  # type: ignore[no-untyped-call]
    if isinstance(state, dict):
        return {key: value for key, value in state.items() if key not in OURS}
    return state


def _apply(module: nn.Module, *arguments: Any, **named: Any) -> nn.Module:
    """Before the memory of tables is replaced: make the steps they missed, and start anew with what they become."""
    lazy.drop(filter(None, (lazy.record_of(parameter) for parameter in module.parameters())))
    applied: nn.Module = type(module)._apply(module, *arguments, **named)  # type: ignore[no-untyped-call]
    return applied


def _train(module: nn.Module, mode: bool = True) -> nn.Module:
    if not mode:
        flush_module(module)
    return type(module).train(module, mode)


def watch_optimizer(optimizer: Optimizer) -> None:
    """Let every read of this optimizer's state that passes through a hook find it up to date. Safe to call again."""
    if optimizer in _hooked:
        return
    _hooked.add(optimizer)
    optimizer.register_state_dict_pre_hook(_flush_optimizer)
    optimizer.register_load_state_dict_pre_hook(_flush_before_optimizer_load)
    optimizer.__getstate__ = functools.partial(_optimizer_state, weakref.ref(optimizer))  # type: ignore[method-assign]
    gone = weakref.finalize(optimizer, lazy.drop_ownerless)
    gone.atexit = False


def _flush_optimizer(optimizer: Optimizer) -> None:
    lazy.flush(record.table for record in lazy.records_of(optimizer))


def _flush_before_optimizer_load(optimizer: Optimizer, state_dict: Any) -> None:
    del state_dict
    lazy.drop(lazy.records_of(optimizer))


def _optimizer_state(reference: weakref.ref[Optimizer]) -> dict[str, Any]:
    optimizer = reference()
    assert optimizer is not None
    _flush_optimizer(optimizer)
    return type(optimizer).__getstate__(optimizer)
