"""Before each call: parameters and buffers on the device of the stage that reads them, and whole tables up to date.

Enters: which graph inputs belong on which device. Leaves: a function that checks the inputs of each call and moves,
once, those that are elsewhere; identity is kept, so optimizers and modules notice nothing. State that an optimizer made
before the move follows at its next step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from heterps_compile import optim
from heterps_compile.devices.move import move_in_place, move_optimizer_state, tracing_across_devices

Place = Callable[[tuple[Any, ...]], None]


def placer(homes: Sequence[tuple[int, torch.device]], current: Sequence[int]) -> Place | None:
    """``homes`` pairs positions among the graph inputs with devices; None when there is nothing to do.

    Inputs at the positions ``current`` are read whole: they may be lazy tables of another graph, with rows behind.
    """
    if not homes and not current:
        return None
    for kind in {device.type for _, device in homes} - {"sim", "cpu"}:
        tracing_across_devices(kind)

    def place(args: tuple[Any, ...]) -> None:
        optim.flush(args[index] for index in current)
        for index, device in homes:
            if args[index].device.type != device.type:
                _move(args[index], device)

    return place


def _move(tensor: torch.Tensor, device: torch.device) -> None:
    _state_follows()
    move_in_place(tensor, device)


@functools.cache
def _state_follows() -> None:
    """From now on every optimizer brings its state to its parameters before it steps. Registered once per process."""
    register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: move_optimizer_state(optimizer))
