"""Reading which sessions there are, a page at a time: however many there are, a page is what is in memory and what the loop waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from contracts.kv import Manifest
from kvstore.core import events as ev
from kvstore.metrics import log

if TYPE_CHECKING:
    from kvstore.node import Node


async def learn_sessions(node: Node, look: Callable[[Sequence[Manifest]], object] = lambda page: None) -> bool:
    """Read all manifests of the blob tier; newer ones replace what is known. Whether these were all.

    look: is shown each page, after the core was.
    """
    sessions, complete = 0, True
    try:
        async for page in node.blob.manifests():
            sessions += len(page)
            node.handle(ev.ManifestsListed(page, node.clock.now(), False, node.clock.wall()))
            look(page)
            await asyncio.sleep(0)
    except OSError as e:
        complete = False
        node.handle(ev.TierFailed(ev.Tier.BLOB_READ, str(e), node.clock.now()))
    node.handle(ev.ManifestsListed([], node.clock.now(), complete, node.clock.wall()))
    log.info("sessions listed", sessions=sessions, complete=complete)
    return complete
