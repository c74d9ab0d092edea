"""Schedules as drawn grids: a row per stage, a column per clock."""

from __future__ import annotations

import pytest

from heterps_compile.runtime.schedule import Action, draw, gpipe, one_f_one_b, stage_order


def grid(text: str) -> str:
    rows = [line.split() for line in text.strip().splitlines()]
    width = max(len(cell) for row in rows for cell in row)
    return "\n".join(" ".join(cell.rjust(width) for cell in row) for row in rows)


def test_gpipe_four_microbatches_three_stages() -> None:
    assert draw(gpipe(4, 3), 3) == grid("""
        F0 F1 F2 F3  .  .
         . F0 F1 F2 F3  .
         .  . F0 F1 F2 F3
    """)


def test_gpipe_more_stages_than_microbatches() -> None:
    assert draw(gpipe(1, 3), 3) == grid("""
        F0  .  .
         . F0  .
         .  . F0
    """)


def test_one_f_one_b_four_microbatches_three_stages() -> None:
    assert draw(one_f_one_b(4, 3), 3) == grid("""
        F0 F1 F2  .  . B0 F3 B1  . B2  . B3
         . F0 F1  . B0 F2 B1 F3 B2  . B3  .
         .  . F0 B0 F1 B1 F2 B2 F3 B3  .  .
    """)


def test_one_f_one_b_more_stages_than_microbatches() -> None:
    assert draw(one_f_one_b(2, 4), 4) == grid("""
        F0 F1  .  .  .  .  . B0  . B1
         . F0 F1  .  .  . B0  . B1  .
         .  . F0 F1  . B0  . B1  .  .
         .  .  . F0 B0 F1 B1  .  .  .
    """)


def test_one_stage_has_no_idle_clock() -> None:
    assert draw(one_f_one_b(3, 1), 1) == "F0 B0 F1 B1 F2 B2"
    assert draw(gpipe(3, 1), 1) == "F0 F1 F2"


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8])
def test_laws(num_microbatches: int, num_stages: int) -> None:
    M, S = num_microbatches, num_stages
    forward, both = list(gpipe(M, S)), list(one_f_one_b(M, S))
    assert (len(forward), len(both)) == (M + S - 1, 2 * (M + S - 1))
    for cycles, kinds in ((forward, "F"), (both, "FB")):
        when = {action: clock for clock, cycle in enumerate(cycles) for action in cycle}
        assert sorted(when) == sorted(Action(kind, m, s) for kind in kinds for m in range(M) for s in range(S))
        for kind, m, s in when:
            if kind == "F" and s:
                assert when[Action("F", m, s - 1)] < when[Action("F", m, s)]
            if kind == "B":
                assert when[Action("F", m, s)] < when[Action("B", m, s)]
                assert s + 1 == S or when[Action("B", m, s + 1)] < when[Action("B", m, s)]
    for s in range(S):
        in_flight = most = 0
        for action in stage_order(iter(both), s):
            in_flight += 1 if action.kind == "F" else -1
            most = max(most, in_flight)
        assert most == min(M, S - s)


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_nothing_to_schedule_is_an_error(schedule: object) -> None:
    with pytest.raises(ValueError, match=r"a microbatch and a stage \(M = 0, S = 2\)"):
        list(schedule(0, 2))  # type: ignore[operator]
