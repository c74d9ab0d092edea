"""How amounts and names are written in every report: money, throughput, units, one cost against another.

Enters: plain numbers and plans. Leaves: short text.
"""

from __future__ import annotations

from collections.abc import Mapping

NAME_COLUMNS = 34


def usd(amount: float) -> str:
    """``$12.50``, and four digits of what is less than ten dollars; thousands are parted by commas."""
    return f"${amount:,.2f}" if amount >= 10 else f"${amount:.4g}"


def rate(samples_per_s: float) -> str:
    """Throughput in samples per second, as a whole number unless it is a small one."""
    return f"{samples_per_s:,.0f}" if samples_per_s >= 100 else f"{samples_per_s:.3g}"


def units(provision: Mapping[str, int], joint: str = " and ") -> str:
    """``50 cpu and 1 v100``."""
    return joint.join(f"{count:,} {name}" for name, count in provision.items() if count)


def against(other: float, cost: float) -> str:
    """How ``other`` compares with ``cost``: ``+3.1%``, ``2.4 x`` or ``same cost``."""
    if cost <= 0:
        return usd(other)
    ratio = other / cost
    if abs(ratio - 1) < 5e-5:
        return "same cost"
    return f"{ratio:.1f} x" if ratio >= 2 else f"{ratio - 1:+.1%}"


def short(name: str, columns: int = NAME_COLUMNS) -> str:
    """A name cut in its middle to at most ``columns``."""
    return name if len(name) <= columns else f"{name[: columns // 2 - 1]}..{name[-columns // 2 + 1 :]}"
