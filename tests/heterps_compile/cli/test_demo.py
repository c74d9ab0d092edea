"""The demo in small: every part prints, and the exit code says whether the planted signal was learned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from heterps_compile.cli import demo

TINY = demo.Settings(
    num_samples=2048, rows=50, dim=4, batch_size=256, race_steps=1, race_segments=1, backends=("eager",)
)


def test_every_part_prints_and_an_untrained_model_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run(TINY) == 1
    printed = capsys.readouterr().out
    for part in ("emb(26 tables x 4)", "v100", "step ", "AUC", "NOT reached", "samples/s", "torch "):
        assert part in printed
    assert "data-intensive" in printed
    assert "compute-intensive" in printed


def test_verdict() -> None:
    good = demo.Quality(auc=0.795, log_loss=0.5, planted_auc=0.8)
    assert good.reached
    assert "reached within 0.01 (short by 0.0050)" in demo.quality_text(good)
    assert not replace(good, auc=0.78).reached


def test_arguments() -> None:
    settings = demo.parse(["--samples", "5000", "--rows", "10", "--no-inductor"])
    assert (settings.num_samples, settings.rows, settings.backends) == (5000, 10, ("heterps", "eager"))
