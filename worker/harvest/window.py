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

from worker.core.window import coming, order_of_use
from worker.harvest.gate import Stopped
from worker.memory.exports import Exported, HostWindow
from worker.models.weights import LayerWeights, Layout, TopWeights


class _Slot:
    def __init__(self, memory: HostWindow) -> None:
        self.memory = memory
        #: The layer in it, or on its way.
        self.layer: int | None = None
        self.views: LayerWeights | None = None
        self.filling = False


class Window:
    """`Frozen`; see the module. layouts: of each layer, plain. returned: called with the numbers of slots that are
    unmapped. Thread-safe."""

    def __init__(self, layouts: Sequence[Layout], top: Layout, returned: Callable[[list[int]], None]) -> None:
        self._layouts, self._top_layout, self._returned = layouts, top, returned
        self._slots: dict[int, _Slot] = {}
        self._top: TopWeights | None = None
        #: The layer that is used now, and the direction.
        self._at, self._forward = 0, True
        self._users = [0] * len(layouts)
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
            self._at, self._forward = layer, forward
            self._changed.notify_all()

    def acquire(self, layer: int) -> LayerWeights:
        """See `Frozen.acquire`."""
        with self._changed:
            self._users[layer] += 1
            try:
                self._wait_until(lambda: self._here(layer) is not None)
            except BaseException:
                self._users[layer] -= 1
                raise
            weights = self._here(layer)
            assert weights is not None
            return weights

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
            self._slots[slot] = _Slot(memory)
            self._changed.notify_all()

    def revoke(self, count: int) -> None:
        """Give back so many slots, as soon as no unit uses them."""
        with self._changed:
            self._revoked += count
            self._changed.notify_all()

    def end(self, error: BaseException) -> None:
        """Whoever waits gets this error."""
        with self._changed:
            self._ended = error
            self._changed.notify_all()

    def validate(self) -> None:
        """Raises AssertionError when an invariant does not hold."""
        with self._changed:
            layers = self._layers()
            assert len(set(layers)) == len(layers), "a layer is in two slots"
            assert min(self._users, default=0) >= 0

    # ---- its thread --------------------------------------------------------------------------------------------
    def _fill(self) -> None:
        while (job := self._wait_for_job()) is not None:
            slot, layer = job
            try:
                views = self._layouts[layer].views_at(slot.memory.address, torch.device("cpu"))
                self._layouts[layer].pack_into(views)
            except BaseException as error:
                self.end(error)
                return
            with self._changed:
                slot.views, slot.filling = LayerWeights(**views), False
                self._changed.notify_all()

    def _wait_for_job(self) -> tuple[_Slot, int] | None:
        """The next slot to fill, and its layer; None at the end. Gives slots back meanwhile."""
        with self._changed:
            while self._ended is None:
                self._give_back()
                if (job := self._next()) is not None:
                    slot, layer = job
                    slot.layer, slot.views, slot.filling = layer, None, True
                    return job
                self._changed.wait()
            return None

    def _give_back(self) -> None:
        """Unmap slots that are wanted back and that nobody uses."""
        gone = self._leaving()[: self._revoked]
        for number in gone:
            self._slots.pop(number).memory.close()
        self._revoked -= len(gone)
        if gone:
            self._returned(gone)
            self._changed.notify_all()

    def _next(self) -> tuple[_Slot, int] | None:
        """The slot to fill now, and its layer."""
        if self._revoked:
            return None
        wanted = coming(self._layers(), self._at, self._forward, len(self._layouts), len(self._slots))
        leaves = self._leaving()
        if not wanted or not leaves:
            return None
        order, slot = order_of_use(self._at, self._forward, len(self._layouts)), self._slots[leaves[0]]
        return (slot, wanted[0]) if _rank(slot.layer, order) > _rank(wanted[0], order) else None

    def _leaving(self) -> list[int]:
        """Slots that nobody uses: empty ones, then those whose layer is used latest."""
        order = order_of_use(self._at, self._forward, len(self._layouts))
        idle = [number for number, slot in self._slots.items() if not self._used(slot)]
        return sorted(idle, key=lambda number: -_rank(self._slots[number].layer, order))

    def _layers(self) -> list[int]:
        return [slot.layer for slot in self._slots.values() if slot.layer is not None]

    def _used(self, slot: _Slot) -> bool:
        return slot.filling or (slot.layer is not None and self._users[slot.layer] > 0)

    def _here(self, layer: int) -> LayerWeights | None:
        return next((slot.views for slot in self._slots.values() if slot.layer == layer and slot.views), None)

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            if self._ended is not None:
                raise self._ended if isinstance(self._ended, Stopped) else RuntimeError(str(self._ended))
            self._changed.wait()


def _rank(layer: int | None, order: Sequence[int]) -> int:
    """Place of a layer in the order of use; of none, after all."""
    return len(order) if layer is None else order.index(layer)
