"""The tensor of the simulated accelerator and how one operator on it runs; ``sim.py`` tells torch of the device.

Enters: an operator with operands on ``sim:0``. Leaves: the CPU's result on ``sim:0``, bit for bit. Refuses, as a real
accelerator does: operands on two devices (:class:`DeviceError` naming the operator), with the exceptions CUDA makes:
CPU scalars (0-dim) that are only read, and CPU indices.

Saved tensors (``torch.save``, pickle) come back on the CPU: a file written here must load where this package is absent.
Private torch names in this file were tried on torch 2.13.0.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Tried on torch 2.13.0: what Dynamo traces with, and what a schema says of aliases.
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import get_alias_info, return_and_correct_aliasing

from heterps_compile.devices.transfers import ODOMETER
from heterps_compile.errors import DeviceError

CPU = torch.device("cpu")
DEVICE = torch.device("privateuseone", 0)  # torch's own name for the type that install() renames to "sim"
_share_storage: Any = return_and_correct_aliasing
WHOLE = frozenset(
    f"aten::{name}"
    for name in (
        *("dropout", "scaled_dot_product_attention", "lstm_cell", "gru_cell"),
        *(f"{cell}.{kind}" for cell in ("lstm", "gru", "rnn_tanh", "rnn_relu") for kind in ("input", "data")),
    )
)
"""Composite operators that go another way on PrivateUse1 than on CPU, with other roundings: run whole, on the CPU."""
_ATEN = torch.ops.aten
_INDEXING = (
    _ATEN.index.Tensor,
    _ATEN._unsafe_index.Tensor,
    _ATEN.index_put.default,
    _ATEN.index_put_.default,
    _ATEN._index_put_impl_.default,
)


class SimTensor(torch.Tensor):
    """A tensor on ``sim:0``: the shape and device torch sees, around a CPU tensor that holds the numbers.

    The index in ``sim:0`` is what the autograd engine needs to find the device's thread.
    """

    _inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> SimTensor:
        """Wrap ``inner`` without copying it."""
        # Tried on torch 2.13.0: the documented way for wrapper subclasses, still with an underscore.
        if inner.layout is torch.strided:
            outer = torch.Tensor._make_wrapper_subclass(
                cls, inner.size(), inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=DEVICE
            )
        else:
            outer = torch.Tensor._make_wrapper_subclass(
                cls, inner.size(), dtype=inner.dtype, layout=inner.layout, device=DEVICE
            )
        outer._inner = inner
        return outer

    # Results are plain SimTensors by construction, so nothing has to be re-wrapped above the dispatcher.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    # torch._compile._disable_dynamo (tried on 2.13.0): torch.compiler.disable whose 2 s import waits for the first use
    @classmethod
    @_disable_dynamo
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    # The pair below is what Dynamo and AOTAutograd ask of a subclass they may trace through.
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], meta: Any, size: Any, stride: Any) -> SimTensor:
        return SimTensor(inner["_inner"])

    def _stable_hash_for_caching(self) -> str:
        inner = self._inner
        return repr((type(self), inner.dtype, inner.layout, inner.size(), inner.stride(), self.requires_grad))

    @property
    def data(self) -> torch.Tensor:
        """The numbers without their history, as for every tensor."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, SimTensor):
            raise DeviceError(
                f"cannot assign a tensor on {value.device} to the .data of a tensor on {self.device}",
                hint="heterps_compile.devices.move.move_in_place changes the device and keeps the identity",
            )
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._inner = value._inner

    def numpy(self, *, force: bool = False) -> Any:
        """As on CUDA: only with ``force=True``, else through ``.cpu()``."""
        if force:
            return self.detach().cpu().numpy()
        raise DeviceError(f"a tensor on {self.device} has no numpy view", hint="copy it first: tensor.cpu().numpy()")

    def tolist(self) -> Any:
        """The numbers as nested lists."""
        return self.detach().cpu().tolist()

    def __format__(self, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else str(self), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        text = repr(self._inner.detach())
        history = f", grad_fn=<{self.grad_fn.name()}>" if self.grad_fn is not None else ""
        wants = ", requires_grad=True" if self.requires_grad and self.grad_fn is None else ""
        text = f"{text.rstrip()[:-1]}, device='{self.device}'{wants}{history})"
        return f"Parameter containing:\n{text}" if isinstance(self, torch.nn.Parameter) else text

    def __deepcopy__(self, memo: dict[int, Any]) -> SimTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
            )
        twin = SimTensor(copy.deepcopy(self._inner.detach(), memo))
        memo[id(self)] = twin
        twin.requires_grad_(self.requires_grad)
        if self.grad is not None:
            twin.grad = copy.deepcopy(self.grad, memo)
        for name, value in self.__dict__.items():
            if name != "_inner":
                twin.__dict__[name] = copy.deepcopy(value, memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self._inner.detach()
        if isinstance(self, torch.nn.Parameter):
            plain = torch.nn.Parameter(plain, self.requires_grad)
        else:
            plain.requires_grad_(self.requires_grad and self.is_leaf)
        reduce: Any = plain.__reduce_ex__
        return reduce(protocol)


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operator that involves ``sim``: unwrap, let the CPU compute, wrap. Raises :class:`DeviceError`."""
    if _is_composite(func):
        return func.decompose(*args, **kwargs) if _concerns_devices(func) else _run_under_inference(func, args, kwargs)
    if func is _ATEN._to_copy.default:
        return _to_copy(*args, **kwargs)
    if func is _ATEN.copy_.default:
        return _copy_(*args, **kwargs)
    if func is _ATEN._local_scalar_dense.default:
        ODOMETER.count(args[0]._inner, to_sim=False)
    wanted = kwargs.get("device")
    inner_args, inner_kwargs = _unwrap_all(func, args, kwargs)
    written = [outer for outer in _written(func, args, kwargs) if _is_ours(func, outer)]
    out = func(*inner_args, **inner_kwargs)
    if wanted is not None and wanted.type != "sim":
        return out
    if written:
        return _wrap(out, {id(outer._inner): _follow(outer) for outer in written})
    out = _wrap(out, {})
    return _share_storage(func, args, kwargs, out) if _is_view(func) else out


def _run_under_inference(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A composite operator as a whole: how matmul rounds depends on whether a view of a weight still knows its base.

    The guard lets the CPU record that, as it does above this file.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        args_on_cpu, kwargs_on_cpu = _map_hosts(func, args, kwargs)
        out = func(*args_on_cpu, **kwargs_on_cpu)
    written = [outer for outer in _written(func, args, kwargs) if _is_ours(func, outer)]
    return _wrap(out, {id(outer._inner): _follow(outer) for outer in written})


def _to_copy(source: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    device = kwargs.pop("device", None) or source.device
    inner = source._inner if isinstance(source, SimTensor) else source
    if device.type != source.device.type:
        ODOMETER.count(inner, to_sim=device.type == "sim")
    target = CPU if device.type == "sim" else device
    copied = _ATEN._to_copy.default(inner, device=target, **kwargs)
    return SimTensor(copied) if device.type == "sim" else copied


def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    to, of = (tensor._inner if isinstance(tensor, SimTensor) else tensor for tensor in (target, source))
    if target.device.type != source.device.type:
        ODOMETER.count(of, to_sim=target.device.type == "sim")
    _ATEN.copy_.default(to, of, non_blocking)
    return target


def _unwrap_all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if func in _INDEXING:
        indices = [_index(index) for index in args[1]]
        return (_unwrap(func, args[0]), indices, *(_unwrap(func, value) for value in args[2:])), kwargs
    return (
        tuple(_unwrap(func, value) for value in args),
        {name: _unwrap(func, value) for name, value in kwargs.items()},
    )


def _index(index: Any) -> Any:
    if isinstance(index, SimTensor):
        return index._inner
    if isinstance(index, torch.Tensor):
        ODOMETER.count(index, to_sim=True)
    return index


def _unwrap(func: Any, value: Any) -> Any:
    kind = type(value)
    if kind is SimTensor:
        return value._inner
    if kind is list or kind is tuple:
        return kind(_unwrap(func, item) for item in value)
    if kind is torch.device:
        return CPU if value.type == "sim" else value
    if isinstance(value, torch.Tensor):
        return _guest(func, value)
    return value


def _guest(func: Any, value: torch.Tensor) -> torch.Tensor:
    """A tensor from elsewhere beside operands on ``sim``: a CPU scalar is welcome, as on CUDA.

    So is a fake tensor: Dynamo traces a model again whose parameters already sit on two devices, and the transfers
    between them are inserted only afterwards.
    """
    if isinstance(value, FakeTensor):
        if value.device.type != "sim":
            return value
        with value.fake_mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CPU)
    if value.dim() == 0 and value.device.type == "cpu":
        return value
    raise DeviceError(
        f"{func} got operands on two devices: sim:0, and {value.device} (shape {tuple(value.shape)}, {value.dtype})",
        hint="move one of them first, for example tensor.to('sim')",
    )


@functools.cache
def _written_places(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The operands ``func`` writes into."""
    for place, name in _written_places(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        yield from value if isinstance(value, (list, tuple)) else (value,)


def _is_ours(func: Any, outer: Any) -> bool:
    """Whether a written operand is on ``sim``. Raises for a CPU scalar: writing it is a transfer that nobody wrote."""
    if isinstance(outer, torch.Tensor) and not isinstance(outer, (SimTensor, FakeTensor)):
        raise DeviceError(
            f"{func} would write numbers of sim:0 into a tensor on {outer.device} (shape {tuple(outer.shape)})",
            hint="copy them with tensor.copy_(other), which may cross devices",
        )
    return isinstance(outer, SimTensor)


@functools.cache
def _is_composite(func: Any) -> bool:
    """Whether torch defines ``func`` by other operators. Such arrive whole only under inference mode."""
    kernel = torch._C.DispatchKey.CompositeImplicitAutograd  # tried on torch 2.13.0, as is decompose() above
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), kernel)


