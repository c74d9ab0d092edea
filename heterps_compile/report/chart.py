"""Points as a picture of text, for a terminal.

Enters: points, each with the letter that marks it. Leaves: lines of at most 100 columns, axes labelled with units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from heterps_compile.report.axis import Axis

WIDTH, HEIGHT = 76, 15
LABEL_COLUMNS = 12
"""Columns left of the axis: a label of at most 10 columns, a space and the axis."""

Format = Callable[[float], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A point and the letter it is drawn with; of two in one place the later is seen."""

    x: float
    y: float
    letter: str = "*"


def chart(marks: Sequence[Mark], x_label: str, y_label: str, x_format: Format, y_format: Format) -> list[str]:
    """Both axes hold every mark. The labels name quantity and unit; a logarithmic axis says so."""
    across, up = Axis.of(mark.x for mark in marks), Axis.of(mark.y for mark in marks)
    cells = [[" "] * WIDTH for _ in range(HEIGHT)]
    for mark in marks:
        cells[_row(up, mark.y)][_column(across, mark.x)] = mark.letter
    names = {_row(up, tick): y_format(tick) for tick in up.ticks()}
    lines = [y_label + _scale(up)]
    lines += [f"{names.get(i, ''):>{LABEL_COLUMNS - 2}} |{''.join(row)}".rstrip() for i, row in enumerate(cells)]
    lines += [_rule(across), _tick_line(across, x_format), f"{x_label}{_scale(across)}".rjust(LABEL_COLUMNS + WIDTH)]
    return lines


def _row(axis: Axis, value: float) -> int:
    return round((1 - axis.position(value)) * (HEIGHT - 1))


def _column(axis: Axis, value: float) -> int:
    return round(axis.position(value) * (WIDTH - 1))


def _scale(axis: Axis) -> str:
    return " (log scale)" if axis.log else ""


def _rule(axis: Axis) -> str:
    cells = ["-"] * WIDTH
    for tick in axis.ticks():
        cells[_column(axis, tick)] = "+"
    return " " * (LABEL_COLUMNS - 1) + "+" + "".join(cells)


def _tick_line(axis: Axis, x_format: Format) -> str:
    """Labels below their ticks; one that would touch the label before it is left out."""
    line = ""
    for tick in axis.ticks():
        text = x_format(tick)
        start = LABEL_COLUMNS + _column(axis, tick) - len(text) // 2
        start = min(start, LABEL_COLUMNS + WIDTH - len(text))
        if not line or start >= len(line) + 2:
            line = line.ljust(start) + text
    return line
