"""``verify="first_call"``: run a compiled graph beside the untouched one, once, and compare everything it does.

Compared: outputs, gradients of every input that wants one, and inputs or buffers changed in place. Both sides run on
clones with the same random numbers, so nothing of the caller's is touched. Raises :class:`VerificationError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heterps_compile.errors import VerificationError

TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 2e-2, torch.float32: 2e-4, torch.float64: 1e-9}
"""Allowed per element, absolute and relative to the reference's; other dtypes must be equal."""
REPORT = "run without the backend to go on, and report the model: heterps must equal eager"


def compare_with_eager(
    run: Callable[..., Sequence[Any]], eager: Callable[..., Sequence[Any]], args: Sequence[Any], names: Sequence[str]
) -> None:
    """Run both on clones of ``args`` (named ``names``) and compare. Raises :class:`VerificationError`."""
    ours, theirs = _observe(run, args), _observe(eager, args)
    for index, (mine, reference) in enumerate(zip(ours.outputs, theirs.outputs, strict=True)):
        _compare(f"output {index}", mine, reference)
    for name, mine, reference in zip(names, ours.gradients, theirs.gradients, strict=True):
        _compare(f"gradient of {name}", mine, reference)
    for name, mine, reference in zip(names, ours.inputs, theirs.inputs, strict=True):
        _compare(f"input {name} after the call", mine, reference)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Observation:
    """What one run gave: outputs, gradients of the inputs, and the inputs after the call."""

    outputs: list[Any]
    gradients: list[Any]
    inputs: list[Any]


def _observe(run: Callable[..., Sequence[Any]], args: Sequence[Any]) -> _Observation:
    with torch.random.fork_rng(devices=[]):
        clones = [_clone(arg) for arg in args]
        torch.manual_seed(0)
        outputs = list(run(*clones))
        wanted = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
        if wanted:
            generator = torch.Generator().manual_seed(1)
            cotangents = [torch.randn(out.shape, generator=generator).to(out) for out in wanted]
            torch.autograd.backward(wanted, cotangents)
    gradients = [arg.grad if isinstance(arg, Tensor) and arg.is_leaf else None for arg in clones]
    return _Observation(
        outputs=[_plain(out) for out in outputs],
        gradients=[_plain(gradient) for gradient in gradients],
        inputs=[_plain(clone) for clone in clones],
    )


def _clone(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    copy = value.detach().to("cpu", copy=True)
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(copy, requires_grad=value.requires_grad)
    return copy.requires_grad_(value.requires_grad)


def _plain(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach().to("cpu")
    return value.to_dense() if value.layout is not torch.strided else value


def _compare(what: str, mine: Any, reference: Any) -> None:
    if not isinstance(reference, Tensor):
        if isinstance(mine, Tensor) or mine != reference:
            raise VerificationError(f"{what} is {_short(mine)} where eager gives {_short(reference)}", hint=REPORT)
        return
    if not isinstance(mine, Tensor) or mine.shape != reference.shape or mine.dtype != reference.dtype:
        raise VerificationError(f"{what} is {_short(mine)} where eager gives {_short(reference)}", hint=REPORT)
    tolerance = TOLERANCE.get(reference.dtype, 0.0)
    if torch.allclose(mine, reference, rtol=tolerance, atol=tolerance, equal_nan=True):
        return
    difference = (mine.double() - reference.double()).abs().max().item() if mine.numel() else 0.0
    raise VerificationError(
        f"{what} differs from eager by {difference:.3g} (allowed: {tolerance:g})",
        hint=REPORT,
    )


def _short(value: Any) -> str:
    return f"a {value.dtype} tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
