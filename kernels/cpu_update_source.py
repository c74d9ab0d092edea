"""C++ body of the update unit: optimizer steps on the rows that got a gradient."""

from __future__ import annotations

UPDATE = r"""
"""
