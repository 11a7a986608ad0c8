"""An engine that shares its device with others, in virtual time: the device gives it turns."""

from __future__ import annotations

from collections.abc import Callable

from loadtest.simulate.costs import NodeKind
from loadtest.simulate.engine import Engine, Shell
from loadtest.simulate.events import Events
from loadtest.simulate.stretch import Stretch
from worker.core import instructions as do
from worker.core.engine_core import EngineCore


class TurnedEngine(Engine):
    """An engine that its device gives turns, of a step each. told: it has heard something since its last turn."""

    def __init__(self, events: Events, kind: NodeKind, core: EngineCore, shell: Shell) -> None:
        super().__init__(events, kind, core, shell)
        self._longest, self.told = 1, True
        #: Called when something has come, and when a step is over. late: calls back when weights are here, or is False.
        self.woken: Callable[[TurnedEngine], None] = lambda engine: None
        self.stepped: Callable[[], None] = lambda: None
        self.late: Callable[[Callable[[], None]], bool] = lambda follow: False
        #: Takes the seconds that mapping has taken the device.
        self.mapping_s: Callable[[], float] = lambda: 0.0
        #: The last step, and the number of steps like it that may follow.
        self._last: do.Step | None = None
        self._alike = 0

    def due_in_s(self) -> float:
        """See `worker.engine.engine.NativeEngine.due_in_s`."""
        if self.core.going_on or self.told or self.core.may_fit:
            return 0.0
        return self.core.due_in_s(self._events.now)

    def take_turn(self) -> bool:
        """Whether a step has begun; `stepped` follows."""
        self.told, self._alike = False, 0
        step = self.core.turn(self._events.now)
        self._act()
        if step is None:
            return False
        self.disturb(self.mapping_s())
        self._begin(step)
        return True

    def let_go(self) -> None:
        """Unmap what another model has taken over."""
        self.core.state.unmap()
        self._act()

    def following(self) -> Stretch | None:
        """The steps like the last one that may follow without a decision, if nothing comes."""
        if self._last is None or self._alike < 1 or self.core.interrupted():
            return None
        batch = self._last.batch
        first_s, slope_s = self._kind.costs.decode(len(batch), float(sum(len(s.tokens) for s, _ in batch)))
        return Stretch(self._events.now, self._alike, first_s, slope_s * len(batch))

    def run_on(self, stretch: Stretch, count: int) -> None:
        """The first `count` of these steps are over."""
        assert self._last is not None
        stretch.count, self._stretch = count, stretch
        self._alike -= count
        self._stepped(self._last, count, frozenset(), 0.0)

    def _begun(self, quiet: int) -> None:
        self._last, self._alike = self._step, quiet - 1

    def _wants_turn(self) -> None:
        self.told = True
        self.woken(self)

    def _over(self, version: int) -> None:
        if version == self._version and self._step is not None and self.late(lambda: self._last_layer(version)):
            return
        before = self._step
        super()._over(version)
        if before is not None and self._step is None:
            self.stepped()

    def _last_layer(self, version: int) -> None:
        self._events.at(self._events.now + self._stretch.first_s / self._kind.shape.layers, lambda: self._over(version))
