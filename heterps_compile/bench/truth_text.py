"""Results of ``heterps bench truth`` as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from heterps_compile.bench.truth import TARGET, Outcome
from heterps_compile.report.columns import align

HEADS = ("model", "cores", "types", "stages", "measured", "from layers", "off by", "from stages", "off by", "rounds")


def table(outcomes: Sequence[Outcome]) -> str:
    """A row per case, in samples/s; a prediction is the measured throughput plus its median error."""
    return "\n".join(align([HEADS, *map(_row, outcomes)], right=(1, 3, 4, 5, 6, 7, 8, 9)))


def closing_text(outcomes: Sequence[Outcome], load: float) -> str:
    """How many predictions are within the target, and what else the machine was doing."""
    lines = []
    for kind, errors in (
        ("layers", [outcome.layers_error for outcome in outcomes]),
        ("stages", [outcome.stages_error for outcome in outcomes]),
    ):
        hits = sum(abs(error) <= TARGET for error in errors)
        spread = f"between {min(errors):+.1%} and {max(errors):+.1%}"
        lines.append(f"from {kind}: {hits} of {len(errors)} within {TARGET:.0%}, {spread}")
    return "\n".join(
        [
            "samples/s of whole training steps; median over the rounds of predicted over measured, stages take turns",
            *lines,
            f"load average of the last minute: {load:.1f}. Layers are predicted for cores that nothing else uses: with",
            "other load two cores gain less than Amdahl's law has it, or lose. Stages are timed as they run.",
        ]
    )


def to_dict(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Ready for JSON: every round of every case."""
    return {"version": 1, "target": TARGET, "cases": [_entry(outcome) for outcome in outcomes]}


def _entry(outcome: Outcome) -> dict[str, Any]:
    return {
        **asdict(outcome),
        "measured_samples_per_s": outcome.measured_samples_per_s,
        "layers_error": outcome.layers_error,
        "stages_error": outcome.stages_error,
    }


def _row(outcome: Outcome) -> tuple[str, ...]:
    case, measured = outcome.case, outcome.measured_samples_per_s
    predicted = [
        cell
        for error in (outcome.layers_error, outcome.stages_error)
        for cell in (f"{measured * (1 + error):,.0f}", f"{error:+.1%}")
    ]
    counts = (case.model, str(case.cores), case.types, str(outcome.num_stages), f"{measured:,.0f}")
    return (*counts, *predicted, str(len(outcome.rounds)))
