"""One thread per device: gives the engines of the device's models turns, one after the other.

Only one engine computes at a time, so two steps never share the device. A turn is at most one step, of bounded length
(`worker.mixed_step_s`). When idle, the thread sleeps until an engine gets an event or is due.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence

from runtime import telemetry
from runtime.niceness import step_back
from worker.engine.engine import NativeEngine
from worker.engine.placing import Placing
from worker.engine.training.harvesting import Harvesting

log = telemetry.logger("worker.engine.device_loop")
#: Maximum sleep, in seconds, so that a silent store is noticed.
IDLE_S = 0.5


class DeviceLoop:
    """See the module. niceness: of its thread (`runtime.niceness`). on_crash: called with an engine's exception; ends
    the thread."""

    def __init__(
        self,
        engines: Sequence[NativeEngine],
        niceness: int = 0,
        placing: Placing | None = None,
        prepare: Callable[[], bool] = lambda: False,
        harvesting: Harvesting | None = None,
    ) -> None:
        """placing: decides whose weights are on the device; None: all are, always. prepare: does a little work, of a
        millisecond at most, while no engine has a request or a copy; whether it did. harvesting: trains beside the
        engines; None: nothing does."""
        self.engines, self.placing, self._prepare = tuple(engines), placing, prepare
        self.harvesting = harvesting
        self.on_crash: Callable[[BaseException], None] = lambda error: None
        self._niceness = niceness
        self._stopping = False
        self._woken = threading.Event()
        if placing is not None:
            placing.woken = self._woken.set
        if harvesting is not None:
            harvesting.woken = self._woken.set
        for engine in self.engines:
            engine.inbox.woken = self._woken.set
            engine.stepping.beside = harvesting
        share_memory(self.engines, placing, harvesting)
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the current step."""
        self._stopping = True
        self._woken.set()
        self._thread.join(timeout=5)
        if self.placing is not None:
            self.placing.stop()
        if self.harvesting is not None:
            self.harvesting.close()

    def _main(self) -> None:
        step_back(self._niceness)
        try:
            while not self._stopping:
                self._round()
        except BaseException as error:
            log.exception("engine died")
            self.on_crash(error)

    def _round(self) -> None:
        self._woken.clear()
        due_s = IDLE_S
        if self.placing is not None:
            self.placing.turn(functools.partial(unmap_for, self.engines, self.harvesting))
            due_s = min(IDLE_S, self.placing.residency.due_in_s(self.placing.clock.now()))
        busy = [engine for engine in self.engines if engine.due_in_s() <= 0]
        if self.harvesting is not None:
            due_s = min(due_s, self.harvesting.turn(not busy, functools.partial(unmap_for, self.engines)))
        if not busy:
            for engine in self.engines:
                engine.rest()
            if all(engine.idle for engine in self.engines) and self._prepare():
                return
            if not self._woken.wait(min(due_s, *(engine.due_in_s() for engine in self.engines))):
                busy = list(self.engines)
        for engine in in_order(busy):
            engine.turn()


def in_order(busy: Sequence[NativeEngine]) -> Iterator[NativeEngine]:
    """The engines, each before its turn. Where models have targets, the one whose prompt is first goes first, and the
    others add no prompt to the same round (`worker.core.arbitration`)."""
    if len(busy) > 1 and busy[0].core.state.order.arbitration is not None:
        busy = sorted(busy, key=lambda engine: engine.core.scheduling.first_rank(engine.core.live.values()))
    prefilled = False
    for engine in busy:
        scheduling = engine.core.scheduling
        scheduling.prefills = not (prefilled and engine.core.state.order.arbitration)
        scheduling.prefilled = False
        yield engine
        prefilled |= scheduling.prefilled


def unmap_for(
    engines: Sequence[NativeEngine], harvesting: Harvesting | None = None, engine: NativeEngine | None = None
) -> None:
    """All engines but `engine` unmap what they have given up, and so does the trainer."""
    for other in engines:
        if other is not engine:
            other.let_go()
    if harvesting is not None:
        harvesting.make_way()


def share_memory(
    engines: Sequence[NativeEngine], placing: Placing | None = None, harvesting: Harvesting | None = None
) -> None:
    """Before one of these engines maps memory, the others and the trainer unmap what they have given up, and weights
    leave."""

    def make_way(engine: NativeEngine) -> None:
        unmap_for(engines, harvesting, engine)
        if placing is not None:
            placing.execute(functools.partial(unmap_for, engines, harvesting, engine))

    for engine in engines:
        engine.executor.make_way = functools.partial(make_way, engine)
