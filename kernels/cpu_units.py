"""Loaded CPU units, each made once: what is compiled when, and what happens on a machine without a compiler.

Enters: (dim, dtype). Leaves: host objects of the kernels, or None when they cannot be built, after one warning in all.
:func:`prepare` builds several side by side ahead of the first call; with ``strict=True`` the warning is an error.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Iterable

import torch

from heterps_compile.errors import HeterpsWarning, LoweringError
from heterps_compile.kernels import compiler
from heterps_compile.kernels.cpu_lookup import LookupKernels
from heterps_compile.kernels.cpu_source import SCALARS, Unit
from heterps_compile.kernels.cpu_update import UpdateKernels

CACHE_HINT = "set HETERPS_CACHE_DIR to a folder that can be written"
MAX_DIM = 4096  # a few rows of sums live on a thread's stack


def is_supported(dim: int, dtype: torch.dtype) -> bool:
    """Whether units exist for rows of this shape."""
    return 0 < dim <= MAX_DIM and dtype in SCALARS


def prepare(shapes: Iterable[tuple[int, torch.dtype]], *, strict: bool = False) -> bool:
    """Build the units of all (dim, dtype) side by side; whether the kernels can be used.

    Without a working compiler: one :class:`HeterpsWarning` in all, or :class:`LoweringError` with ``strict=True``.
    """
    wanted = [shape for shape in dict.fromkeys(shapes) if is_supported(*shape)]
    units = [Unit(kind=kind, dim=dim, dtype=dtype) for dim, dtype in wanted for kind in ("lookup", "update")]
    try:
        compiler.build_all([unit.source() for unit in units])
    except LoweringError as error:
        if strict:
            raise
        _warn_once(error.message)
        return False
    except OSError as error:
        if strict:
            raise LoweringError(f"no kernel can be built: {error}", hint=CACHE_HINT) from error
        _warn_once(f"{error} ({CACHE_HINT})")
        return False
    return True


@functools.cache
def lookup_kernels(dim: int, dtype: torch.dtype) -> LookupKernels | None:
    """The look-up kernels for rows of ``dim`` numbers, or None where they cannot be built."""
    library = _library(Unit(kind="lookup", dim=dim, dtype=dtype))
    return None if library is None else LookupKernels(library)


@functools.cache
def update_kernels(dim: int, dtype: torch.dtype) -> UpdateKernels | None:
    """The optimizer kernels for rows of ``dim`` numbers, or None where they cannot be built."""
    library = _library(Unit(kind="update", dim=dim, dtype=dtype))
    return None if library is None else UpdateKernels(library)


def _library(unit: Unit) -> ctypes.CDLL | None:
    try:
        return compiler.load(unit.source())
    except (LoweringError, OSError) as error:
        _warn_once(str(error))
        return None


_warned: set[str] = set()  # what has been said; a process says it once


def _warn_once(reason: str) -> None:
    if "no kernels" in _warned:
        return
    warnings.warn(
        f"embedding look-ups and updates run on torch's own operators, several times slower: {reason}",
        HeterpsWarning,
        stacklevel=2,
    )
    _warned.add("no kernels")


def forget() -> None:
    """Drop what is loaded and what has been said, as if in a new process; for tests that change the compiler or the
    cache.
    """
    lookup_kernels.cache_clear()
    update_kernels.cache_clear()
    _warned.clear()
