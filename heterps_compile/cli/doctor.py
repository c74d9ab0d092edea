"""``heterps doctor``: what works on this machine, and one hint for each thing that does not.

Each check is a function that returns a :class:`Check`; nothing here changes a setting. Essential are Python, torch, the
registration of the backend and a model that runs under it; the rest only makes things faster or possible elsewhere.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path

OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 11)
KERNEL = 'extern "C" int heterps_doctor(int x) { return x + 1; }\n'
TRITON_LIMIT_S = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What was found, and whether it is well; a check that failed has a hint."""

    name: str
    found: str
    ok: bool = True
    essential: bool = False
    hint: str = ""

    def lines(self) -> str:
        """One line, and the hint below it."""
        mark = "ok  " if self.ok else "FAIL" if self.essential else "warn"
        return f"{mark}  {self.name:<12}  {self.found}" + (f"\n      hint: {self.hint}" if self.hint else "")


def main() -> int:
    """Print every check to stdout; 1 when an essential one failed."""
    results = []
    for check in (_python, _torch, _devices, _cores, _rates, _compiler, _cache, _entry_point, _model):
        results.append(check())
        print(results[-1].lines(), flush=True)
    for result in _triton():
        results.append(result)
        print(result.lines(), flush=True)
    return int(any(result.essential and not result.ok for result in results))


def _python() -> Check:
    ok = sys.version_info[:2] >= OLDEST_PYTHON
    wanted = ".".join(map(str, OLDEST_PYTHON))
    return Check(
        name="python",
        found=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        ok=ok,
        essential=True,
        hint="" if ok else f"use Python {wanted} or newer",
    )


def _torch() -> Check:
    wanted = ".".join(map(str, OLDEST_TORCH))
    try:
        import torch
    except ImportError as error:
        hint = f'pip install "torch>={wanted}"'
        return Check(name="torch", found=f"does not import: {error}", ok=False, essential=True, hint=hint)
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    ok = numbers >= OLDEST_TORCH
    hint = "" if ok else f'pip install --upgrade "torch>={wanted}"'
    return Check(name="torch", found=str(torch.__version__), ok=ok, essential=True, hint=hint)


def _devices() -> Check:
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Check(name="devices", found=", ".join(["cpu", *names, "sim (simulated accelerator)"]))


def _cores() -> Check:
    import torch

    from heterps_compile.cluster import num_cores

    usable = num_cores()
    threads = torch.get_num_threads()
    ok = threads <= usable
    return Check(
        name="cores",
        found=f"{usable} usable, torch uses {threads} threads",
        ok=ok,
        hint="" if ok else f"more threads than cores slow each other down: set OMP_NUM_THREADS={usable}",
    )


def _rates() -> Check:
    """What one core does, as the plans for this machine reckon; measured the first time."""
    from heterps_compile.calibrate import calibrate

    one = calibrate()
    moved = {"stream": one.stream_bytes_per_s, "random rows": one.gather_bytes_per_s, "copies": one.copy_bytes_per_s}
    shown = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in moved.items())
    return Check(name="rates", found=f"one core: products {one.flops_per_s / 1e9:.1f} GFLOP/s, {shown}")


def _compiler() -> Check:
    from heterps_compile.errors import LoweringError
    from heterps_compile.kernels import compiler

    path = compiler.find_compiler()
    slower = "without it look-ups run through torch, correct but slower"
    if path is None:
        return Check(name="compiler", found="none", ok=False, hint=f"install g++ or clang++, or set CXX; {slower}")
    try:
        answer = ctypes.CDLL(str(compiler.build(KERNEL))).heterps_doctor(41)
    except (LoweringError, OSError) as error:
        reason = " ".join(str(error).splitlines()[:2])
        hint = f"set CXX to a C++17 compiler with OpenMP; {slower}"
        return Check(name="compiler", found=f"{path} cannot build a kernel: {reason}", ok=False, hint=hint)
    return Check(name="compiler", found=f"{path}, a kernel built and ran", ok=answer == 42)


def _cache() -> Check:
    from heterps_compile.kernels.compiler import cache_dir

    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        hint = "set HETERPS_CACHE_DIR to a folder you can write to"
        return Check(name="cache", found=f"{folder} cannot be written: {error.strerror}", ok=False, hint=hint)
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return Check(name="cache", found=f"{folder}: {size / 1e6:.1f} MB in {len(files)} files")


def _registered() -> list[EntryPoint]:
    return [entry for entry in entry_points(group="torch_dynamo_backends") if entry.name == "heterps"]


def _entry_point() -> Check:
    found = _registered()
    shown = ", ".join(f"{entry.value} ({entry.dist.name if entry.dist else 'unknown'})" for entry in found)
    ok = len(found) == 1
    hint = "pip install heterps-compile into this environment"
    if len(found) > 1:
        hint = "two installed packages give torch a backend of this name: uninstall one of them"
    return Check(name="backend", found=shown or "not registered", ok=ok, essential=True, hint="" if ok else hint)


def _model() -> Check:
    """A small model, compiled and compared with eager."""
    import torch
    from torch import nn

    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), torch.ones(3, 4)
    try:
        same = torch.allclose(torch.compile(model, backend="heterps")(x), model(x))
    except Exception as error:  # whatever it is, it is what the user has to know
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        hint = "run with TORCH_LOGS=+dynamo to see where, and report it"
        return Check(name="model", found=reason, ok=False, essential=True, hint=hint)
    hint = "" if same else "the result differs from eager: report it with the output of this command"
    found = "a small model runs" + (" and equals eager" if same else "")
    return Check(name="model", found=found, ok=same, essential=True, hint=hint)


def _triton() -> list[Check]:
    """Interpreting, compiling ahead and running are three abilities: each is tried in a process of its own."""
    try:
        found = version("triton")
    except PackageNotFoundError:
        hint = "pip install triton (Linux); needed only for stages on a GPU"
        return [Check(name="triton", found="not installed", ok=False, hint=hint)]
    with ThreadPoolExecutor() as pool:
        return [Check(name="triton", found=found), *pool.map(_triton_can, ("interpret", "compile", "run"))]


def _triton_can(ability: str) -> Check:
    name = {"interpret": "  interpret", "compile": "  compile", "run": "  run"}[ability]
    if ability == "run":
        import torch

        if not torch.cuda.is_available():
            return Check(name=name, found="no GPU here: kernels are compiled ahead and interpreted only")
    environment = {**os.environ, "TRITON_INTERPRET": "1" if ability == "interpret" else "0"}
    # A process of its own: triton reads TRITON_INTERPRET once, when it is imported.
    command = [sys.executable, "-m", "heterps_compile.cli.doctor_triton", ability]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TRITON_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Check(name=name, found=f"no answer in {TRITON_LIMIT_S} s", ok=False, hint="reinstall triton")
    if done.returncode == 0:
        return Check(name=name, found=done.stdout.strip())
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    hint = f"run {Path(sys.executable).name} -m heterps_compile.cli.doctor_triton {ability} to see all of it"
    return Check(name=name, found=f"failed: {last}", ok=False, hint=hint)
