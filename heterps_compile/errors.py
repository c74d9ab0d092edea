"""Every error and warning a user of heterps-compile can meet.

A message says the value, the constraint and the place; ``hint`` says what mends it. Each class also derives from the
builtin a caller would expect to catch.
"""

from __future__ import annotations


class HeterpsError(Exception):
    """Base of all errors raised on purpose by heterps-compile."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message if not hint else f"{message}\nhint: {hint}")
        self.message = message
        self.hint = hint


class OptionError(HeterpsError, ValueError):
    """An unknown option, or a value outside what the option allows."""


class FileFormatError(HeterpsError, ValueError):
    """A cluster, cost, plan or data file that cannot be read: path, field and allowed values are in the message."""


class MissingPackageError(HeterpsError, ImportError):
    """An optional package that the call needs is not installed; the hint says how to install it."""


class GraphError(HeterpsError, ValueError):
    """A traced graph that cannot be turned into layers."""


class PlanError(HeterpsError, ValueError):
    """A plan that does not fit its graph or its cluster."""


class InfeasibleError(HeterpsError, RuntimeError):
    """No placement reaches the requested throughput within the limits."""


class LoweringError(HeterpsError, RuntimeError):
    """A stage that cannot run as asked while ``strict=True`` forbids the slower way."""


class IdRangeError(HeterpsError, IndexError):
    """An id outside its table: position, value and number of rows are in the message; nothing was written."""


class StaleTableError(HeterpsError, RuntimeError):
    """A table was written to while rows of it still had steps to catch up with."""


class DeviceError(HeterpsError, RuntimeError):
    """A resource type whose device is absent here, or tensors that sit on two devices in one operation."""


class VerificationError(HeterpsError, AssertionError):
    """``verify="first_call"`` found an output or a gradient that differs from eager."""


class HeterpsWarning(UserWarning):
    """Something runs slower or differently from what was asked; the message names layer, reason and cost."""
