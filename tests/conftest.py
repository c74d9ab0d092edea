"""What every test may rely on: fixed seeds, a kernel cache of the session's own, nothing left over from other tests."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Each kernel is compiled once a session, and the user's own cache is neither read nor written."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("heterps-cache")
        patch.setenv("HETERPS_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def simulated_accelerator() -> None:
    """Known before any test runs a backward pass: torch counts devices at the first one of a process."""
    from heterps_compile.devices import sim

    sim.install()


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def process_left_as_found() -> Iterator[None]:
    """Undo what outlives a test: compiled graphs, the thread count, the default dtype and the working directory."""
    threads, dtype, folder = torch.get_num_threads(), torch.get_default_dtype(), Path.cwd()
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    os.chdir(folder)


@pytest.fixture
def shared_data() -> Path:
    """Small real data sets that lie beside a checkout on some machines and are not part of the repository."""
    if not SHARED_DATA.is_dir():
        pytest.skip("needs the data sets in ../shared/data, which are not here")
    return SHARED_DATA


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA or ROCm device, and torch sees none here")
