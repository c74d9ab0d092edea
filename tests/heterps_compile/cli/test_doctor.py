"""``heterps doctor``: each finding has a line, each problem one hint, and only essentials decide the exit code."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from heterps_compile.cli import doctor


def test_all_is_well_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if line.startswith("FAIL")]
    names = [line.split()[1] for line in lines if not line.startswith("      hint")]
    expected = "python torch devices cores rates compiler cache backend model triton"
    assert [name for name in names if name in expected.split()] == expected.split()


def test_a_missing_compiler_is_a_warning_with_one_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    check = doctor._compiler()
    assert (check.ok, check.essential) == (False, False)
    assert "install g++" in check.hint


def test_a_compiler_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "c++"
    fake.write_text("#!/bin/sh\necho broken compiler >&2\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    check = doctor._compiler()
    assert not check.ok
    assert "broken compiler" in check.found


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HETERPS_CACHE_DIR", str(tmp_path / "file"))
    check = doctor._cache()
    assert not check.ok
    assert "HETERPS_CACHE_DIR" in check.hint


@pytest.mark.parametrize(("count", "word"), [(0, "pip install"), (2, "uninstall one")])
def test_the_backend_must_be_registered_exactly_once(monkeypatch: pytest.MonkeyPatch, count: int, word: str) -> None:
    entry = EntryPoint(name="heterps", value="heterps_compile.backend:heterps", group="torch_dynamo_backends")
    monkeypatch.setattr(doctor, "_registered", lambda: [entry] * count)
    check = doctor._entry_point()
    assert (check.ok, check.essential) == (False, True)
    assert word in check.hint


def test_an_essential_failure_decides_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = doctor.Check(name="python", found="3.11")
    minor = doctor.Check(name="cache", found="read-only", ok=False, hint="set it")
    for name in ("_torch", "_devices", "_cores", "_rates", "_compiler", "_entry_point", "_model", "_python"):
        monkeypatch.setattr(doctor, name, lambda: good)
    monkeypatch.setattr(doctor, "_cache", lambda: minor)
    monkeypatch.setattr(doctor, "_triton", lambda: [])
    assert doctor.main() == 0
    assert "warn  cache         read-only\n      hint: set it\n" in capsys.readouterr().out
    bad = doctor.Check(name="torch", found="old", ok=False, essential=True, hint="upgrade")
    monkeypatch.setattr(doctor, "_torch", lambda: bad)
    assert doctor.main() == 1


def test_a_triton_failure_quotes_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "executable", "/bin/false")
    check = doctor._triton_can("interpret")
    assert (check.ok, check.found) == (False, "failed: no message")
