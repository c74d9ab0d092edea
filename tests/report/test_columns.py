"""Columns, spelled out."""

from __future__ import annotations

from heterps_compile.report.columns import align


def test_each_column_is_as_wide_as_its_widest_cell() -> None:
    assert align([["a", "b"], ["long", "10"]], right=[1]) == ["a      b", "long  10"]
    assert align([["a", "b"], ["long", "10"]], indent="  ") == ["  a     b", "  long  10"]


def test_no_rows_are_no_lines() -> None:
    assert align([]) == []
