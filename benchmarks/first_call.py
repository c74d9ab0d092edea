"""Seconds until a DLRM of 26 tables has answered for the first time, each case in a process of its own.

    python benchmarks/first_call.py [--repeat 3]

Timed are ``torch.compile(...)``, which imports Dynamo and the backend, and then the first forward and backward, with an
empty kernel cache ("cold") and with the one the cold run left ("warm"). Also: what ``import heterps_compile`` adds to
``import torch``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

CALL = """
import time, torch
from heterps_compile import models
torch.manual_seed(0)
model = models.DLRM((200_000,) * 26, 16, sparse=True)
dense, ids = torch.rand(4096, 13), torch.randint(0, 200_000, (4096, 26))
model(dense, ids).sum().backward()
started = time.perf_counter()
compiled = torch.compile(model, backend="{backend}")
loaded = time.perf_counter()
compiled(dense, ids).sum().backward()
print(loaded - started, time.perf_counter() - loaded)
"""
IMPORT = """
import torch, time
started = time.perf_counter()
import heterps_compile
print(time.perf_counter() - started)
"""


def seconds(code: str, cache: str) -> list[float]:
    caches = {"HETERPS_CACHE_DIR": f"{cache}/heterps", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **caches}, check=True, capture_output=True, text=True)
    return [float(word) for word in done.stdout.split()]


def load_cold_and_warm(backend: str, repeat: int) -> tuple[float, float, float]:
    """Medians: what ``torch.compile(...)`` takes, then the first call with an empty cache and with a filled one."""
    runs = []
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as cache:
            (_, cold), (load, warm) = (seconds(CALL.format(backend=backend), cache) for _ in range(2))
            runs.append((load, cold, warm))
    load, cold, warm = (statistics.median(column) for column in zip(*runs, strict=True))
    return load, cold, warm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="processes per figure; the median is printed")
    repeat = parser.parse_args().repeat
    print("| backend | torch.compile() s | first call, cold s | first call, warm s |\n|---|---|---|---|")
    for backend in ("heterps", "inductor", "eager"):
        load, cold, warm = load_cold_and_warm(backend, repeat)
        print(f"| {backend} | {load:.2f} | {cold:.2f} | {warm:.2f} |", flush=True)
    with tempfile.TemporaryDirectory() as cache:
        added = statistics.median(seconds(IMPORT, cache)[0] for _ in range(repeat))
    print(f"\nimport heterps_compile adds {added:.4f} s to import torch")


if __name__ == "__main__":
    main()
