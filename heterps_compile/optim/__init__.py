"""Optimizer updates for embedding tables, applied inside the step of a stock optimizer.

``install()`` once; ``track(tables)`` for tables a planned graph looks up; for lazy ones ``catch_up(tables, ids)``
before each look-up, ``keep_current(model)`` before compiling, and ``flush(tables)`` before anything else reads them.
:class:`RowWiseAdagrad` and :class:`FTRL` are optimizers like torch's, for use with or without a planned graph.
"""

from __future__ import annotations

from heterps_compile.optim.current import keep_current
from heterps_compile.optim.ftrl import FTRL
from heterps_compile.optim.lazy import catch_up, flush
from heterps_compile.optim.rowwise_adagrad import RowWiseAdagrad
from heterps_compile.optim.step import install, track

__all__ = ["FTRL", "RowWiseAdagrad", "catch_up", "flush", "install", "keep_current", "track"]
