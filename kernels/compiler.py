"""From C++ text to a loaded library: the system compiler, and a cache that survives crashes and concurrent processes.

Enters: source text. Leaves: a ``ctypes.CDLL``. A shared object is kept under ``$HETERPS_CACHE_DIR`` (or
``~/.cache/heterps-compile``) in a file named by the content of source, flags, compiler version and CPU features. It
is written beside its place and renamed, under a file lock, with a checksum next to it: what is partial, altered or
unloadable is built again. Libraries link no OpenMP run-time of their own: they find the one torch has loaded, and so
share its thread pool.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch  # noqa: F401  (its OpenMP run-time must be loaded before any library made here)

from heterps_compile.errors import LoweringError

FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fno-math-errno",  # lets sqrt be vectorised; results are unchanged
    "-ffp-contract=off",  # a product is rounded before it is added, as in torch's own optimizers
    "-Wall",
    "-Wno-unknown-pragmas",
)
"""No ``-ffast-math``: NaN and Inf must stay visible."""


def cache_dir() -> Path:
    """Where built kernels are kept: ``$HETERPS_CACHE_DIR``, else ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    own = os.environ.get("HETERPS_CACHE_DIR")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "heterps-compile"


def find_compiler() -> str | None:
    """Path of the C++ compiler: ``$CXX`` if set, else the first of c++, g++, clang++ on the path; None without one."""
    named = os.environ.get("CXX")
    candidates = [named] if named else ["c++", "g++", "clang++"]
    return next((path for path in map(shutil.which, candidates) if path), None)


@functools.cache
def _compiler_version(compiler: str, changed_ns: int) -> str:
    del changed_ns  # part of the key: an upgraded compiler is asked again
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return done.stdout or done.stderr


@functools.cache
def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def content_key(source: str, compiler: str, flags: Sequence[str] = FLAGS) -> str:
    """Name of a build: equal only when source, flags, compiler and CPU features are."""
    version = _compiler_version(compiler, Path(compiler).stat().st_mtime_ns)
    parts = (source, " ".join(flags), compiler, version, _cpu_features())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released by the kernel when the process dies
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_whole(library: Path) -> bool:
    seal = library.with_suffix(".sha256")
    return library.is_file() and seal.is_file() and seal.read_text() == _digest(library)


def _compile(source: str, library: Path, compiler: str, flags: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as folder:
        text, built = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        text.write_text(source)
        done = subprocess.run(
            [compiler, *flags, str(text), "-o", str(built)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise LoweringError(
                f"{compiler} returned {done.returncode} for a CPU kernel:\n{done.stderr.strip()[-2000:]}",
                hint="set CXX to a C++17 compiler with OpenMP, or leave the kernels to torch by removing it",
            )
        library.with_suffix(".sha256").write_text(_digest(built))
        library.with_suffix(".cpp").write_text(source)
        built.replace(library)


def build(source: str, flags: Sequence[str] = FLAGS) -> Path:
    """Path of the shared object of ``source``, compiled unless a whole one is in the cache.

    Raises :class:`LoweringError` without a compiler, or with the compiler's message when it refuses the source.
    """
    compiler = find_compiler()
    if compiler is None:
        raise LoweringError(
            f"no C++ compiler found (CXX={os.environ.get('CXX')!r}, and none of c++, g++, clang++ on PATH)",
            hint="install g++ or clang++, or set CXX",
        )
    folder = cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{content_key(source, compiler, flags)}.so"
    if not _is_whole(library):
        with _locked(library.with_suffix(".lock")):
            if not _is_whole(library):  # another process may have built it while this one waited
                _compile(source, library, compiler, flags)
    return library


def load(source: str, flags: Sequence[str] = FLAGS) -> ctypes.CDLL:
    """The library of ``source``, built if needed. Raises :class:`LoweringError` as :func:`build` does."""
    library = build(source, flags)
    try:
        return ctypes.CDLL(str(library))
    except OSError:  # whole by its checksum and yet unloadable: made on another system that shares this folder
        library.unlink(missing_ok=True)
        return ctypes.CDLL(str(build(source, flags)))


def build_all(sources: Sequence[str]) -> list[Path]:
    """:func:`build` for several sources, side by side."""
    with ThreadPoolExecutor(max_workers=min(len(sources), os.cpu_count() or 1) or 1) as pool:
        return list(pool.map(build, sources))
