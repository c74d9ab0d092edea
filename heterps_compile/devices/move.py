"""Move parameters, buffers and optimizer state to another device without changing which Python objects they are.

Enters: a tensor that optimizers, modules, hooks and Dynamo's guards already hold. Leaves: the same object on the other
device, with its gradient, hooks and attributes. Refuses what cannot be moved unnoticed (:class:`DeviceError`).
``torch.utils.swap_tensors`` does almost this but refuses tensors with weak references, and Dynamo keeps some to each
parameter.

Private torch names in this file were tried on torch 2.13.0.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from heterps_compile.errors import DeviceError

_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)
_CLASS_BEFORE = "_class_before_move"
_OF_THE_DEVICE = ("_inner", "_is_param", _CLASS_BEFORE)
"""Attributes that a tensor has for being on ``sim``; all others are the user's and move along."""


def move_in_place(tensor: torch.Tensor, device: torch.device | str) -> None:
    """Move ``tensor`` to ``device``; identity, ``grad``, ``requires_grad``, hooks and attributes stay.

    A graph recorded before the move stays valid: it holds the old numbers, and its gradient is sent to the new place.
    Views of the tensor keep the old memory, as after ``Module.to``. Raises :class:`DeviceError` for results of
    operations, for tensor classes of other packages, and where hooks of a live graph would get the wrong tensor.
    """
    device = torch.device(device)
    if tensor.device == device or (tensor.device.type == device.type and device.index is None):
        return
    _refuse_unmovable(tensor, device)
    with torch.no_grad(), torch.inference_mode(tensor.is_inference()):
        moved = tensor.detach().to(device)
        moved.requires_grad_(tensor.requires_grad)
        gradient = None if tensor.grad is None else tensor.grad.to(device)
    if tensor.requires_grad:
        _forward_gradients_of_old_graphs(tensor)
    _exchange(tensor, moved)
    tensor.grad = gradient


def _refuse_unmovable(tensor: torch.Tensor, device: torch.device) -> None:
    if type(tensor) not in _PLAIN_CLASSES and tensor.device.type != "sim":
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise DeviceError(
            f"cannot move a {kind} from {tensor.device} to {device} in place",
            hint="plain parameters and buffers can be moved; pin the layers that use this one to their present device",
        )
    if not tensor.is_leaf:
        raise DeviceError(
            f"cannot move the result of an operation to {device} in place: {tuple(tensor.shape)} on {tensor.device}",
            hint="only parameters and buffers keep their identity; write tensor = tensor.to(device)",
        )


def _forward_gradients_of_old_graphs(tensor: torch.Tensor) -> None:
    """Graphs recorded before the move end in an AccumulateGrad node that knows only the old memory."""
    if tensor._use_count() == 1:  # type: ignore[attr-defined]  # tried on torch 2.13.0: no graph holds the tensor
        return
    if tensor._post_accumulate_grad_hooks:
        raise DeviceError(
            f"cannot move a parameter {tuple(tensor.shape)}: it has post-accumulate-grad hooks and is in a live graph",
            hint="run backward() on, or drop, the losses computed before the first call of the compiled model",
        )
    owner = weakref.ref(tensor)

    def pass_on(gradients: tuple[torch.Tensor | None, ...]) -> None:
        gradient = gradients[0]
        if gradient is not None:
            # After the backward: until then the new place's thread may be adding to the same .grad.
            # Tried on torch 2.13.0: the engine's own way to do something at the end.
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _add_gradient(owner(), gradient))

    torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(pass_on)


def _add_gradient(parameter: torch.Tensor | None, gradient: torch.Tensor) -> None:
    if parameter is None:
        return
    with torch.no_grad():
        arrived = gradient.to(parameter.device, copy=True)
        parameter.grad = arrived if parameter.grad is None else parameter.grad + arrived


def _exchange(tensor: torch.Tensor, moved: torch.Tensor) -> None:
    """Swap class, attributes and contents of two tensors, then give ``tensor`` back what belongs to its identity."""
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    own = {name: value for name, value in tensor.__dict__.items() if name not in _OF_THE_DEVICE}
    before = tensor.__dict__.get(_CLASS_BEFORE, type(tensor))
    # The two dictionaries are those that the hooks' handles know, so handle.remove() still works.
    hooks, late_hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    tensor.__class__, moved.__class__ = moved.__class__, tensor.__class__
    tensor.__dict__, moved.__dict__ = moved.__dict__, tensor.__dict__
    torch._C._swap_tensor_impl(tensor, moved)  # tried on torch 2.13.0
    tensor.__dict__.update(own)
    if type(tensor) is torch.Tensor:
        tensor.__class__ = before
    else:
        tensor.__dict__[_CLASS_BEFORE] = before
        if is_parameter:
            tensor._is_param = True  # what isinstance(..., Parameter) asks of other classes
    if hooks:
        tensor._backward_hooks = hooks
    if late_hooks:
        tensor._post_accumulate_grad_hooks = late_hooks


def move_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Bring every state tensor to its parameter's device; Adagrad, for one, makes its sums when it is constructed.

    Step counters stay where the optimizer keeps them: on the CPU, unless it is ``capturable`` or ``fused``.
    """
    for group in optimizer.param_groups:
        counts_on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if name != "step" or counts_on_device:
                    state[name] = _beside(value, parameter.device)


def _beside(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.detach().to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(_beside(item, device) for item in value)
    return value


@dataclass(frozen=True, slots=True)
class _Preference:
    """Makes Dynamo take ``device_type`` as the device of an operation over two devices, while it traces and only then.

    Its callbacks run in the thread that traces, under Dynamo's one compile lock.
    """

    device_type: str
    patches: list[AbstractContextManager[Any]] = field(default_factory=list, compare=False)

    def start(self, args: Any) -> None:
        # Tried on torch 2.13.0: FakeTensorMode reads this where it would raise for operands on two devices.
        patch = torch._functorch.config.patch(fake_tensor_prefer_device_type=self.device_type)
        patch.__enter__()
        self.patches.append(patch)

    def end(self, args: Any) -> None:
        self.patches.pop().__exit__(None, None, None)


def tracing_across_devices(device_type: str) -> None:
    """Let Dynamo trace models again whose parameters sit on the CPU and on ``device_type`` ("cuda").

    Call it when the first plan over both is placed, and again after ``torch._dynamo.reset()``, which forgets it. The
    simulated accelerator does not need it. Calling it twice is harmless.
    """
    from torch._dynamo.callback import callback_handler  # tried on torch 2.13.0

    preference = _Preference(device_type)
    if preference not in (getattr(callback, "__self__", None) for callback in callback_handler.start_callbacks):
        callback_handler.register_start_callback(preference.start)
        callback_handler.register_end_callback(preference.end)