@functools.cache
def _concerns_devices(func: Any) -> bool:
    """Whether ``func`` asks where tensors are, or only for their shapes, so that operands may sit on two devices."""
    name = func._schema.name.removeprefix("aten::")
    asks = any(str(argument.type) in ("Device", "Optional[Device]") for argument in func._schema.arguments)
    return asks or name in ("to", "type_as", "expand_as", "view_as", "reshape_as", "_has_compatible_shallow_copy_type")


@functools.cache
def _is_view(func: Any) -> bool:
    return bool(get_alias_info(func).read_only_alias_match_indexes)


def _follow(outer: SimTensor) -> SimTensor:
    """After a write: give the wrapper the shape its numbers have now (``resize_``, ``out=``, ``transpose_``)."""
    inner = outer._inner
    if inner.layout is torch.strided:
        here = (outer.size(), outer.stride(), outer.storage_offset())
        if here != (inner.size(), inner.stride(), inner.storage_offset()):
            torch.Tensor.data.__set__(outer, SimTensor(inner))  # type: ignore[attr-defined]
    return outer


def _wrap(out: Any, known: dict[int, SimTensor]) -> Any:
    if isinstance(out, torch.Tensor):
        return known[id(out)] if id(out) in known else SimTensor(out)
    if isinstance(out, (list, tuple)):
        return type(out)(_wrap(item, known) for item in out)
    return out


