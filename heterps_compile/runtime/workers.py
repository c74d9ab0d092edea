"""One thread per stage, and the jobs they share.

Enters: a :class:`Job`, the steps of one call. Leaves: when all its steps ran, or with the first error.
Threads start with the first job and end with :meth:`Workers.close`; a forked child starts its own. Calls from several
threads queue their jobs in one order on every worker, so none can wait for the other in a circle.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import final


@final
class Job:
    """Steps ``(s, m)``: stage ``s`` runs its microbatches in ``orders[s]``, each after the stages it waits for."""

    def __init__(
        self,
        *,
        orders: tuple[tuple[int, ...], ...],
        waits_for: tuple[tuple[int, ...], ...],
        step: Callable[[int, int], None],
        entered: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._orders = orders
        self._waits_for = waits_for
        self._step = step
        self._entered = entered
        self._changed = threading.Condition()
        self._done: set[tuple[int, int]] = set()
        self._stages_left = len(orders)
        self._stopped = False
        self._error: BaseException | None = None

    def run_stage(self, s: int) -> None:
        """All steps of one stage, in its worker. Never raises: the first error stops the job and is kept."""
        try:
            with self._entered():
                for m in self._orders[s]:
                    if not self._may_start(s, m):
                        break
                    self._step(s, m)
                    self._note_done(s, m)
        except BaseException as error:  # carried to the caller, whatever it is
            self._stop(error)
        with self._changed:
            self._stages_left -= 1
            self._changed.notify_all()

    def wait(self) -> None:
        """Block until no worker touches this job any more; raise the first error with its traceback."""
        try:
            self._wait_for_stages()
        except BaseException:  # Ctrl-C: the workers must not go on with a call that nobody waits for
            self._stop(None)
            self._wait_for_stages()
            raise
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # the traceback holds this frame, and the frame must not hold the traceback

    def _wait_for_stages(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stages_left == 0)

    def _may_start(self, s: int, m: int) -> bool:
        needed = {(upstream, m) for upstream in self._waits_for[s]}
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or needed <= self._done)
            return not self._stopped

    def _note_done(self, s: int, m: int) -> None:
        with self._changed:
            self._done.add((s, m))
            self._changed.notify_all()

    def _stop(self, error: BaseException | None) -> None:
        with self._changed:
            if not self._stopped:
                self._error = error
            self._stopped = True
            self._changed.notify_all()


@final
class Workers:
    """Named threads that wait for jobs; none runs before the first job."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._lock = threading.Lock()
        self._queues: tuple[queue.SimpleQueue[Job | None], ...] = ()
        self._threads: tuple[threading.Thread, ...] = ()
        self._process = 0

    def run(self, job: Job) -> None:
        """Run a job to its end. Raises its first error."""
        with self._lock:
            if not self._threads or self._process != os.getpid():  # a fork copies the object but not the threads
                self._start()
            for waiting in self._queues:
                waiting.put(job)
        job.wait()

    def close(self) -> None:
        """End the threads once they have finished the jobs already queued."""
        with self._lock:
            threads, self._threads = self._threads, ()
            if self._process != os.getpid():
                return
            for waiting in self._queues:
                waiting.put(None)
            self._queues = ()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _start(self) -> None:
        self._process = os.getpid()
        self._queues = tuple(queue.SimpleQueue() for _ in self._names)
        self._threads = tuple(
            threading.Thread(target=_serve, args=(s, waiting), name=name, daemon=True)
            for s, (name, waiting) in enumerate(zip(self._names, self._queues, strict=True))
        )
        for thread in self._threads:
            thread.start()


def _serve(s: int, waiting: queue.SimpleQueue[Job | None]) -> None:
    while (job := waiting.get()) is not None:
        job.run_stage(s)
        del job  # else the last call's tensors live until the next one
