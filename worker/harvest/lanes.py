"""Threads (lanes) that compute units, each alone within the gate.

A chain is a sequence of units that follow each other; units of different chains may compute at the same time. A lane
takes a chain only within the gate and puts it back after one unit, so a lane that must pause holds nothing that others
need. Chains that have begun go on first, so at most as many are under way as there are lanes.

Results do not depend on lanes: which lane computes a unit, and when, is not visible to it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import torch

from worker.harvest.gate import Gate, Stopped

W = TypeVar("W")
#: Units that follow each other; each gets what it computes with, such as weights.
Chain = Generator[Callable[[W], None], None, None]


class Lanes:
    """`count` threads. One caller at a time."""

    def __init__(self, count: int, gate: Gate) -> None:
        self._gate = gate
        self._changed = threading.Condition()
        #: Chains of which no unit is computing; those that have begun first.
        self._ready: deque[Chain[Any]] = deque()
        self._computing = 0
        self._lend: Callable[[], Any] = lambda: None
        self._give_back: Callable[[], None] = lambda: None
        self._failed: BaseException | None = None
        self._closed = False
        for lane in range(count):
            threading.Thread(target=self._run, args=(lane,), name=f"harvest-{lane}", daemon=True).start()

    def run(
        self, chains: Sequence[Chain[W]], lend: Callable[[], W], give_back: Callable[[], None] = lambda: None
    ) -> None:
        """Computes all units. lend, give_back: called around each unit, within the gate; the unit gets what `lend`
        returns. Raises what a unit, `lend` or the gate raised, after the units that were computing have ended; the
        remaining ones are not computed then."""
        with self._changed:
            self._lend, self._give_back = lend, give_back
            if self._failed is None:
                self._ready.extend(chains)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._ready and not self._computing)
            failed, self._failed = self._failed, None
        if failed is not None:
            for chain in chains:
                chain.close()
            raise failed

    def close(self) -> None:
        """Ends the threads; one that waits at the gate ends when the gate lets it in or raises Stopped."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()

    def _run(self, lane: int) -> None:
        torch.set_num_threads(1)  # a unit's bits must not depend on the number of threads
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._closed)
                if self._closed:
                    return
            try:
                self._gate.enter(lane)
                self._gate.leave(lane, self._one_unit())
            except BaseException as e:
                self._fail(e)

    def _one_unit(self) -> float:
        """Computes a chain's next unit; returns its seconds, 0 when no chain is ready."""
        with self._changed:
            if not self._ready:
                return 0.0
            chain = self._ready.popleft()
            lend, give_back = self._lend, self._give_back
            self._computing += 1
        seconds, ended = 0.0, True
        try:
            unit = next(chain, None)
            if unit is not None:
                lent = lend()
                try:
                    began = time.perf_counter()
                    unit(lent)
                    seconds = time.perf_counter() - began
                finally:
                    give_back()
                ended = False
        except BaseException as e:
            self._fail(e)
        finally:
            with self._changed:
                self._computing -= 1
                if not ended and self._failed is None and not self._closed:
                    self._ready.appendleft(chain)
                self._changed.notify_all()
        return seconds

    def _fail(self, error: BaseException) -> None:
        """Remembers why `run` ends: the first reason, but Stopped only if there is no other."""
        with self._changed:
            if self._failed is None or isinstance(self._failed, Stopped):
                self._failed = error
            self._ready.clear()
            self._changed.notify_all()
