"""Progress on stderr for work that takes more than a moment; nothing when stderr is no terminal.

Enters: what is being done, or how many steps it has. Leaves: a line that is wiped when the work ends.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PERIOD_S = 0.5
WIPE = "\r\033[K"


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say what is being done and for how long, for work that does not tell how far it is."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()
    ticker = threading.Thread(target=_tick, args=(what, done), daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()


@contextmanager
def steps(what: str, total: int) -> Iterator[Callable[[], object]]:
    """A bar of ``total`` steps; the function it gives is called once per step."""
    from tqdm import tqdm

    with tqdm(total=total, desc=what, unit="plan", disable=not sys.stderr.isatty(), leave=False) as bar:
        yield bar.update


def _tick(what: str, done: threading.Event) -> None:
    """What takes less than one period is not worth a line."""
    started = time.monotonic()
    while not done.wait(PERIOD_S):
        sys.stderr.write(f"{WIPE}{what}: {time.monotonic() - started:.0f} s")
        sys.stderr.flush()
    sys.stderr.write(WIPE)
    sys.stderr.flush()