class _OnHost(torch.autograd.Function):
    """The CPU tensor inside a tensor on ``sim``, sharing memory; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: SimTensor) -> torch.Tensor:
        """Unwrap."""
        return tensor._inner.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Wrap."""
        return _on_sim(gradients[0])


class _OnSim(torch.autograd.Function):
    """A CPU tensor seen as one on ``sim``, sharing memory; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Wrap."""
        return SimTensor(tensor.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Unwrap."""
        return _on_host(gradients[0])


_on_host: Any = _OnHost.apply
_on_sim: Any = _OnSim.apply


def run_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a composite operator on the CPU tensors inside, with their own autograd. Raises :class:`DeviceError`."""
    args_on_cpu, kwargs_on_cpu = _map_hosts(op, args, kwargs)
    # The user's autocast("cpu") is not meant for numbers that live on sim.
    with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else contextlib.nullcontext():
        return map_tensors(_on_sim, op(*args_on_cpu, **kwargs_on_cpu))


def _map_hosts(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def host(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, SimTensor):
            return _guest(op, tensor)
        if torch.is_grad_enabled():
            return _on_host(tensor)  # type: ignore[no-any-return]
        return tensor._inner.detach().requires_grad_() if tensor.requires_grad else tensor._inner

    return map_tensors(host, (args, kwargs))  # type: ignore[no-any-return]


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``change`` applied to every tensor in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(change, item) for item in value)
    if isinstance(value, dict):
        return {name: map_tensors(change, item) for name, item in value.items()}
    return value
