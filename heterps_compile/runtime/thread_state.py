"""What torch keeps per thread and a worker must share with its caller: grad mode, inference mode, autocast, stream.

Enters: the state of the calling thread. Leaves: a context that re-creates it in another. What cannot be re-created
(dispatch modes, saved-tensor hooks, transforms) is reported by :func:`is_bound_to_this_thread`; the work then stays.
Private torch names in this file were tried on torch 2.13.0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class _Autocast:
    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadState:
    """The caller's modes. ``home`` is the device type the user's ``torch.autocast`` is about."""

    home: str
    grad: bool
    inference: bool
    autocast: dict[str, _Autocast]
    cache_casts: bool
    streams: dict[torch.device, torch.cuda.Stream]

    @staticmethod
    def capture(home: torch.device, devices: Sequence[torch.device]) -> ThreadState:
        """Read this thread's modes, as far as stages on ``devices`` need them."""
        kinds = {home.type, "cpu", *(device.type for device in devices)}
        return ThreadState(
            home=home.type,
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast={
                kind: _Autocast(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
            },
            cache_casts=torch.is_autocast_cache_enabled(),
            streams={device: torch.cuda.current_stream(device) for device in devices if device.type == "cuda"},
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Re-create the modes in this thread."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, autocast in self.autocast.items():
                if autocast.enabled:
                    stack.enter_context(torch.autocast(kind, dtype=autocast.dtype, cache_enabled=self.cache_casts))
            yield

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Around a stage on ``device``: the caller's CUDA stream, and autocast.

        Autocast for the home device was written for the whole model, so it covers stages that the plan put elsewhere.
        """
        home = self.autocast[self.home]
        with contextlib.ExitStack() as stack:
            if device in self.streams:
                stack.enter_context(torch.cuda.stream(self.streams[device]))
            if device.type != self.home and home.enabled and not self.autocast[device.type].enabled:
                stack.enter_context(torch.autocast(device.type, dtype=home.dtype, cache_enabled=self.cache_casts))
            yield


def is_bound_to_this_thread() -> bool:
    """Whether modes are active that no other thread can be given, such as a FakeTensorMode or saved-tensor hooks."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
