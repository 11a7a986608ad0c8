"""Reads all sessions' manifests a page at a time, so that memory and blocking time stay bounded however many there
are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from contracts.kv import Manifest
from kvstore.core import events as ev
from kvstore.host import StoreHost
from kvstore.metrics import completed, log
from kvstore.tiers.blob import ManifestsUnread


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
