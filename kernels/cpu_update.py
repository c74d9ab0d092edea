"""Host side of the optimizer kernels: steps on the rows that got a gradient."""

from __future__ import annotations

import ctypes


class UpdateKernels:
    """The functions of one loaded update unit."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
