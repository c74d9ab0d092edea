"""The examples run as a user runs them: in a process of their own, small."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--samples", "1500", "--rows", "50", "--batch-size", "500", "--dim", "4"]


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def figure(printed: str, before: str) -> float:
    """The number that follows some words."""
    return float(printed.split(before, 1)[1].split()[0].rstrip(","))


@pytest.mark.parametrize("arguments", [["--model", "dlrm"], ["--model", "widedeep", "--optimizer", "adam"]])
def test_train_ctr_matches_eager(arguments: list[str]) -> None:
    done = run("train_ctr.py", *SMALL, *arguments, "--compare-eager")
    assert done.returncode == 0, done.stderr
    assert abs(figure(done.stdout, "AUC differs from eager by")) < 0.002
    assert "heterps   AUC" in done.stdout


def test_train_ctr_on_real_files_holds_out_what_has_an_auc(shared_data: Path) -> None:
    files = ["--train", str(shared_data / "criteo_train.tiny.csv"), "--test", str(shared_data / "criteo_test.tiny.csv")]
    done = run("train_ctr.py", *files, "--rows", "500", "--batch-size", "256", "--backend", "eager", "--dim", "4")
    assert done.returncode == 0, done.stderr
    assert "holds one class only (1999 labels of 0)" in done.stderr
    assert "held-out samples 400" in done.stdout


def test_train_movielens_matches_eager(shared_data: Path) -> None:
    file = str(shared_data / "movielens100k_ratings.parquet.brotli")
    done = run("train_movielens.py", file, "--epochs", "1", "--batch-size", "8192")
    assert done.returncode == 0, done.stderr
    assert abs(figure(done.stdout, "AUC differs from eager by")) < 0.002


def test_plan_fleet_prints_a_plan_and_says_when_there_is_none() -> None:
    done = run("plan_fleet.py")
    assert done.returncode == 0, done.stderr
    assert "v100" in done.stdout


def test_plan_tables_fits_a_real_population_into_memory(shared_data: Path) -> None:
    done = run("plan_tables.py", str(shared_data / "sharding_stats_example.txt.gz"))
    assert done.returncode == 0, done.stderr
    assert "1,935 tables, 1.30 TB of rows" in done.stdout
    assert done.stdout.startswith("1,935 tables")
    assert "samples/s (asked: 20,000)" in done.stdout
    assert len(done.stdout.splitlines()) < 60


def test_plan_tables_refuses_another_file(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("no tables here")
    done = run("plan_tables.py", str(tmp_path / "other.txt"))
    assert done.returncode == 1
    assert "holds no line of a table" in done.stderr
