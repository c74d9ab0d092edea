"""The wheel and the sdist: ``passes/`` and ``kernels/`` inside the package, nothing else at the top, entry points."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SOURCES = ("heterps_compile", "passes", "kernels", "setup.py", "pyproject.toml", "README.md", "LICENSE")
BUILD = "from setuptools import build_meta as b; b.build_{kind}('dist')"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy to build in, so that no build/ folder is left in the repository."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    return copy


def build(checkout: Path, kind: str) -> Path:
    """Build as pip does, without its isolated environment: no network is needed."""
    command = [sys.executable, "-c", BUILD.format(kind=kind)]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return max((checkout / "dist").glob("*.whl" if kind == "wheel" else "*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    return build(checkout, "wheel")


def source_files(checkout: Path) -> set[str]:
    """Every file of the three source folders, by the path it should have in the wheel."""
    found = set()
    for folder, target in (("heterps_compile", ""), ("passes", "heterps_compile/"), ("kernels", "heterps_compile/")):
        found |= {target + str(p.relative_to(checkout)) for p in (checkout / folder).rglob("*") if p.is_file()}
    return found


def test_the_wheel_holds_every_source_file_and_only_one_top_level_package(checkout: Path, wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    packaged = {name for name in names if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in packaged} == {"heterps_compile"}
    assert packaged == source_files(checkout)


def test_the_wheel_names_the_backend_and_the_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    [path] = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    entries = configparser.ConfigParser()
    entries.read_string(archive.read(path).decode())
    assert dict(entries["torch_dynamo_backends"]) == {"heterps": "heterps_compile.backend:heterps"}
    assert dict(entries["console_scripts"]) == {"heterps": "heterps_compile.cli:main"}


def test_modules_import_from_the_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import heterps_compile, heterps_compile.passes, heterps_compile.passes.place, heterps_compile.kernels as k;"
        "from importlib.metadata import version; print(k.__file__); print(version('heterps-compile'))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.split()[0] == str(tmp_path / "heterps_compile" / "kernels" / "__init__.py")


def test_the_sdist_builds_the_same_wheel(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build(checkout, "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    [unpacked] = tmp_path.iterdir()
    names = set(zipfile.ZipFile(wheel).namelist())
    assert set(zipfile.ZipFile(build(unpacked, "wheel")).namelist()) == names


def test_torch_finds_the_installed_backend_once() -> None:
    assert torch._dynamo.list_backends().count("heterps") == 1
