"""The frozen layers of a trainer that are in memory: a plain copy of each, in slots that the worker grants.

Layers are used in a circle, forward and then backward. A thread copies the layers that are used next from the
checkpoint; the one that is used latest leaves for them (HARLI, section 4.2). A slot that the worker wants back is
unmapped as soon as no unit uses it. The worker's images of weights hold them as its kernels want them; here they are as
torch wants them.

Does not decide how many slots there are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from worker.core import window as core
from worker.harvest.gate import Stopped
from worker.memory.exports import Exported, HostWindow
from worker.models.weights import LayerWeights, Layout, TopWeights


class Window:
    """`Frozen`; see the module. layouts: of each layer, plain. returned: called with the numbers of slots that are
    unmapped. Thread-safe."""

    def __init__(self, layouts: Sequence[Layout], top: Layout, returned: Callable[[list[int]], None]) -> None:
        self._layouts, self._top_layout, self._returned = layouts, top, returned
        self._core = core.Window(len(layouts), 1)
        self._slots: dict[int, HostWindow] = {}
        #: Which slot has the layer, or gets it.
        self._slot_of: dict[int, int] = {}
        self._views: dict[int, LayerWeights] = {}
        self._top: TopWeights | None = None
        self._users = [0] * len(layouts)
        #: The layer that is copied now, even if its slot is wanted back meanwhile.
        self._copied: int | None = None
        self._revoked = 0
        self._ended: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._fill, name="window", daemon=True)
        self._thread.start()

    # ---- for units ---------------------------------------------------------------------------------------------
    def top(self) -> TopWeights:
        """See `Frozen.top`; waits for them."""
        with self._changed:
            self._wait_until(lambda: self._top is not None)
            assert self._top is not None
            return self._top

    def next(self, layer: int, forward: bool) -> None:
        """See `Frozen.next`."""
        with self._changed:
            self._core.compute(layer, forward)
            self._changed.notify_all()

    def acquire(self, layer: int) -> LayerWeights:
        """See `Frozen.acquire`."""
        with self._changed:
            self._wait_until(lambda: layer in self._core.here)
            self._users[layer] += 1
            return self._views[layer]

    def release(self, layer: int) -> None:
        """See `Frozen.release`."""
        with self._changed:
            self._users[layer] -= 1
            self._changed.notify_all()

    # ---- for the worker's messages -----------------------------------------------------------------------------
    def grant(self, slot: int, exported: Exported) -> None:
        """A slot; -1: memory for the weights outside the layers, which are copied now. Raises OSError."""
        memory = HostWindow(exported)
        exported.close()
        if slot < 0:
            views = self._top_layout.views_at(memory.address, torch.device("cpu"))
            self._top_layout.pack_into(views)
            top = TopWeights(views["embedding"], views["norm"], views.get("head", views["embedding"]))
            with self._changed:
                self._top = top
                self._changed.notify_all()
            return
        with self._changed:
            self._slots[slot] = memory
            self._fit()

    def revoke(self, count: int) -> None:
        """Give back so many slots, as soon as no unit uses them."""
        with self._changed:
            self._revoked += count
            self._fit()

    def end(self, error: BaseException) -> None:
        """Whoever waits gets this error."""
        with self._changed:
            self._ended = error
            self._changed.notify_all()

    def validate(self) -> None:
        """Raises AssertionError when an invariant does not hold."""
        with self._changed:
            self._core.validate()
            assert len(set(self._slot_of.values())) == len(self._slot_of), "two layers are in a slot"
            assert self._slot_of.keys() >= self._core.here and set(self._slot_of.values()) <= self._slots.keys()
            assert min(self._users) >= 0

    # ---- its thread --------------------------------------------------------------------------------------------
    def _fit(self) -> None:
        self._core.fit(len(self._slots) - self._revoked)
        self._changed.notify_all()

    def _fill(self) -> None:
        while (job := self._wait_for_job()) is not None:
            slot, layer = job
            try:
                views = self._layouts[layer].views_at(self._slots[slot].address, torch.device("cpu"))
                self._layouts[layer].pack_into(views)
            except BaseException as error:
                self.end(error)
                return
            with self._changed:
                self._copied = None
                if self._core.coming == layer:  # else the window has shrunk meanwhile
                    self._views[layer] = LayerWeights(**views)
                    self._core.came()
                self._changed.notify_all()

    def _wait_for_job(self) -> tuple[int, int] | None:
        """The next slot to fill, and its layer; None at the end. Gives slots back meanwhile."""
        with self._changed:
            while self._ended is None:
                self._give_back()
                self._core.copy_next()
                layer, free = self._core.coming, self._free()
                if layer is not None and free:
                    self._slot_of[layer], self._copied = free[0], layer
                    return free[0], layer
                self._changed.wait()
            return None

    def _give_back(self) -> None:
        """Unmap slots that are wanted back and that nobody uses."""
        gone = self._free()[: self._revoked]
        for slot in gone:
            self._slots.pop(slot).close()
        self._revoked -= len(gone)
        if gone:
            self._returned(gone)

    def _free(self) -> list[int]:
        """Slots of no layer, or of one that has left."""
        stays = self._core.here | {self._copied}
        for layer in [n for n in self._slot_of if n not in stays and not self._users[n]]:
            del self._slot_of[layer]
            self._views.pop(layer, None)
        return [slot for slot in self._slots if slot not in self._slot_of.values()]

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            if self._ended is not None:
                raise self._ended if isinstance(self._ended, Stopped) else RuntimeError(str(self._ended))
            self._changed.wait()
