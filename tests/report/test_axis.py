"""Axes and the text chart: round ticks within the axis, marks where their values are, labels with units."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterps_compile.report.axis import Axis
from heterps_compile.report.chart import HEIGHT, LABEL_COLUMNS, WIDTH, Mark, chart


def test_a_wide_range_is_logarithmic_with_decades_marked() -> None:
    axis = Axis.of([100.0, 1e6])
    assert axis.log
    assert axis.ticks() == (100.0, 1e3, 1e4, 1e5, 1e6)
    assert axis.position(1e4) == pytest.approx(0.5)


def test_a_narrow_range_is_linear() -> None:
    axis = Axis.of([1.0, 2.0])
    assert not axis.log
    assert axis.ticks() == pytest.approx((1.0, 1.2, 1.4, 1.6, 1.8, 2.0))
    assert axis.position(1.5) == pytest.approx(0.5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.floats(1e-9, 1e12), min_size=1, max_size=5))
def test_every_axis_holds_its_values_and_has_a_few_ticks_in_order(values: list[float]) -> None:
    axis = Axis.of(values)
    assert all(0 < axis.position(value) < 1 for value in values)
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 7
    assert list(ticks) == sorted(ticks)
    assert all(axis.low * (1 - 1e-9) <= tick <= axis.high * (1 + 1e-9) for tick in ticks)


def test_a_chart_puts_marks_where_they_belong() -> None:
    marks = [Mark(x=1.0, y=1.0), Mark(x=2.0, y=2.0, letter="@")]
    lines = chart(marks, "speed, m/s", "USD", lambda x: f"{x:g} m/s", lambda y: f"${y:g}")
    assert lines[0] == "USD"
    assert lines[-1].strip() == "speed, m/s"
    rows = lines[1 : HEIGHT + 1]
    low = next(i for i, line in enumerate(rows) if "*" in line)
    high = next(i for i, line in enumerate(rows) if "@" in line)
    assert high < low
    assert rows[high].index("@") > rows[low].index("*")
    assert any(line.lstrip().startswith("$1.4 |") for line in rows)
    assert "1 m/s" in lines[-2]
    assert max(map(len, lines)) <= LABEL_COLUMNS + WIDTH <= 100


def test_a_logarithmic_axis_says_so() -> None:
    lines = chart([Mark(x=1.0, y=1.0), Mark(x=1e3, y=1.0)], "samples/s", "USD", str, str)
    assert lines[-1].strip() == "samples/s (log scale)"
    assert lines[0] == "USD"
