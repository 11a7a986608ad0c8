"""A trainer on a simulated GPU: units of one layer and one example, forward and then backward, and copies of the frozen
layers that its window lacks (`worker.core.window`). Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loadtest.simulate.contention import TrainWork
from worker.core.window import Window

#: Units of the head, an example each; a unit's time is then about that of a layer.
_HEAD_PARTS = 4


@dataclass(slots=True)
class Unit:
    """A unit. layer: -1 for the head. left: part that is not done. part: of the GPU that it has; it keeps it to its
    end. begun: whether it has any."""

    layer: int
    forward: bool
    flops: float
    left: float = 1.0
    part: float = 0.0

    @property
    def begun(self) -> bool:
        """Whether it computes."""
        return self.part > 0


class Training:
    """See the module. window: its frozen layers; None: all are in memory. copy_s: of a layer."""

    def __init__(self, work: TrainWork, window: Window | None, copy_s: float) -> None:
        self.work, self.window, self.copy_s = work, window, copy_s
        self._units = self._all()
        #: The next unit, or the one under way.
        self.unit = next(self._units)
        #: Seconds until the copy under way is complete.
        self.copy_left_s = 0.0
        self.done_flops = 0.0
        self.copies = 0
        self._moved()

    def _all(self) -> Iterator[Unit]:
        work, layers = self.work, range(self.work.shape.layers)
        head = work.head_flops / _HEAD_PARTS
        while True:
            for layer in layers:
                yield from (Unit(layer, True, work.unit_flops(True)) for _ in range(work.examples))
            yield from (Unit(-1, False, head) for _ in range(work.examples * _HEAD_PARTS))
            for layer in reversed(layers):
                yield from (Unit(layer, False, work.unit_flops(False)) for _ in range(work.examples))

    @property
    def tokens(self) -> float:
        """Trained so far, parts of examples included."""
        return self.done_flops / self.work.example_flops * self.work.rows

    @property
    def waits(self) -> bool:
        """Whether the next unit's layer is not here."""
        return not self.unit.begun and self.unit.layer >= 0 and self.window is not None and not self.window.ready

    @property
    def copying(self) -> bool:
        """Whether a layer is on its way."""
        return self.window is not None and self.window.coming is not None

    def begin(self, part: float) -> None:
        """The next unit gets this part of the GPU."""
        self.unit.part = part

    def computed(self, part_of_unit: float) -> None:
        """So much of the unit under way is done; at its end the next one follows."""
        self.unit.left -= part_of_unit
        self.done_flops += part_of_unit * self.unit.flops

    def ended(self) -> None:
        """The unit under way is over."""
        self.done_flops += self.unit.left * self.unit.flops
        self.unit = next(self._units)
        self._moved()

    def copied(self, seconds: float) -> None:
        """The copy under way went on for so long."""
        self.copy_left_s -= seconds
        if self.copying and self.copy_left_s <= 1e-12:
            assert self.window is not None
            self.window.came()
            self.copies += 1
            self._copy()

    def resize(self, free: int, needed: int) -> None:
        """Inference has changed what it holds: granules free, and kept for it."""
        if self.window is not None:
            self.window.resize(free, needed)
            self._copy()

    def _moved(self) -> None:
        if self.window is not None and self.unit.layer >= 0:
            self.window.compute(self.unit.layer, self.unit.forward)
            self._copy()

    def _copy(self) -> None:
        if self.window is not None and self.window.coming is None and self.window.copy_next()[1] is not None:
            self.copy_left_s = self.copy_s
