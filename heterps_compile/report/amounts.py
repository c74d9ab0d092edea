"""How amounts and names are written in every report: money, throughput, units, one cost against another.

Enters: plain numbers and plans. Leaves: short text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

NAME_COLUMNS = 34


def usd(amount: float) -> str:
    """``$12.50``; four digits of what is less than a dollar."""
    return f"${dollars(amount)}"


def dollars(amount: float) -> str:
    """The same without the sign, for columns that have it in their head: cents, or four digits of less than one."""
    if amount >= 1 or amount <= 0:
        return f"{amount:,.2f}"
    whole, digits = f"{amount:.{3 - math.floor(math.log10(amount))}f}".split(".")
    return f"{whole}.{digits.rstrip('0').ljust(2, '0')}"


def rate(samples_per_s: float) -> str:
    """Throughput in samples per second, as a whole number unless it is a small one."""
    return f"{samples_per_s:,.0f}" if samples_per_s >= 100 else f"{samples_per_s:.3g}"


def duration(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3.5 h`` or ``4.2 days``."""
    for size, name in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds:.3g} s"


def units(provision: Mapping[str, int], last: str = " and ") -> str:
    """``50 cpu, 4 t4 and 1 v100``; ``last`` parts the last two."""
    *rest, final = [f"{count:,} {name}" for name, count in provision.items() if count] or ["nothing"]
    return last.join([", ".join(rest), final]) if rest else final


def in_the_way(binds: Sequence[str]) -> str:
    """What binds, in words: where there are several limits, lifting one is enough."""
    limits = [bind for bind in binds if bind.startswith("limit of ")]
    others = [bind for bind in binds if bind not in limits]
    told = [f"{' or '.join(limits)} (raising one is enough)"] if len(limits) > 1 else limits
    return "; ".join([*told, *others]) or "not found out in the time given"


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
