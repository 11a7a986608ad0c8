"""Stored responses for the event loop: `store` on a thread where tenants have turns, and what to say when it fails.

A store that cannot be written costs a response its memory, not its answer. One that is damaged is put aside.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from contracts.errors import InvalidRequest, NotFound, Unavailable
from gateway.responses.ids import is_response_id
from gateway.responses.named_sessions import NamedSessions
from gateway.responses.store import RUNNING, Earlier, Readable, Response, Store
from gateway.responses.stored_items import TooLong
from gateway.store_thread import StoreThread
from gateway.translating import NeedsStored, Stored
from runtime import telemetry
from runtime.clock import Clock

log = telemetry.logger("gateway.responses")
SWEEP_S, BEAT_S, LOOK_S = 60.0, 15.0, 0.5
#: Sweeps at a time: what has expired leaves by and by, so that the process goes on saying that it lives.
SWEEPS = 16
#: Response ids whose session is remembered, for hints.
REMEMBERED = 50_000
#: What SQLite says of a damaged database.
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
#: Whose turn the gateway's own work has; no tenant is called so.
_NOBODY = ""
T = TypeVar("T")


class Named(NamedTuple):
    """What a request names of stored responses. session: that it goes on with. pieces: all that they add to it, as
    JSON."""

    stored: Stored
    session: str | None
    pieces: list[bytes]


class Keeper:
    """The stored responses of all tenants, for one process of a gateway."""

    def __init__(self, data: Path, clock: Clock, keep_s: float, limit_bytes: int, share: float, runner: str) -> None:
        """keep_s: 0: nothing is stored. runner: this process's name among those that share the store."""
        self._clock, self._runner = clock, runner
        self.on = keep_s > 0
        self._store = Store(data / "responses", keep_s, limit_bytes, share)
        self._thread = StoreThread()
        self._named = NamedSessions(REMEMBERED)
        #: Background runs of this process.
        self._running: dict[str, asyncio.Task[None]] = {}
        #: Those that it is about to run.
        self._starting: set[str] = set()
        #: By process that shares the store: how often it had said that it lives, at the last sweep.
        self._beats: dict[str, int] = {}
        self._closed = False

    async def _do(self, tenant: str, work: Callable[[], T], *, always: bool = False) -> T:
        """Run it on the store's thread, in the tenant's turn. always: also when many calls of the tenant wait. Raises
        Unavailable when the store cannot be used, RateLimited when too many calls wait."""
        try:
            return await self._thread.run(tenant, lambda: self._whole(work), always=always)
        except (sqlite3.DatabaseError, OSError) as e:
            log.error("stored responses cannot be used", error=str(e))
            raise Unavailable("stored responses cannot be read at the moment; try again") from None

    def _whole(self, work: Callable[[], T]) -> T:
        """Do it; a database that it finds damaged is put aside in the same turn."""
        try:
            return work()
        except sqlite3.DatabaseError as e:
            if e.sqlite_errorcode & 0xFF in _DAMAGED:
                self._store.start_again()
            raise

    async def _own(self, work: Callable[[], T]) -> T:
        """Run the gateway's own work, in a turn of its own."""
        return await self._do(_NOBODY, work, always=True)

    # ---- writing -----------------------------------------------------------------------------------------------
    def note(self, tenant: str, response_id: str, session: str) -> None:
        """A hint may name this response instead of its session."""
        self._named.note(tenant, response_id, session)

    async def put(self, response: Response, *, always: bool = True) -> bool:
        """Store it; False: there is no room for it, or the store cannot be written. always: it was computed; else
        raises RateLimited when too many calls of its tenant wait."""
        try:
            kept = await self._do(response.tenant, lambda: self._store.put(response, self._clock.wall()), always=always)
        except Unavailable:
            return False
        if not kept:
            log.warning("a response is too large to be stored", tenant=response.tenant, bytes=response.bytes_)
        return kept

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete it, and stop it if it runs. Raises NotFound for an unknown one."""
        self._named.drop(tenant, response_id)
        known = is_response_id(response_id) and self.on
        if not known or not await self._do(tenant, lambda: self._store.delete(tenant, response_id)):
            raise _unknown(response_id)
        self._stop(response_id)

    async def forget(self, tenant: str, session: str) -> None:
        """Delete all responses of a session."""
        self._named.forget(tenant, session)
        gone = int(self.on)
        while gone:
            gone = await self._do(tenant, lambda: self._store.forget(tenant, session))

    # ---- reading -----------------------------------------------------------------------------------------------
    async def get(self, tenant: str, response_id: str) -> Readable:
        """A stored response. Raises NotFound for an unknown one."""
        found = None
        if is_response_id(response_id) and self.on:
            found = await self._do(tenant, lambda: self._store.get(tenant, response_id, self._clock.wall()))
        if found is None:
            raise _unknown(response_id)
        return found

    async def input_page(
        self, tenant: str, response_id: str, after: str | None, limit: int, *, latest_first: bool
    ) -> tuple[list[tuple[str, bytes]], bool]:
        """A page of a stored response's input: ids and JSON of items, and whether there are more. Raises NotFound for
        an unknown response, KeyError when `after` is none of its items."""
        found = None
        if is_response_id(response_id) and self.on:
            look = partial(self._store.items.page, tenant, response_id, self._clock.wall(), after, limit)
            found = await self._do(tenant, lambda: look(latest_first=latest_first))
        if found is None:
            raise _unknown(response_id)
        return found

    async def session(self, tenant: str, response_id: str) -> str | None:
        """The session of a response that a hint names, if it is known. Raises RateLimited when too many calls wait."""
        known = self._named.session(tenant, response_id)
        if known is None and self.on:
            with contextlib.suppress(Unavailable):
                known = await self._do(tenant, lambda: self._store.session(tenant, response_id, self._clock.wall()))
        return known

    async def named(self, tenant: str, needs: NeedsStored, most_bytes: int) -> Named:
        """What a request names, at most so many bytes. Raises NotFound for an unknown response, InvalidRequest for one
        that cannot be continued and for too many bytes."""
        try:
            earlier = await self._earlier(tenant, needs.previous, most_bytes) if needs.previous else None
            items: dict[str, bytes] = {}
            left = most_bytes - (len(earlier.items) if earlier is not None else 0)
            if needs.items and self.on:
                parts = self._store.items.named(tenant, needs.items, self._clock.wall(), left)
                while (part := await self._do(tenant, lambda: next(parts, None))) is not None:
                    items |= part
        except TooLong:
            raise InvalidRequest(
                "the conversation, with the stored responses that the request names, is longer than this server reads; "
                "begin a shorter one",
                param="previous_response_id" if needs.previous else "input",
                code="context_length_exceeded",
            ) from None
        pieces = [earlier.items] if earlier is not None else []
        pieces += [items[one] for one in needs.items if one in items]
        # The names are ids of items, so they need no escapes.
        referenced = b",".join(b'"' + name.encode() + b'":' + item for name, item in items.items())
        stored = Stored(pieces[0] if earlier else b"[]", b"{" + referenced + b"}", sum(map(len, pieces)))
        return Named(stored, earlier.session if earlier is not None else None, pieces)

    async def _earlier(self, tenant: str, response_id: str, most_bytes: int) -> Earlier:
        found = None
        if is_response_id(response_id) and self.on:
            found = await self._do(
                tenant, lambda: self._store.earlier(tenant, response_id, self._clock.wall(), most_bytes)
            )
        if found is None:
            raise InvalidRequest(
                f"previous response with id {response_id[:80]!r} not found: it was never stored, it has expired, or it "
                "was deleted; send the conversation in input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        if found.status not in ("completed", "incomplete"):
            raise InvalidRequest(
                f"previous_response_id: {response_id} is {found.status}; name a response that has ended",
                param="previous_response_id",
            )
        if not found.whole:
            raise InvalidRequest(
                f"previous_response_id: an earlier response of the conversation of {response_id} was deleted; send "
                "the conversation in input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found

    # ---- background --------------------------------------------------------------------------------------------
    @property
    def runner(self) -> str:
        """This process's name in the store."""
        return self._runner

    async def run(self, response: Response, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        """Store the response, which says that this process runs it, and have `work` compute it; `cancel` and `delete`,
        of any process, end that. False: it could not be stored. Raises RateLimited as `put` does."""
        self._starting.add(response.id)
        try:
            if not await self.put(response, always=False):
                return False
            task = self._running[response.id] = asyncio.create_task(work())
            task.add_done_callback(lambda _: self._running.pop(response.id, None))
            return True
        finally:
            self._starting.discard(response.id)

    async def settle(self, response: Response) -> None:
        """Store what has become of a response in the background, unless it was cancelled."""
        with contextlib.suppress(Unavailable):
            await self._do(response.tenant, lambda: self._store.settle(response, self._clock.wall()), always=True)

    async def cancel(self, tenant: str, response_id: str) -> Readable:
        """The response, which no longer runs. Raises NotFound, and InvalidRequest for one that was never in the
        background."""
        found = await self.get(tenant, response_id)
        if not found.background:
            raise InvalidRequest(
                "only a response that was created with background can be cancelled", param="response_id"
            )
        if found.status in RUNNING:
            await self._do(tenant, lambda: self._store.cancel(tenant, response_id))
            self._stop(response_id)
            found = await self.get(tenant, response_id)
        return found

    def _stop(self, response_id: str) -> None:
        if (work := self._running.get(response_id)) is not None:
            work.cancel()

    async def watch(self) -> None:
        """Delete what has expired, stop what another process has cancelled, and end what nobody runs any more; for
        ever. Where nothing is stored, delete what was stored before."""
        if not self.on:
            with contextlib.suppress(Unavailable):
                if await self._own(self._store.remove):
                    log.warning("gateway.responses_keep_s is 0: the responses that were stored before are deleted")
        swept_s = beaten_s = -math.inf
        expired = False
        while self.on:
            now = self._clock.now()
            with contextlib.suppress(Unavailable):
                if now - beaten_s >= BEAT_S:
                    beaten_s = now
                    await self._own(lambda: self._store.beat(self._runner))
                if now - swept_s >= SWEEP_S:
                    swept_s, expired = now, True
                    await self._bury()
                if expired:
                    expired = False  # also when it fails
                    expired = await self._sweep()
                await self._compare()
            await asyncio.sleep(LOOK_S)

    async def _sweep(self) -> bool:
        """Delete some of what has expired; whether there may be more."""
        for _ in range(SWEEPS):
            if not await self._own(lambda: self._store.sweep(self._clock.wall())):
                return False
        return True

    async def _compare(self) -> None:
        """Stop what is no longer this process's to run, and end what it does not run: its end could not be stored, or
        an earlier process of this name has died."""
        mine = {*self._running, *self._starting}
        wanted = await self._own(lambda: self._store.running(self._runner))
        for response_id in mine - wanted - self._starting:
            self._stop(response_id)
        lost = wanted - mine - {*self._running, *self._starting}
        if lost:
            await self._own(lambda: self._store.abandon(self._runner, lost))

    async def _bury(self) -> None:
        """End what is run by a process that has not said for a while that it lives. No clock counts: those of several
        processes may differ."""
        beats = await self._own(self._store.beats)
        for runner in [name for name, said in beats.items() if name != self._runner and self._beats.get(name) == said]:
            await self._own(partial(self._store.bury, runner))
        self._beats = beats

    async def close(self) -> None:
        """Stop what runs; it has failed. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        works = list(self._running.values())
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)
        if self.on:
            with contextlib.suppress(Unavailable):
                await self._own(lambda: self._store.bury(self._runner))
        with contextlib.suppress(sqlite3.Error):
            await self._thread.close(self._store.close)


def _unknown(response_id: str) -> NotFound:
    return NotFound(
        f"response with id {response_id[:80]!r} not found: it was never stored, it has expired, or it was deleted",
        param="response_id",
    )
