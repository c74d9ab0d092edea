"""Seconds until a DLRM of 26 tables has answered for the first time, each case in a process of its own.

    python benchmarks/first_call.py [--repeat 3]

Timed is the first forward and backward after ``torch.compile(...)`` in a process that has imported torch but not
Dynamo, with an empty kernel cache ("cold") and with the one that the cold run left ("warm"). Also: what ``import
heterps_compile`` adds to ``import torch``.
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
model = models.DLRM((200_000,) * 26, 16, sparse={sparse})
dense, ids = torch.rand(4096, 13), torch.randint(0, 200_000, (4096, 26))
model(dense, ids).sum().backward()
started = time.perf_counter()
torch.compile(model, backend="{backend}")(dense, ids).sum().backward()
print(time.perf_counter() - started)
"""
IMPORT = """
import torch, time
started = time.perf_counter()
import heterps_compile
print(time.perf_counter() - started)
"""


def seconds(code: str, cache: str) -> float:
    environment = {
        **os.environ,
        "HETERPS_CACHE_DIR": f"{cache}/heterps",
        "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor",
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def cold_and_warm(backend: str, repeat: int, *, sparse: bool = True) -> tuple[float, float]:
    code = CALL.format(backend=backend, sparse=sparse)
    cold, warm = [], []
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(seconds(code, cache))
            warm.append(seconds(code, cache))
    return statistics.median(cold), statistics.median(warm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="processes per figure; the median is printed")
    repeat = parser.parse_args().repeat
    print("| first call, s | cold | warm |\n|---|---|---|")
    for backend in ("heterps", "inductor", "eager"):
        cold, warm = cold_and_warm(backend, repeat)
        print(f"| {backend} | {cold:.2f} | {warm:.2f} |", flush=True)
    with tempfile.TemporaryDirectory() as cache:
        added = statistics.median(seconds(IMPORT, cache) for _ in range(repeat))
    print(f"\nimport heterps_compile adds {added:.4f} s to import torch")


if __name__ == "__main__":
    main()
