"""Memory of a device's trainer: gives it what it needs beside a reserve for serving, fits its window of frozen layers
to what is free, and takes back what serving has taken (`worker.core.loan`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from runtime import telemetry
from worker.core.balloon import Balloon
from worker.core.granules import OutOfGranules
from worker.core.window import LEAST_LAYERS, reserve_bytes, window_layers
from worker.engine.training.trainer_process import RETURN_S, TrainerProcess
from worker.harvest import wire
from worker.memory.device_memory import DeviceMemory

log = telemetry.logger("worker.engine.training.trainer_memory")


class TrainerMemory:
    """See the module. decoding_bytes: KV that a step of the largest batch adds. On the device's thread."""

    def __init__(self, memory: DeviceMemory, balloon: Balloon, decoding_bytes: int) -> None:
        self._memory, self._balloon, self._decoding_bytes = memory, balloon, decoding_bytes
        #: Whether the trainer has the memory that it needs.
        self.supplied = False
        #: Granules that stand for its own memory.
        self._own = 0

    @property
    def reserve(self) -> int:
        """Granules that are kept for serving: what steps need while a layer leaves, and a slab of each model."""
        slabs = sum(share.slab_granules for share in self._balloon.shares)
        return self._granules(reserve_bytes(RETURN_S, 1, self._decoding_bytes)) + slabs

    @property
    def window(self) -> int:
        """Frozen layers that may be in memory."""
        return self._balloon.loan.layers

    def never(self, needs: wire.Needs) -> str:
        """Why such a trainer never fits beside the models; empty: it does, if caches and sequences leave room."""
        wanted, mib = self._wanted(needs), self._memory.granule_bytes / 2**20
        most = self._balloon.granules - sum(share.weights for share in self._balloon.shares) - self.reserve
        if wanted <= most:
            return ""
        return (
            f"it needs {wanted * mib:.0f} MiB of the device, which has {most * mib:.0f} beside the weights; train with "
            "a smaller batch_size, max_tokens or rank, or raise kv.hbm_gib"
        )

    def supply(self, trainer: TrainerProcess, needs: wire.Needs, now: float, make_way: Callable[[], None]) -> bool:
        """Give it what it needs, of what is free beside the reserve, and of caches. False: requests need it."""
        balloon, loan = self._balloon, self._balloon.loan
        wanted = self._wanted(needs) + self.reserve
        if balloon.waiting or balloon.obtainable < wanted or not balloon.collect(wanted, now):
            return False
        layer, top, self._own = (self._granules(b) for b in (needs.layer_bytes, needs.top_bytes, needs.own_bytes))
        loan.fixed, loan.layer, loan.layers = top + self._own, layer, min(LEAST_LAYERS, needs.layers)
        make_way()
        try:
            trainer.hold_own(self._own)
            trainer.grant_top(top)
            for _ in range(loan.layers):
                trainer.grant(layer)
        except OutOfGranules:
            log.exception("no memory for a trainer that was counted")
            trainer.end()
            return False
        self.supplied = True
        log.info("a trainer has its memory", granules=loan.held)
        return True

    def reconcile(self, trainer: TrainerProcess) -> bool:
        """Ask back what serving has taken. False: it has taken everything; the trainer has ended."""
        if not self.supplied:
            return True
        if not self._balloon.loan.held:
            trainer.end()
            self.supplied = False
            return False
        trainer.revoke(trainer.slots - self._balloon.loan.layers)
        return True

    def resize(self, trainer: TrainerProcess, layers: int, make_way: Callable[[], None]) -> None:
        """Fit the window, of `layers` at most, to the free memory. It grows a layer at a time."""
        balloon, loan = self._balloon, self._balloon.loan
        fit = window_layers(balloon.spare + loan.layers * loan.layer, self.reserve, loan.layer, layers)
        if fit < loan.layers:
            loan.give((loan.layers - fit) * loan.layer)
            trainer.revoke(trainer.slots - loan.layers)
        elif fit > loan.layers and not trainer.owes:
            loan.layers += 1
            make_way()
            try:
                trainer.grant(loan.layer)
            except OutOfGranules:
                loan.layers -= 1

    def count(self, trainer: TrainerProcess, bytes_: int) -> bool:
        """It has so much memory of its own; more than it said is counted too. False: serving needs that, and the
        trainer has ended."""
        own = self._granules(bytes_)
        if not self.supplied or own <= self._own:
            return True
        more = own - self._own
        log.warning("a trainer takes more memory than it said", granules=more)
        if self._balloon.spare < more:
            self._balloon.loan.end()
            return self.reconcile(trainer)
        self._balloon.loan.fixed += more
        self._own = own
        with contextlib.suppress(OutOfGranules):
            trainer.hold_own(own)
        return True

    def clear(self) -> None:
        """The trainer has ended."""
        self._balloon.loan.clear()
        self.supplied = False

    def _wanted(self, needs: wire.Needs) -> int:
        fixed = self._granules(needs.top_bytes) + self._granules(needs.own_bytes)
        return fixed + min(LEAST_LAYERS, needs.layers) * self._granules(needs.layer_bytes)

    def _granules(self, bytes_: int) -> int:
        return -(-bytes_ // self._memory.granule_bytes)
