"""The simulated accelerator: a device named ``sim`` whose memory is the CPU's, so plans over two devices run anywhere.

:func:`install` tells torch of it; afterwards ``.to("sim")`` and ``device="sim"`` work, with autograd, optimizers,
``torch.autocast("sim")`` and ``torch.compile``. Random numbers come from the CPU's default generator, and every number
equals the CPU's bit for bit. What is refused stands in ``sim_tensor.py``.

Once installed, ``torch.accelerator`` names ``sim`` as the accelerator of the process: nothing here installs it unasked.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Tried on torch 2.13.0: registers the device type PrivateUse1 as one written in Python.
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from heterps_compile.devices.sim_tensor import WHOLE, SimTensor, dispatch, map_tensors, run_whole
from heterps_compile.devices.transfers import Transfers, transfers
from heterps_compile.errors import DeviceError

__all__ = ["DEVICE_NAME", "SimTensor", "Transfers", "install", "is_installed", "transfers"]

DEVICE_NAME = "sim"
_INSTALLING = threading.Lock()
_LIBRARY: Any = torch.library.Library

_AUTOCAST_LOWER = (
    *("mm", "bmm", "addmm", "baddbmm", "addbmm", "matmul", "linear", "conv1d", "conv2d", "conv3d", "conv_tbc", "prelu"),
    *("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "scaled_dot_product_attention"),
)
_AUTOCAST_FP32 = (
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy_loss", "nll_loss", "nll_loss2d"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "cosine_embedding_loss", "ctc_loss.Tensor"),
    *("hinge_embedding_loss", "margin_ranking_loss", "triplet_margin_loss", "cdist", "prod", "trace", "grid_sampler"),
)
"""The rows of torch's CPU autocast list (aten/src/ATen/autocast_mode.cpp) that models here meet."""


def is_installed() -> bool:
    """Whether this process knows the device ``sim``."""
    return isinstance(getattr(torch, DEVICE_NAME, None), _DeviceModule)


def install() -> torch.device:
    """Make ``sim`` known to torch, once per process; returns ``sim:0``.

    Raises :class:`DeviceError` where another extension holds torch's only device type for extensions, and where the
    process has already run a backward pass.
    """
    with _INSTALLING:
        if not is_installed():
            holder = torch._C._get_privateuse1_backend_name()  # tried on torch 2.13.0
            if holder != "privateuseone":
                raise DeviceError(
                    f"the simulated accelerator needs torch's PrivateUse1 device type, which {holder!r} holds",
                    hint="use it in a process that does not load that extension",
                )
            module = _DeviceModule()
            _setup_privateuseone_for_python_backend(DEVICE_NAME, backend_module=module)
            module.kernels = _register_kernels()
        _demand_gradients()
        return torch.device(DEVICE_NAME, 0)


@functools.cache
def _demand_gradients() -> None:
    """Raise where autograd cannot reach ``sim``: it counts devices once, at the first backward of a process."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            torch.ones(1, device=DEVICE_NAME, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise DeviceError(
            "the simulated accelerator came too late: torch counted its devices at this process's first backward()",
            hint="call heterps_compile.devices.sim.install() at the start of the program",
        ) from error


class _DeviceModule:
    """``torch.sim``: what torch asks of the module of a device type. There is one device and it is never busy."""

    kernels: tuple[torch.library.Library, ...] = ()  # registrations end with their Library

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: object) -> None:
        """Nothing to choose among one device."""

    def synchronize(self, device: object = None) -> None:
        """Every operator has finished when it returns."""

    @contextlib.contextmanager
    def device(self, device: object) -> Iterator[None]:
        yield

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """torch.manual_seed calls this after seeding the CPU's generator, which is also this device's."""

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _register_kernels() -> tuple[torch.library.Library, ...]:
    fallback = _LIBRARY("_", "IMPL")
    # The dispatcher hands on operands and keywords; each operator that has no rule of its own arrives here.
    fallback.fallback(lambda op, *args, **kwargs: dispatch(op, args, kwargs), "PrivateUse1")
    autocast = _LIBRARY("_", "IMPL")
    autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = _LIBRARY("aten", "IMPL")
    # torch.tensor(..., device="sim") copies below the Python key, where the fallback is not asked.
    for name in ("_to_copy", "copy_"):
        aten.impl(name, _plain(_operator(name)), "PrivateUse1")
    for name in WHOLE:
        aten.impl(name.removeprefix("aten::"), _whole(_operator(name.removeprefix("aten::"))), "AutogradPrivateUse1")
    for name in _AUTOCAST_LOWER:
        aten.impl(name, _cast(_operator(name), lower=True), "AutocastPrivateUse1")
    for name in _AUTOCAST_FP32:
        aten.impl(name, _cast(_operator(name), lower=False), "AutocastPrivateUse1")
    return fallback, autocast, aten


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _plain(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: dispatch(op, args, kwargs)


def _whole(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: run_whole(op, args, kwargs)


def _cast(op: Any, lower: bool) -> Callable[..., Any]:
    """An autocast kernel: bring the operands to autocast's dtype, or all to float32, then run without autocast."""

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(DEVICE_NAME) if lower else torch.float32
        args, kwargs = map_tensors(lambda tensor: tensor.to(dtype) if _may_cast(tensor) else tensor, (args, kwargs))
        with torch.autocast(DEVICE_NAME, enabled=False):
            return op(*args, **kwargs)

    return run


def _may_cast(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.device.type == DEVICE_NAME and tensor.dtype is not torch.float64
