"""Watched sessions: one task per session polls its cache for all watchers, and ends with the last of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

from contracts.convert import session_to_wire
from contracts.errors import RequestError
from contracts.ids import SessionKey
from contracts.v1 import scheduler_pb2 as pb
from gateway.core.watching import LookSchedule, Picture, TierContents, joined
from gateway.fleet import Fleet
from runtime import telemetry
from runtime.clock import Clock

log = telemetry.logger("gateway.watching")
#: Streams at a time: of this process, and of one tenant.
MAX_STREAMS, MAX_TENANT_STREAMS = 256, 32
#: Without changes, a heartbeat is sent this often, so that a closed stream is noticed, in seconds.
BEAT_S = 10.0
#: Seconds to wait after a failed look.
_PAUSE_S = 1.0


class _Watched:
    """One session: its latest picture, and an event that is set and replaced at each change."""

    def __init__(self) -> None:
        self.picture: Picture | None = None
        self.changed = asyncio.Event()
        self.watchers = 0
        self.task: asyncio.Task[None] | None = None


class Watches:
    """All watched sessions. Invariant: a session has a task while it has watchers."""

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self._fleet, self._clock = fleet, clock
        self._watched: dict[SessionKey, _Watched] = {}
        self._streams: Counter[str] = Counter()

    @property
    def sessions(self) -> int:
        """Number of watched sessions."""
        return len(self._watched)

    def is_full(self, tenant: str) -> bool:
        """Whether this tenant may begin no further stream."""
        return self._streams.total() >= MAX_STREAMS or self._streams[tenant] >= MAX_TENANT_STREAMS

    @contextlib.asynccontextmanager
    async def pictures(self, session: SessionKey) -> AsyncGenerator[AsyncGenerator[Picture | None]]:
        """The session's pictures as they change, always the newest, beginning with the current one; None: a heartbeat.

        Do not call when `is_full`.
        """
        watched = self._watched.get(session)
        if watched is None:
            watched = self._watched[session] = _Watched()
            watched.task = asyncio.create_task(self._look_on(session, watched))
        watched.watchers += 1
        self._streams[session.tenant] += 1
        try:
            yield self._changes(watched)
        finally:
            watched.watchers -= 1
            self._streams[session.tenant] -= 1
            if not watched.watchers:
                del self._watched[session]
                assert watched.task is not None
                watched.task.cancel()

    async def _changes(self, watched: _Watched) -> AsyncGenerator[Picture | None]:
        shown: Picture | None = None
        while True:
            changed = watched.changed
            if watched.picture is not None and watched.picture != shown:
                shown = watched.picture
                yield shown
                continue
            try:
                async with asyncio.timeout(BEAT_S):
                    await changed.wait()
            except TimeoutError:
                yield None

    async def _look_on(self, session: SessionKey, watched: _Watched) -> None:
        pace, before, silent = LookSchedule(), Picture(), False
        while True:
            thorough = pace.thorough(self._clock.now())
            try:
                seen = joined(before, await self._look(session, thorough), thorough=thorough)
            except RequestError as e:
                if not silent:
                    log.info("a watched session is not seen", session=str(session), reason=e.message)
                silent = True
                await self._clock.sleep(_PAUSE_S)
                continue
            silent, now = False, self._clock.now()
            pace.looked(now, before, seen, thorough=thorough)
            if watched.picture is None or seen != before:
                watched.picture = before = seen
                changed, watched.changed = watched.changed, asyncio.Event()
                changed.set()
            await self._clock.sleep(pace.rest_s(now))

    async def _look(self, session: SessionKey, thorough: bool) -> Picture:
        wanted = pb.GetSessionRequest(session=session_to_wire(session), local=not thorough)
        return picture_from_wire(await self._fleet.call("GetSession", wanted, session=session))


def picture_from_wire(reply: Any) -> Picture:
    """The domain value of a `SessionInfo`. If several nodes report the blob tier, the largest report counts."""
    nodes = {
        n.node: {t.tier: TierContents(tuple(t.layer_chunks), t.tokens, t.bytes) for t in n.tiers} for n in reply.nodes
    }
    blobs = [tiers.pop("blob") for tiers in nodes.values() if "blob" in tiers]
    said = reply.summary
    return Picture(
        known=reply.known,
        model=said.model,
        tokens=said.tokens,
        hint_node=said.node,
        nodes=nodes,
        blob=max(blobs, key=lambda t: t.size_bytes, default=None),
    )
