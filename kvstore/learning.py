"""Reads all sessions' manifests a page at a time, so that memory and blocking time stay bounded however many there
are. `SharedListings` bounds how often that is done for callers that anybody may cause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contracts.kv import Manifest
from kvstore.core import events as ev
from kvstore.host import StoreHost
from kvstore.metrics import completed, log
from kvstore.tiers.blob import ManifestsUnread
from runtime.service import Tasks


async def learn_sessions(node: StoreHost, look: Callable[[Sequence[Manifest]], object] = lambda page: None) -> bool:
    """Read all manifests of the blob tier; newer ones replace known ones. Returns whether the list was complete.

    look: called with each page, after the core has it.
    """
    sessions, complete = 0, True
    try:
        async for page in node.blob.manifests():
            sessions += len(page)
            node.handle(ev.ManifestsListed(page, node.clock.now(), False, node.clock.wall()))
            look(page)
            await asyncio.sleep(0)
    except ManifestsUnread as e:
        complete = False
        log.warning("the list of sessions is not complete; nothing is deleted for lack of use or name", error=str(e))
    except OSError as e:
        complete = False
        node.handle(ev.TierFailed(ev.TierChannel.BLOB_READ, str(e), node.clock.now()))
    node.handle(ev.ManifestsListed([], node.clock.now(), complete, node.clock.wall()))
    log.info("sessions listed", sessions=sessions, complete=complete)
    if complete:
        completed("sessions", node.clock.wall())
    return complete


@dataclass(eq=False)
class _Listing:
    """waiting: how many callers want it."""

    task: asyncio.Task[None]
    waiting: int = 0


class SharedListings:
    """Lists sessions for many callers, one listing at a time.

    An erasure deletes the chunks that no other session names, so it must know each manifest that was written before the
    erasure was ordered. A listing that began before that may have passed the place of a manifest written since. So
    callers share the next listing, never the one that runs. Invariant: at most one runs and at most one waits for it.
    """

    def __init__(self, node: StoreHost, tasks: Tasks) -> None:
        self._node, self._tasks = node, tasks
        self._running = asyncio.Lock()
        self._next: _Listing | None = None  #: has not begun; callers join it

    async def learn(self) -> None:
        """Wait for a listing that begins after this call. It is cancelled when nobody waits for it any more."""
        if self._next is None:
            self._next = _Listing(self._tasks.start(self._run(), "list-sessions"))
        listing = self._next
        listing.waiting += 1
        try:
            await asyncio.shield(listing.task)
        finally:
            listing.waiting -= 1
            if not listing.waiting:
                listing.task.cancel()
                if self._next is listing:
                    self._next = None

    async def _run(self) -> None:
        async with self._running:
            self._next = None
            await learn_sessions(self._node)
