"""Unmaps ranges that nobody uses any more, on a thread of its own: a model's weights take longer than a step.

It waits a little, because weights leave when others come, whose mapping and copying would wait for the same locks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from runtime import telemetry
from worker.memory.physical import PhysicalMemory

#: Wait before ranges are unmapped, in seconds, unless somebody needs their place.
DELAY_S = 0.5

log = telemetry.logger("worker.memory.unmapping")


class Unmapping:
    """The thread, which starts with the first range."""

    def __init__(self, physical: PhysicalMemory) -> None:
        self._physical = physical
        self._work: queue.SimpleQueue[tuple[int, int, Callable[[], object]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()

    def hurry(self) -> None:
        """Somebody waits for a range. Any thread."""
        self._hurry.set()

    def put(self, address: int, count: int, then: Callable[[], object]) -> None:
        """Unmap `count` granules from `address` on, and call `then`, on the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="unmapping", daemon=True)
            self._thread.start()
        self._work.put((address, count, then))

    def close(self) -> None:
        """Return when all is unmapped."""
        if self._thread is not None:
            self._work.put(None)
            self.hurry()
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            self._hurry.wait(DELAY_S)
            while work is not None:
                self._unmap(*work)
                try:
                    work = self._work.get_nowait()
                except queue.Empty:
                    break
            else:
                return
            self._hurry.clear()

    def _unmap(self, address: int, count: int, then: Callable[[], object]) -> None:
        try:
            self._physical.hide(address, count)
        except Exception:
            log.exception("a range stays mapped")  # who maps something there next gets the error
        then()
