"""State of a model on a node; the numbers are those of the proto's `ModelState`."""

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
