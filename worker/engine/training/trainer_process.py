"""A trainer's process, as its worker sees it: starts and ends it, grants memory and takes it back.

Granules that were granted belong to the trainer until it says that it has unmapped them, or has ended. So no granule is
ever written by two owners.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from runtime import niceness, telemetry
from worker.core.granules import Owner
from worker.harvest import wire
from worker.harvest.words import Word, Words
from worker.memory import exports
from worker.memory.device_memory import DeviceMemory

log = telemetry.logger("worker.engine.training")

_COMMAND = [sys.executable, "-m", "worker.harvest.process"]
#: A trainer that does not read its messages for so long is ended, in seconds.
_SEND_S = 0.2
#: Wait for granules that are wanted back; then the trainer is ended. A unit takes 10 ms at most, but its processors may
#: be busy with something else.
RETURN_S = 0.25


class TrainerProcess:
    """See the module. Used on the device's thread. woken: called when it has said something, on another thread."""

    def __init__(
        self, begin: wire.Begin, memory: DeviceMemory, owner: Owner, log_file: Path, woken: Callable[[], object]
    ) -> None:
        """Starts it. Raises OSError."""
        self._memory, self._owner, self._woken = memory, owner, woken
        self.words = Words()
        #: What it said and nobody has looked at yet; None: it has ended.
        self._said: queue.SimpleQueue[wire.Message | None] = queue.SimpleQueue()
        #: Granules by slot; -1: of the weights outside the layers.
        self._slots: dict[int, list[int]] = {}
        #: Granules that stand for its own memory.
        self._own: list[int] = []
        self._next_slot = 0
        #: Slots that it was asked for and has not returned.
        self._revoked = 0
        self.ended = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, log_file.open("ab") as stderr:
            self._process = subprocess.Popen(
                [*_COMMAND, *map(str, (theirs.fileno(), self.words.fd, niceness.TRAINER))],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                pass_fds=(theirs.fileno(), self.words.fd),
                env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
        self._to = ours
        self._to.settimeout(_SEND_S)
        self._from = ours.dup()
        self._from.settimeout(None)
        threading.Thread(target=self._listen, name="trainer", daemon=True).start()
        self._send(begin)

    # ---- what it says ------------------------------------------------------------------------------------------
    def take(self) -> list[wire.Message]:
        """What it has said since the last call. Returned slots are booked."""
        said = list[wire.Message]()
        while not self._said.empty():
            if (message := self._book(self._said.get())) is not None:
                said.append(message)
        return said

    def _book(self, message: wire.Message | None) -> wire.Message | None:
        if message is None:
            self.end()
        elif isinstance(message, wire.Returned):
            for slot in () if self.ended else message.slots:
                self._memory.give(self._slots.pop(slot), keep=True)
                self._revoked -= 1
            return None
        return message

    def _listen(self) -> None:
        try:
            while True:
                self._said.put(wire.receive(self._from))
                self._woken()
        except (OSError, ValueError, KeyError, TypeError) as error:
            if not isinstance(error, ConnectionError):
                log.error("a trainer's message cannot be read", error=repr(error))
            self._from.close()
            self._said.put(None)
            self._woken()

    # ---- memory ------------------------------------------------------------------------------------------------
    @property
    def slots(self) -> int:
        """Layers' slots that it has and was not asked for."""
        return sum(slot >= 0 for slot in self._slots) - self._revoked

    def hold_own(self, granules: int) -> None:
        """Count so many granules for its own memory. Raises OutOfGranules."""
        if granules > len(self._own):
            self._own += self._memory.take(granules - len(self._own), self._owner)
        else:
            self._memory.give(self._own[granules:], keep=True)
            del self._own[granules:]

    def grant_top(self, granules: int) -> None:
        """Grant memory for the weights outside the layers. Raises OutOfGranules."""
        self._grant(-1, self._memory.take(granules, self._owner))

    def grant(self, granules: int) -> None:
        """Grant a layer's slot. Raises OutOfGranules."""
        self._grant(self._next_slot, self._memory.take(granules, self._owner))
        self._next_slot += 1

    def _grant(self, slot: int, granules: Sequence[int]) -> None:
        self._slots[slot] = list(granules)
        self._send(wire.Grant(slot))
        if self.ended:
            return
        exported = self._memory.export(granules)
        with contextlib.closing(exported):
            self._trying(lambda: exports.send(self._to, exported))

    def revoke(self, count: int) -> None:
        """Ask for so many slots; `settle` waits for them."""
        if count > 0:
            self._revoked += count
            self._send(wire.Revoke(count))

    @property
    def owes(self) -> bool:
        """Whether it was asked for slots that it has not returned."""
        return self._revoked > 0

    def settle(self, keep: Callable[[wire.Message], None]) -> None:
        """Wait until it has returned what it was asked for; end it if that takes long. keep: gets what else it says."""
        until = time.monotonic() + RETURN_S
        while self._revoked > 0 and not self.ended:
            try:
                message = self._book(self._said.get(timeout=max(until - time.monotonic(), 0)))
            except queue.Empty:
                log.warning("a trainer did not return memory in time; it is ended, and resumes from its checkpoint")
                self.end()
                return
            if message is not None:
                keep(message)

    # ---- its processors and its end ----------------------------------------------------------------------------
    def let(self, lanes: int, cores: Sequence[int] | None = None) -> None:
        """Let so many lanes compute from their next unit on, on these processors (None: as before)."""
        if self.ended:
            return
        before = self.words[Word.LANES]
        self.words[Word.LANES] = lanes
        if cores:
            self._pin(cores)
        if lanes > before:
            self._send(wire.Wake())

    def _pin(self, cores: Sequence[int]) -> None:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{self._process.pid}/task"):
                with contextlib.suppress(OSError, ValueError):
                    os.sched_setaffinity(int(thread), cores)

    def stop(self) -> None:
        """Ask it to end after a checkpoint."""
        if self.ended:
            return
        self.words[Word.STOP] = 1
        self._send(wire.Wake())

    def end(self) -> None:
        """Kill it, if it lives, and take back all memory. Idempotent."""
        if self.ended:
            return
        self.ended = True
        with contextlib.suppress(OSError):
            self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._to.shutdown(socket.SHUT_RDWR)  # ends the thread that listens
        self._to.close()
        self.words.close()
        for granules in (*self._slots.values(), self._own):
            self._memory.give(granules, keep=True)
        self._slots.clear()
        self._own = []
        self._revoked = 0

    def _send(self, message: wire.Message) -> None:
        self._trying(lambda: wire.send(self._to, message))

    def _trying(self, send: Callable[[], None]) -> None:
        """Send; a trainer that does not read is ended."""
        if self.ended:
            return
        try:
            send()
        except TimeoutError:
            log.warning("a trainer does not read its messages; it is ended, and resumes from its checkpoint")
            self.end()
        except OSError:
            pass  # it has ended: `take` says so
