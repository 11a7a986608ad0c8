"""A model's layers that share slots: each is copied into its slot before a step uses it (MIRAGE, section 5.2).

Of the layers in circulation, the one of rank i has slot i mod `slots`, so its address is constant. When a layer has
been computed, the copy of the next layer of its slot begins. A thread copies, a layer at a time, from the image in host
memory; a step waits for a layer that is not there yet. A layer that comes back to its own place is copied in the same
way. Memory that layers give up stays allocated.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from runtime import telemetry
from worker.core.lending import circulating
from worker.models.filling import Copy, FillFailed
from worker.models.image import HostImage
from worker.models.load import Model
from worker.models.weights import LayerWeights

log = telemetry.logger("worker.models.circulating")
#: Slots that a model may have.
MOST_SLOTS = 2
#: The place of a layer that is not in circulation.
_OWN = -1

#: mark(): a point in the device's queued work; the result waits until that work has run.
Mark = Callable[[], Callable[[], object]]


def _done() -> None:
    """No work is to wait for."""


def no_mark() -> Callable[[], object]:
    """A `Mark` of a device whose work is done when a step calls `computed`."""
    return _done


class Circulation:
    """See the module. `change` and `leave`: on the thread that runs steps, between two steps.

    Invariants: a slot holds one layer of its ring, or that layer is on its way; only that layer of the ring is `ready`.
    """

    def __init__(self, model: Model, image: HostImage, copy: Copy, mark: Mark = no_mark) -> None:
        """The layers are of one size (`same_size`). copy: see `Filling`. Reserves addresses; takes no memory yet."""
        self._model, self._image, self._copy, self._mark = model, image, copy, mark
        self._layers = model.spans[1:]
        first = self._layers[0]
        self._memory, self._size = first.memory, first.span.granules
        self._slots = self._memory.reserve(MOST_SLOTS * first.span.bytes, first.span.owner)
        #: Where each layer is read, and whether it is there.
        self._place = [_OWN] * len(self._layers)
        self._ready = [True] * len(self._layers)
        #: Of each slot: its layers in their order, and the one that is there or comes.
        self._rings: list[list[int]] = []
        self._holds: list[int] = []
        #: Slots that have granules which are not mapped yet.
        self._unshown: set[int] = set()
        #: Layers' weights by place, made once.
        self._made: dict[tuple[int, int], LayerWeights] = {}
        #: Layers to copy, and what waits for the work that still reads their places.
        self._wanted: collections.deque[tuple[int, Callable[[], object]]] = collections.deque()
        self._more = threading.Condition()
        self._copying = False
        self._failed: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        #: Copies made, their seconds, and the seconds that steps have waited for them.
        self.copies, self.copying_s, self.waited_s = 0, 0.0, 0.0

    # ---- between two steps -------------------------------------------------------------------------------------
    def change(self, lent: int, slots: int) -> None:
        """Lend the memory of `lent` layers, with so many slots; 0 and 0: none. What this frees is given to the device
        warm, what it lacks is taken from there. Raises OutOfGranules, changing nothing."""
        chosen = circulating(len(self._layers), lent, slots)
        places = [_OWN] * len(self._layers)
        for rank, layer in enumerate(chosen):
            places[layer] = rank % slots
        leaving = [layer for layer, place in enumerate(places) if self._place[layer] == _OWN != place]
        returning = [layer for layer, place in enumerate(places) if self._place[layer] != _OWN == place]
        lacking = len(returning) + slots - len(leaving) - len(self._rings)
        held = self._memory.take(max(lacking, 0) * self._size, self._slots.owner)
        with self._still():
            for layer in leaving:
                held += self._layers[layer].give_up()
            held += self._resize(slots, held)
            for layer in returning:
                self._layers[layer].occupy(self._some(held))
            for layer, place in enumerate(places):
                if self._place[layer] != place:
                    self._place[layer], self._ready[layer] = place, False
                    self._model.layers.put(layer, self._weights(layer))
            self._rings = [chosen[slot::slots] for slot in range(slots)]
            for slot, ring in enumerate(self._rings):
                there = self._holds[slot]
                if there not in ring or not self._ready[there]:
                    self._holds[slot] = ring[0]
            for layer in range(len(self._layers)):
                slot = self._place[layer]
                if not self._ready[layer] and (slot == _OWN or self._holds[slot] == layer):
                    self._want(layer, _done)
        self._memory.give(held, keep=True)
        self._model.layers.before_use, self._model.layers.after_use = self._before, self._after
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="circulation", daemon=True)
            self._thread.start()

    def leave(self) -> None:
        """End the copies and give the slots' memory back. Layers in circulation are not loaded then; all layers are to
        be filled in their own places before they are used."""
        with self._still():
            held = self._resize(0, [])
            self._place, self._rings = [_OWN] * len(self._layers), []
            self._ready = [True] * len(self._layers)
        self._memory.give(held, keep=True)
        self._model.layers.before_use = self._model.layers.after_use = lambda layer: None

    def close(self) -> None:
        """End the thread."""
        with self._more:
            self._closed = True
            self._more.notify_all()
        if self._thread is not None:
            self._thread.join()

    @contextlib.contextmanager
    def _still(self) -> Iterator[None]:
        """Within, nothing is copied, and at first nothing is wanted."""
        with self._more:
            self._wanted.clear()
            self._more.wait_for(lambda: not self._copying)
            yield

    def _resize(self, slots: int, held: list[int]) -> list[int]:
        """Have so many slots: new ones take granules of `held`. Returns those of slots that go."""
        had, gone = len(self._rings), list[int]()
        for slot in range(slots, had):
            gone += self._slots.retire(slot * self._size, self._size)
            self._unshown.discard(slot)
        for slot in range(had, slots):
            self._slots.assign(slot * self._size, self._some(held))
            self._unshown.add(slot)
        self._holds = (self._holds + [_OWN] * (slots - had))[:slots]
        return gone

    def _some(self, held: list[int]) -> list[int]:
        """A layer's granules of these, which it removes."""
        some = held[-self._size :]
        del held[-self._size :]
        return some

    def _weights(self, layer: int) -> LayerWeights:
        """The layer's weights in its place."""
        at = layer, self._place[layer]
        if at not in self._made:
            span = self._layers[layer]
            views = span.views if at[1] == _OWN else span.views_at(self._address(layer))
            self._made[at] = LayerWeights(**views)
        return self._made[at]

    def _address(self, layer: int) -> int:
        slot = self._place[layer]
        if slot == _OWN:
            return self._layers[layer].span.address
        return self._slots.address + slot * self._size * self._memory.granule_bytes

    # ---- during a step -----------------------------------------------------------------------------------------
    def _before(self, layer: int) -> None:
        if self._ready[layer]:
            return
        began_s = time.monotonic()
        with self._more:
            slot = self._place[layer]
            if slot != _OWN and self._holds[slot] != layer:  # the step before failed, and did not come so far
                self._ready[self._holds[slot]] = False
                self._holds[slot] = layer
                self._want(layer, _done)
            self._more.wait_for(lambda: self._ready[layer] or self._failed is not None)
        if not self._ready[layer]:
            raise FillFailed(f"layer {layer} was not copied: {self._failed}")
        self.waited_s += time.monotonic() - began_s

    def _after(self, layer: int) -> None:
        slot = self._place[layer]
        if slot == _OWN or len(self._rings[slot]) == 1:
            return
        done = self._mark()
        with self._more:
            ring = self._rings[slot]
            following = ring[(ring.index(layer) + 1) % len(ring)]
            self._ready[layer], self._holds[slot] = False, following
            self._want(following, done)

    # ---- copying -----------------------------------------------------------------------------------------------
    def _want(self, layer: int, done: Callable[[], object]) -> None:
        self._wanted.append((layer, done))
        self._more.notify_all()

    def _is_due(self, layer: int) -> bool:
        slot = self._place[layer]
        return not self._ready[layer] and (slot == _OWN or self._holds[slot] == layer)

    def _run(self) -> None:
        try:
            while (wanted := self._next()) is not None:
                self._bring(*wanted)
        except BaseException as error:
            log.exception("a layer was not copied")
            with self._more:
                self._failed, self._copying = error, False
                self._more.notify_all()

    def _next(self) -> tuple[int, Callable[[], object]] | None:
        """The layer to copy, waited for; None: it is over."""
        with self._more:
            while not self._closed:
                if not self._wanted:
                    self._more.wait()
                elif self._is_due((wanted := self._wanted.popleft())[0]):
                    self._copying = True
                    return wanted
        return None

    def _bring(self, layer: int, done: Callable[[], object]) -> None:
        done()
        began_s = time.monotonic()
        slot, span = self._place[layer], self._layers[layer]
        if slot == _OWN:
            span.span.show(0, self._size)
        elif slot in self._unshown:
            self._slots.show(slot * self._size, self._size)
            self._unshown.discard(slot)
        self._copy(self._address(layer), self._image.addresses[1 + layer], span.packed_bytes)
        with self._more:
            self.copies += 1
            self.copying_s += time.monotonic() - began_s
            self._ready[layer] = slot == _OWN or self._holds[slot] == layer
            self._copying = False
            self._more.notify_all()


def same_size(model: Model) -> bool:
    """Whether all layers have the same tensors, so that they can share slots."""
    return len({(span.packed_bytes, tuple(span.views)) for span in model.spans[1:]}) == 1


def time_of_copy(model: Model, image: HostImage, copy: Copy, times: int = 3) -> float:
    """Seconds of a copy of a layer, the least of some. The model is loaded; no step runs."""
    span, found = model.spans[1], list[float]()
    for _ in range(times):
        began_s = time.monotonic()
        copy(span.span.address, image.addresses[1], span.packed_bytes)
        found.append(time.monotonic() - began_s)
    return min(found)
