"""Amounts as people write them."""

from __future__ import annotations

import pytest

from heterps_compile.report.amounts import against, duration, in_the_way, rate, short, units, usd


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (1234.5, "$1,234.50"),
        (9.6, "$9.60"),
        (1.0, "$1.00"),
        (0.99996, "$1.00"),
        (0.5, "$0.50"),
        (0.0086211, "$0.008621"),
        (0.0000394216, "$0.00003942"),
        (0.0, "$0.00"),
    ],
)
def test_money(amount: float, text: str) -> None:
    assert usd(amount) == text


def test_the_rest() -> None:
    assert [rate(x) for x in (123456.7, 99.94, 0.5)] == ["123,457", "99.9", "0.5"]
    assert [duration(x) for x in (3.0, 300.0, 9000.0, 864000.0)] == ["3 s", "5 min", "2.5 h", "10 days"]
    assert units({"cpu": 1200, "t4": 0, "v100": 1, "l4": 2}) == "1,200 cpu, 1 v100 and 2 l4"
    assert units({}) == "nothing"
    assert [against(x, 2.0) for x in (2.0, 2.1, 1.5, 7.0)] == ["same cost", "+5.0%", "-25.0%", "3.5 x"]
    assert against(2.0, 0.0) == "$2.00"
    assert short("a" * 40, 10) == "aaaa..aaaa"


def test_of_several_limits_one_has_to_be_raised() -> None:
    assert in_the_way([]) == "not found out in the time given"
    assert in_the_way(["limit of t4 (8)"]) == "limit of t4 (8)"
    both = in_the_way(["limit of t4 (8)", "limit of cpu (2)", "policy cpu-only"])
    assert both == "limit of t4 (8) or limit of cpu (2) (raising one is enough); policy cpu-only"
