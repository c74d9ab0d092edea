"""Optimizer updates for embedding tables, applied inside the step of a stock optimizer."""

from __future__ import annotations

from heterps_compile.optim.step import install, track

__all__ = ["install", "track"]
