"""What a store does about its blob tier when nobody asks: learns its sessions, pays what it owes it, and lets idle sessions expire."""

from __future__ import annotations

from kvstore.core import events as ev
from kvstore.metrics import count, log
from kvstore.node import Node
from runtime.service import Tasks

_CHUNKS_LIMIT = 2_000_000
_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S = 600.0, 1.0


async def learn(node: Node, tasks: Tasks) -> None:
    """At start, and when the blob tier is back after it was away: which sessions the SSD's chunks belong to, and which of the
    chunks the blob tier still lacks."""
    node.blob_is_back = lambda: tasks.start(_learn(node), "learn")
    await _learn(node)


async def _learn(node: Node) -> None:
    listing = await node.learn_sessions()
    log.info("sessions listed", sessions=len(listing.manifests), complete=listing.complete)
    for fingerprint in list(node.store.index.shapes):
        keys = await node.blob.list_chunks(fingerprint, _CHUNKS_LIMIT)
        if keys is not None:
            node.handle(ev.BlobListed(fingerprint, keys, node.clock.now()))


async def expire(node: Node, idle_s: float) -> None:
    """For ever: sessions that nobody has used for `idle_s` are erased. Every node does so; erasing twice does no harm."""
    while True:
        await node.clock.sleep(max(_SHORTEST_PAUSE_S, min(_LONGEST_PAUSE_S, idle_s / 4)))
        for manifest in (await node.learn_sessions()).manifests:
            if manifest.last_use_s < node.clock.wall() - idle_s:
                count("sessions_expired")
                node.handle(ev.SessionErased(manifest.session, node.clock.now()))
