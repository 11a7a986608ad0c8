"""Keeps a few granules warm, so that KV that grows, and weights that come, find memory that is allocated (Prism,
section 5.2, pre-allocation).

The paper has a thread for it. Here the device's thread does it while no engine has work: a fresh granule costs
processor time, of which only idle time is free on a CPU device (docs/design/0035 has the numbers).
"""

from __future__ import annotations

from contracts.errors import UpbeatError
from runtime import telemetry
from worker.memory.device_memory import DeviceMemory

#: Bytes that are kept warm: KV of a prompt of 512 tokens of an 8B model.
AHEAD_BYTES = 64 << 20

log = telemetry.logger("worker.memory.preparing")


class Preparing:
    """Prepares memory of `memory`. Invariant: it makes no granule warm while `ahead` granules are. Called on the
    device's thread only."""

    def __init__(self, memory: DeviceMemory, ahead_bytes: int = AHEAD_BYTES) -> None:
        """ahead_bytes: rounded down to whole granules."""
        self._memory = memory
        self.ahead = ahead_bytes // memory.granule_bytes
        self._refused = False

    def turn(self) -> bool:
        """Prepare one granule, if one is wanted; whether it did. Where the system has no memory it does not try again:
        it is then allocated when it is needed, or not at all."""
        if self._refused or self._memory.ledger.warm >= self.ahead:
            return False
        try:
            return self._memory.prepare()
        except (OSError, UpbeatError) as error:
            log.warning("no memory is prepared any more", error=str(error))
            self._refused = True
            return False
