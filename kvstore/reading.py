"""Reads into the arena, from the SSD, the blob tier and peers. Each is reported to the core when it stalls and when it
has ended.

A read can be cancelled: from the SSD until it begins, from blob until its bytes enter the arena, from a peer as far as
the transport can stop it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial

from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.mailbox import Mailbox
from kvstore.metrics import BYTES_READ
from kvstore.peers import Peers
from kvstore.tiers.blob import BlobTier
from kvstore.tiers.key_names import KeyName
from kvstore.tiers.ssd import SsdTier
from runtime.clock import Clock
from runtime.service import Tasks


class Reading:
    """See the module. report: gives events to the core. failed: called with an error that leaves the core in doubt.
    `peers` is set later."""

    peers: Peers

    def __init__(
        self,
        ssd: SsdTier,
        blob: BlobTier,
        clock: Clock,
        report: Callable[[ev.Event], None],
        failed: Callable[[Exception], None],
        tasks: Tasks,
    ) -> None:
        self._tasks = tasks
        self._ssd = ssd
        self._blob = blob
        self._clock = clock
        self._report = report
        self._ended = Mailbox(failed)
        self._cancels: dict[int, Callable[[], object]] = {}  #: by fetch, while it can be cancelled

    def cancel(self, fetch: int) -> None:
        """End the read early if possible; FetchDone is reported either way."""
        cancel = self._cancels.get(fetch)
        if cancel is not None:
            cancel()

    async def fetch(self, fetch: do.Fetch) -> None:
        """Read from a peer or the blob tier."""
        stall = self._watch(fetch)
        faults: dict[int, ev.Fault] = {}
        sums: dict[int, int] = {}
        try:
            if fetch.kind is ev.SourceKind.BLOB:
                faults = await self._read_blob(fetch, sums)
            else:
                faults = await self.peers.read(fetch, self._given_up(fetch))
        except BaseException:
            stall.cancel()
            raise
        self._fetched(fetch, stall, sums, faults)

    def from_ssd(self, fetch: do.Fetch) -> None:
        """Read from the SSD: without a task, unless a key must be read first, and with one wake-up of the loop for all
        reads that ended together."""
        stall = self._watch(fetch)
        sums: dict[int, int] = {}
        given_up = self._given_up(fetch)
        key_name = partial(self._ssd.encoded.key_name, fetch.pieces[0].key)

        def begin(name: KeyName | None) -> None:
            if name is None or self._blob.session_keys.known(name) is not None:
                read(name)
            else:
                failed = partial(locked, name)
                self._tasks.start(self._with_key(name, partial(read, name), failed), "session-key")

        def locked(name: KeyName, fault: ev.Fault) -> None:
            ended(name, _all(fetch, fault))

        def read(name: KeyName | None) -> None:
            self._ssd.begin_read(
                fetch.shape, fetch.pieces, lambda faults: self._ended.put(partial(ended, name, faults)), sums, given_up
            )

        def ended(name: KeyName | None, faults: dict[int, ev.Fault]) -> None:
            if name is None and ev.Fault.LOCKED in faults.values() and (learnt := key_name()) is not None:
                begin(learnt)  # only now has the header said which key it takes
            else:
                self._fetched(fetch, stall, sums, faults)

        begin(key_name())

    async def _with_key(self, name: KeyName, begin: Callable[[], None], failed: Callable[[ev.Fault], None]) -> None:
        """Begin a read of the SSD once the session's key is known."""
        found = await self._blob.session_keys.find(name)
        if isinstance(found, ev.Fault):
            failed(ev.Fault.LOCKED if found is ev.Fault.UNAVAILABLE else found)
        else:
            begin()

    async def _read_blob(self, fetch: do.Fetch, sums: dict[int, int]) -> dict[int, ev.Fault]:
        """Read, unless cancelled before bytes enter the arena."""

        def entering() -> None:
            self._cancels.pop(fetch.fetch, None)

        work = asyncio.ensure_future(self._blob.read(fetch.shape, fetch.pieces, sums, entering))
        self._cancels[fetch.fetch] = work.cancel
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            work.cancel()
            raise
        return _all(fetch, ev.Fault.CANCELLED) if work.cancelled() else work.result()

    def _given_up(self, fetch: do.Fetch) -> Callable[[], bool]:
        """A function that says whether the fetch was cancelled; thread-safe."""
        event = threading.Event()
        self._cancels[fetch.fetch] = event.set
        return event.is_set

    def _watch(self, fetch: do.Fetch) -> asyncio.TimerHandle:
        """Report FetchStalled when the read takes too long; `_fetched` reports its end."""
        loop = asyncio.get_running_loop()
        return loop.call_later(fetch.give_up_s, lambda: self._report(ev.FetchStalled(fetch.fetch, self._clock.now())))

    def _fetched(
        self, fetch: do.Fetch, stall: asyncio.TimerHandle, sums: dict[int, int], faults: dict[int, ev.Fault]
    ) -> None:
        stall.cancel()
        self._cancels.pop(fetch.fetch, None)
        good = len(fetch.pieces) - len(faults)
        BYTES_READ.labels(fetch.kind.name.lower()).inc(good * fetch.shape.piece_bytes)
        self._report(ev.FetchDone(fetch.fetch, faults, self._clock.now(), sums))


def _all(fetch: do.Fetch, fault: ev.Fault) -> dict[int, ev.Fault]:
    return dict.fromkeys(range(len(fetch.pieces)), fault)
