"""Cost against throughput as an SVG file, and as a page with the table below it; nothing but the standard library.

Enters: plans of rising throughput, and the infeasible plan that ends them. Leaves: well-formed XML. Each point says
what it rents when the pointer rests on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from heterps_compile.report.amounts import rate, units, usd
from heterps_compile.report.axis import Axis
from heterps_compile.report.frontier_text import X_LABEL, Y_LABEL, ending, frontier_text, serves
from heterps_compile.report.graph_table import human

if TYPE_CHECKING:
    from heterps_compile.plan_facts import PlanFacts

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 90, 30, 50, 90
"""Pixels around the plot: tick labels to its left, the title above, tick labels, axis label and the end below."""
TITLE = "Cost against throughput"
END_COLUMNS = 130
INK, GRID, LINE, MARKED, STOP = "#222222", "#dddddd", "#1f5fa8", "#c0392b", "#888888"

Point = tuple[float, float]


def frontier_svg(plans: Sequence[PlanFacts], end: PlanFacts | None, asked: float | None = None) -> str:
    """The picture alone."""
    across = Axis.of(plan.throughput_samples_per_s for plan in plans)
    up = Axis.of(plan.cost_usd_per_million_samples for plan in plans)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="13">',
        f"<title>{TITLE}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text((LEFT, TOP - 22), TITLE, size=16),
        *_across(across),
        *_up(up),
        *_points(plans, across, up, asked),
        *_stop(plans, across, end),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def frontier_html(plans: Sequence[PlanFacts], end: PlanFacts | None, asked: float | None = None) -> str:
    """A page: the picture, and the text report below it."""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"/><title>{TITLE}</title></head>\n<body>\n'
        f"{frontier_svg(plans, end, asked)}<pre>\n{escape(frontier_text(plans, end, asked))}\n</pre>\n"
        "</body>\n</html>\n"
    )


def _across(axis: Axis) -> list[str]:
    bottom = HEIGHT - BOTTOM
    parts = []
    for tick in axis.ticks():
        x = _x(axis, tick)
        parts += [_line((x, TOP), (x, bottom), GRID), _text((x, bottom + 20), human(tick), anchor="middle")]
    label = X_LABEL + (" (log scale)" if axis.log else "")
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [*parts, _line((LEFT, bottom), (WIDTH - RIGHT, bottom), INK), _text((middle, bottom + 44), label, "middle")]


def _up(axis: Axis) -> list[str]:
    parts = []
    for tick in axis.ticks():
        y = _y(axis, tick)
        parts += [_line((LEFT, y), (WIDTH - RIGHT, y), GRID), _text((LEFT - 8, y + 4), usd(tick), anchor="end")]
    label = Y_LABEL + (" (log scale)" if axis.log else "")
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'<g transform="rotate(-90 20 {middle:g})">{_text((20, middle), label, "middle")}</g>'
    return [*parts, _line((LEFT, TOP), (LEFT, HEIGHT - BOTTOM), INK), turned]


def _points(plans: Sequence[PlanFacts], across: Axis, up: Axis, asked: float | None) -> list[str]:
    places = [(_x(across, plan.throughput_samples_per_s), _y(up, plan.cost_usd_per_million_samples)) for plan in plans]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="1.5"/>']
    for plan, (x, y) in zip(plans, places, strict=True):
        marked = serves(plan, asked)
        colour, radius = (MARKED, 6) if marked else (LINE, 4)
        said = escape(_said(plan))
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"><title>{said}</title></circle>')
        if marked:
            aside, anchor = (10, "start") if x < WIDTH / 2 else (-10, "end")
            parts.append(_text((x + aside, y - 10), f"asked: {rate(asked or 0.0)}", anchor, MARKED))
    return parts


def _said(plan: PlanFacts) -> str:
    return (
        f"{units(plan.provision)}: {usd(plan.price_usd_per_h)}/h, {rate(plan.throughput_samples_per_s)} samples/s, "
        f"{usd(plan.cost_usd_per_million_samples)} per million samples"
    )


def _stop(plans: Sequence[PlanFacts], axis: Axis, end: PlanFacts | None) -> list[str]:
    """A dashed line where the frontier ends, and what binds there."""
    if end is None:
        return []
    x = _x(axis, plans[-1].throughput_samples_per_s)
    dashed = _line((x, TOP), (x, HEIGHT - BOTTOM), STOP).replace("/>", ' stroke-dasharray="5 4"/>')
    said = ending(end)
    said = said if len(said) <= END_COLUMNS else f"{said[: END_COLUMNS - 3]}..."
    return [dashed, _text((LEFT, HEIGHT - 16), said, colour=INK, size=12)]


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.position(value) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return TOP + (1 - axis.position(value)) * (HEIGHT - TOP - BOTTOM)


def _line(start: Point, stop: Point, colour: str) -> str:
    (x1, y1), (x2, y2) = start, stop
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(place: Point, text: str, anchor: str = "start", colour: str = INK, size: int = 13) -> str:
    x, y = place
    said = escape(text)
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{said}</text>'
