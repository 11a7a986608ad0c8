"""What a trainer asks of the process around it: when a unit may compute, and where the frozen weights are now.

Decides nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

from worker.models.weights import LayerWeights, TopWeights


class Stopped(Exception):
    """The job must end. The optimizer's step that was under way is lost; everything before is kept."""


class Gate(Protocol):
    """Lets units compute. A lane is a thread of the trainer, by number from 0. Each lane calls from its own thread;
    lane 0 also from that of the job, for data, checkpoints and merging, when no lane computes."""

    def enter(self, lane: int) -> None:
        """Before each unit; blocks while the lane must pause. A lane that waits here holds no weights and nothing that
        another lane needs. Raises Stopped when the job must end."""
        ...

    def leave(self, lane: int, seconds: float) -> None:
        """After each `enter` that returned. seconds: how long the unit computed; 0: there was nothing to do."""
        ...


class Frozen(Protocol):
    """The base model's weights, unpacked (`worker.models.weights.layer_parts`), of which a window is in memory.

    Tensors begin at multiples of 64 bytes, so that results do not depend on where they lie. Any thread.
    """

    def next(self, layer: int, forward: bool) -> None:
        """Layer `layer` is used from now on, then those above it (forward) or below it. After the last layer forward
        comes the last layer backward, after the first layer backward the first layer forward."""
        ...

    def acquire(self, layer: int) -> LayerWeights:
        """The weights of a layer, valid until `release`. Called within the gate, once a unit; may block until the layer
        is in the window. Raises Stopped when the job must end."""
        ...

    def release(self, layer: int) -> None:
        """The unit has ended; the layer may leave."""
        ...

    def top(self) -> TopWeights:
        """Embedding, last norm and head, which never leave."""
        ...


class OpenGate:
    """A gate that is always open."""

    def enter(self, lane: int) -> None:
        """Returns at once."""

    def leave(self, lane: int, seconds: float) -> None:
        """Does nothing."""


OPEN = OpenGate()


@contextlib.contextmanager
def within(gate: Gate) -> Iterator[None]:
    """One unit of work outside of training, on lane 0."""
    gate.enter(0)
    began = time.perf_counter()
    try:
        yield
    finally:
        gate.leave(0, time.perf_counter() - began)
