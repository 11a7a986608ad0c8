"""State of a model on a node, and how requests reach it; the numbers are those of the proto's `ModelState` and
`ModelWire`."""

from __future__ import annotations

from enum import IntEnum


class ModelState(IntEnum):
    """UNKNOWN: not reported; for a model that a worker reports it means ACTIVE. COLD: weights are not on the device."""

    UNKNOWN = 0
    COLD = 1
    LOADING = 2
    ACTIVE = 3
    DRAINING = 4

    @property
    def word(self) -> str:
        """The name as shown to users and in JSON."""
        return self.name.lower()


def state_of(number: int) -> ModelState:
    """The state that a worker reported. Unknown numbers count as COLD, so that the model gets no work."""
    try:
        return ModelState(number) or ModelState.ACTIVE
    except ValueError:
        return ModelState.COLD


class ModelWire(IntEnum):
    """How requests reach a model's engine. FRAMES: token frames, which another node can continue. HTTP: the engine's
    own HTTP, passed through unchanged."""

    FRAMES = 0
    HTTP = 1


def wire_of(number: int) -> ModelWire:
    """The wire that a scheduler told of; FRAMES for an unknown number, which no scheduler of this version tells."""
    try:
        return ModelWire(number)
    except ValueError:
        return ModelWire.FRAMES
