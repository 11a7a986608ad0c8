"""What a store does about its tiers when nobody asks: learns its sessions and what was erased, pays the blob tier what it owes it,
lets idle sessions expire, and removes chunks that nobody names.

Whatever deletes for want of a name or a use does so only after a complete list of sessions. Every node does all of it: deleting
twice does no harm, and the grace time keeps the chunks of other nodes' running turns.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from pathlib import Path

from contracts.ids import SessionKey
from contracts.kv import Manifest
from kvstore.core import events as ev
from kvstore.metrics import count, log
from kvstore.node import Node
from kvstore.tiers.staged import remove_staged
from runtime.service import Tasks

_CHUNKS_LIMIT = 2_000_000
#: Nodes' wall clocks are not further apart than this, in seconds.
_CLOCKS_DIFFER_S = 7200.0
_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S = 600.0, 1.0
#: How often the blob tier is measured at most: not so that it does little else.
_MEASURE_S, _MEASURE_SHARE = 600.0, 20.0


async def learn(node: Node, tasks: Tasks, directory: Path | None) -> None:
    """At start, and when the blob tier is back after it was away: which sessions the SSD's chunks belong to, and which of the
    chunks the blob tier still lacks. directory: the blob tier's, where it is one."""
    node.blob_is_back = lambda: tasks.start(_learn(node), "learn")
    await _learn(node)
    await _remove_staged(node, directory)


async def _remove_staged(node: Node, directory: Path | None) -> None:
    if directory is not None:
        count("staged_files_removed", await asyncio.to_thread(remove_staged, directory, node.clock.wall()))


async def _learn(node: Node) -> None:
    await node.heed_tombstones()
    listing = await node.learn_sessions()
    await node.heed_tombstones()
    log.info("sessions listed", sessions=len(listing.manifests), complete=listing.complete)
    for fingerprint in list(node.store.index.shapes):
        keys = await node.blob.list_chunks(fingerprint, _CHUNKS_LIMIT)
        if keys is not None:
            node.handle(ev.BlobListed(fingerprint, keys, node.clock.now()))


class Unchanged:
    """Since when this process has seen each session's manifest as it is, by its own steady clock."""

    def __init__(self) -> None:
        self._since: dict[SessionKey, tuple[float, float]] = {}

    def note(self, manifests: Iterable[Manifest], now: float) -> None:
        """These are all that there are."""
        before = self._since
        self._since = {}
        for m in manifests:
            last_use_s, since = before.get(m.session, (m.last_use_s, now))
            self._since[m.session] = (m.last_use_s, since if last_use_s == m.last_use_s else now)

    def seconds(self, session: SessionKey, now: float) -> float:
        """For how long."""
        return now - self._since[session][1]


async def measure(node: Node) -> None:
    """For ever: how much the blob tier holds, so that a full one lets sessions go. Without a limit it is not asked again."""
    limit, sized = None, False
    while True:
        began = node.clock.now()
        held = await node.blob.stored_bytes()
        if held is not None:
            with contextlib.suppress(OSError):
                limit, sized = (limit if sized else await node.sizes.blob_limit_bytes(held)), True
                node.handle(ev.TierSized("blob", limit, node.clock.now(), held))
                log.info("blob tier", limit_bytes=limit, held_bytes=held)
        if sized and limit is None:
            return
        await node.clock.sleep(max(_MEASURE_S if sized else _SHORTEST_PAUSE_S, _MEASURE_SHARE * (node.clock.now() - began)))


async def expire(node: Node, idle_s: float) -> None:
    """For ever: sessions that nobody has used for `idle_s` are erased."""
    unchanged = Unchanged()
    while True:
        await node.clock.sleep(max(_SHORTEST_PAUSE_S, min(_LONGEST_PAUSE_S, idle_s / 4)))
        await expire_once(node, idle_s, unchanged)


async def expire_once(node: Node, idle_s: float, unchanged: Unchanged) -> int:
    """How many sessions expired; none when the list of sessions is not complete: one that another node uses may look idle here.

    A session whose manifest another node's expiry has deleted already is known from memory, and leaves this node's tiers too. A
    `last_use_s` in the future, of a node whose clock is ahead, only makes a session live longer; and one that seems long ago because
    this node's clock is ahead is believed only when nothing has changed for a while as seen from here.
    """
    await node.heed_tombstones()
    if not (await node.learn_sessions()).complete:
        return 0
    now, limit = node.clock.now(), node.clock.wall() - idle_s
    unchanged.note(node.store.index.manifests.values(), now)
    watched_s = min(idle_s, _CLOCKS_DIFFER_S)
    idle = [
        m.session for m in node.store.index.manifests.values() if m.last_use_s < limit and unchanged.seconds(m.session, now) >= watched_s
    ]
    for session in idle:
        node.handle(ev.SessionErased(session, node.clock.now(), node.clock.wall(), expired=True))
    if idle:
        count("sessions_expired", len(idle))
    return len(idle)


async def sweep(node: Node, grace_s: float, directory: Path | None) -> None:
    """For ever: chunks that nobody has named for the grace time are removed from the SSD and the blob tier, and what writes that were
    killed since the start have left. directory: as in `learn`."""
    while True:
        await node.clock.sleep(max(_SHORTEST_PAUSE_S, grace_s))
        await sweep_once(node, grace_s)
        await _remove_staged(node, directory)


async def sweep_once(node: Node, grace_s: float) -> None:
    """One round. What was nobody's in the last round already leaves the SSD, and the blob tier where it is older than the grace time."""
    began = node.clock.wall()
    await node.heed_tombstones()
    if not (await node.learn_sessions()).complete:
        log.warning("not all sessions could be listed; chunks that nobody names stay for now")
        return
    node.handle(ev.OrphansSought(node.clock.now()))
    try:
        async for fingerprint, keys in node.blob.old_chunks(began - grace_s):
            node.handle(ev.OldChunksListed(fingerprint, keys, node.clock.now()))
    except Exception as e:
        log.warning("not all of the blob tier's chunks could be listed", error=repr(e))
