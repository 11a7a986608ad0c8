"""Handshakes that fail. gRPC tells nobody of them: it only asks for the server's certificate at the start of each. So a
handshake without a call of its connection soon after counts as refused: a caller without a certificate, with another
fleet's, or none that speaks TLS."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from itertools import count

from prometheus_client import Counter

from runtime import telemetry

log = telemetry.logger("runtime.handshakes")
_REFUSED = Counter(
    "upbeat_handshakes_refused_total",
    "Connections to internal ports on which no certificate of the fleet led to a call",
    registry=telemetry.REGISTRY,
)
#: The first call comes with the connection, but this process may be busy.
_WITHIN_S = 10.0
#: Connections that are remembered. An address may come again after so many others.
_KNOWN = 4096
#: The log tells of them at most this often.
_LOG_S = 60.0


class Handshakes:
    """Of one server. `begun` may be called from any thread, the rest by the loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ids = count()
        self._waiting: dict[int, None] = {}
        self._known: OrderedDict[str, None] = OrderedDict()

    def begun(self) -> None:
        """Somebody connected."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wait)

    def called(self, peer: str) -> None:
        """A call by a certificate of the fleet, from an address such as ipv4:10.0.0.1:50000."""
        if peer in self._known:
            self._known.move_to_end(peer)
            return
        self._known[peer] = None
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        if self._waiting:  # whose it was does not matter to the count
            del self._waiting[next(iter(self._waiting))]

    def _wait(self) -> None:
        number = next(self._ids)
        self._waiting[number] = None
        self._loop.call_later(_WITHIN_S, self._look, number)

    def _look(self, number: int) -> None:
        if number not in self._waiting:
            return
        del self._waiting[number]
        refused()


class _Log:
    """What is not said yet. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unsaid, self._said_s = 0, float("-inf")

    def add(self) -> None:
        with self._lock:
            self._unsaid += 1
            if (now_s := time.monotonic()) - self._said_s < _LOG_S:
                return
            self._said_s = now_s
            unsaid, self._unsaid = self._unsaid, 0
        log.warning("connections without a certificate of this fleet", count=unsaid)


_log = _Log()


def refused() -> None:
    """Counts one connection, and logs it with others. From any thread."""
    _REFUSED.inc()
    _log.add()
