"""Memory that a device's trainer has from the balloon (HARLI, section 4.2): inference takes it back at once.

Frozen layers beyond `LEAST_LAYERS` go before any cached KV, since they only cost the trainer a copy. The rest goes with
the job, which resumes from its checkpoint, before a request would wait or be preempted.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.core.window import LEAST_LAYERS


@dataclass(slots=True)
class Loan:
    """In granules. fixed: of parameters, optimizer, saved inputs and the weights outside the layers. layer: of a frozen
    layer. layers: in the window. The shell carries out what it says (`worker.engine.training`)."""

    fixed: int = 0
    layer: int = 0
    layers: int = 0
    #: Times that serving took everything.
    ended: int = 0

    @property
    def held(self) -> int:
        """All of it."""
        return self.fixed + self.layers * self.layer

    @property
    def loose(self) -> int:
        """Of layers beyond the least."""
        return max(self.layers - LEAST_LAYERS, 0) * self.layer

    def give(self, granules: int) -> None:
        """Give up layers beyond the least for up to so many granules."""
        if granules > 0 and self.layer:
            self.layers -= min(-(-granules // self.layer), max(self.layers - LEAST_LAYERS, 0))

    def end(self) -> None:
        """Serving takes everything: the job goes on later."""
        self.ended += bool(self.held)
        self.clear()

    def clear(self) -> None:
        """The trainer has ended."""
        self.fixed = self.layers = 0

    def validate(self) -> None:
        """Raise AssertionError for an impossible loan."""
        assert min(self.fixed, self.layer, self.layers) >= 0 and (self.fixed or not self.layers), f"{self}"
