"""Rows of text in columns of equal width, for every table this package prints.

Enters: rows of cells, the heads among them. Leaves: one line per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def align(rows: Sequence[Sequence[str]], right: Iterable[int] = (), indent: str = "") -> list[str]:
    """Pad columns to equal width, two spaces apart; those in ``right`` are set to the right, the others to the left."""
    right = set(right)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines
