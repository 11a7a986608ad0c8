"""What a model on a node is doing, by the numbers of the proto's `ModelState`."""

from __future__ import annotations

from enum import IntEnum


class ModelState(IntEnum):
    """UNKNOWN: nobody has said; of a model that a worker names it means ACTIVE. COLD: its weights are not on the device."""

    UNKNOWN = 0
    COLD = 1
    LOADING = 2
    ACTIVE = 3
    DRAINING = 4

    @property
    def word(self) -> str:
        """For people and for JSON."""
        return self.name.lower()


def state_of(number: int) -> ModelState:
    """The state that a worker said; one that this version does not know takes no work."""
    try:
        return ModelState(number) or ModelState.ACTIVE
    except ValueError:
        return ModelState.COLD
