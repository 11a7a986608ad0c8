"""The store's background work on its tiers: learn sessions and erasures, write what blob lacks, expire idle sessions,
delete orphans.

Sessions and chunks are deleted for lack of use or name only after a complete list of sessions, which is read in pages,
so memory stays bounded; what did not change comes from the catalogue (tiers/catalogue.py). Every node does all of it:
deleting twice does no harm, and the grace time protects chunks of other nodes' running turns.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Container, Sequence
from functools import partial
from pathlib import Path

from contracts.ids import SessionKey
from contracts.kv import Manifest
from kvstore.core import events as ev
from kvstore.core.named import MOST, Named
from kvstore.learning import learn_sessions
from kvstore.metrics import completed, count, log
from kvstore.node import StoreNode
from kvstore.tiers.manifests import object_name
from kvstore.tiers.owner import OwnerUnknown
from kvstore.tiers.staged import remove_staged
from kvstore.tiers.tombstones import Listing as Tombstones
from kvstore.tiers.tombstones import confirmed_by_all
from runtime.service import Tasks
from storelink import fleet

#: Most seconds by which nodes' wall clocks are assumed to differ.
_CLOCKS_DIFFER_S = 7200.0
_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S = 600.0, 1.0
#: A store that has run for so long serves, in seconds.
_STARTS_S = 60.0
#: Least seconds between measurements of the blob tier.
_MEASURE_S = 600.0
#: Pauses are this many times longer than the work before them took, at least.
_SHARE = 20.0
#: Most idle sessions watched in memory at a time, most chunks of one event, and most manifests looked at in one go.
_WATCHED, _CHUNKS_AT_ONCE, _LOOKED_AT_ONCE = 100_000, 1000, 5000
#: Expiry waits while more deletions than this wait for the blob tier.
_MOST_PENDING, _PENDING_PAUSE_S = 1000, 0.05
#: Numbers in the catalogue: of the next sweep, and of names that the last one found.
_SWEEP, _NAMES = "sweep", "names"


async def check_owner(node: StoreNode, own_id: str, bucket: str) -> bool:
    """Whether the blob tier belongs to this fleet, once it answers: else nothing of it may be learnt or deleted. Raises
    SecretDiffers when it does not, unless this node serves already. bucket: what it is called in messages."""
    begun_s, pause_s, back = node.clock.now(), _SHORTEST_PAUSE_S, asyncio.Event()
    node.blob_is_back = back.set
    while True:
        try:
            known = await node.blob.owner(own_id)
            break
        except OwnerUnknown as e:
            back.clear()
            node.handle(ev.TierFailed(e.tier, str(e), node.clock.now()))
        waited = [asyncio.ensure_future(node.clock.sleep(pause_s)), asyncio.ensure_future(back.wait())]
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waited:
                one.cancel()
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    if known == own_id:
        return True
    differs = fleet.difference(own_id, bucket, known)
    if node.clock.now() - begun_s < _STARTS_S:
        raise fleet.SecretDiffers(f"{differs}, or give another kv.blob_url")
    log.error("the blob tier belongs to another fleet", reason=differs)
    return False


async def learn(node: StoreNode, tasks: Tasks, directory: Path | None) -> None:
    """At the start, and when the blob tier is back: learn which sessions the SSD's chunks belong to, and which chunks
    blob lacks. directory: the blob tier's, if it is one."""
    learning = asyncio.Lock()

    async def once() -> None:
        if not learning.locked():  # the one that runs sees the tier come back, or fails and is followed by another
            async with learning:
                await _learn(node)

    node.blob_is_back = lambda: tasks.start(once(), "learn")
    await once()
    await _remove_staged(node, directory)


async def _remove_staged(node: StoreNode, directory: Path | None) -> None:
    if directory is not None:
        count("staged_files_removed", await asyncio.to_thread(remove_staged, directory, node.clock.wall()))


async def _learn(node: StoreNode) -> None:
    await node.heed_tombstones()
    await learn_sessions(node)
    await confirm(node, await node.heed_tombstones())
    await learn_lacking(node)


async def learn_lacking(node: StoreNode) -> bool:
    """Learn which chunks the blob tier lacks, so that they are written there. Whether it has answered for all
    models."""
    complete = True
    for fingerprint in list(node.store.index.shapes):
        try:
            async for keys in node.blob.list_chunks(fingerprint):
                node.handle(ev.BlobListed(fingerprint, keys, node.clock.now(), complete=False))
                await asyncio.sleep(0)
            node.handle(ev.BlobListed(fingerprint, (), node.clock.now()))
        except Exception:  # its health is judged elsewhere
            complete = False
    return complete


async def confirm(node: StoreNode, tombstones: Tombstones) -> None:
    """Confirm erasures of which this node holds nothing any more, and delete the tombstones that every node has
    confirmed."""
    tier = node.blob.tombstones
    if not await note_gone(node):
        return
    confirmed = await tier.list_confirmed() if tombstones.complete and (tombstones.by_path or node.confirms) else None
    gone = await tier.list_gone() if confirmed is not None else None
    if confirmed is None or gone is None:
        return
    erased = [path for path, t in tombstones.by_path.items() if await node.erasing.is_gone(t.session)]
    said = confirmed.get(object_name(node.name))
    names = frozenset(path.rpartition("/")[2] for path in erased)
    if names != said:  # also its first list, which may be empty: from then on others wait for it
        if not await node.erasing.note_floor() or not await tier.put_confirmed(node.name, erased):
            return
        confirmed[object_name(node.name)] = names
    node.confirms = bool(names)
    everywhere = confirmed_by_all(tombstones.by_path, confirmed, node.members.deployment, gone)
    if everywhere:
        await asyncio.gather(*(tier.delete(path) for path in everywhere))
        count("tombstones_removed", len(everywhere))


async def note_gone(node: StoreNode) -> bool:
    """Note in the blob tier which nodes have left for good. Whether that is done."""
    for name in sorted(node.members.gone):
        if not await node.blob.tombstones.put_gone(name):
            return False
        node.members.gone.discard(name)
    return True


class Unchanged:
    """How long manifests of idle sessions have been unchanged, by this process's monotonic clock; of at most `most`
    sessions."""

    def __init__(self, most: int = _WATCHED) -> None:
        self._most = most
        self._before: dict[SessionKey, tuple[float, float]] = {}
        self._since: dict[SessionKey, tuple[float, float]] = {}

    def begin(self) -> None:
        """A listing begins. Sessions that it lacks are forgotten at the next one."""
        self._before, self._since = self._since, {}

    def note(self, manifest: Manifest, now: float) -> None:
        """The listing has this manifest."""
        session, used = manifest.session, manifest.last_use_s
        before = self._before.get(session, (used, now))
        if session in self._before or len(self._since) < self._most:
            self._since[session] = (used, before[1] if before[0] == used else now)

    def seconds(self, session: SessionKey, now: float) -> float:
        """Seconds that the session has been unchanged."""
        return now - self._since[session][1]

    def longer_than(self, seconds: float, now: float) -> list[SessionKey]:
        """Sessions unchanged for at least `seconds`."""
        return [session for session in self._since if self.seconds(session, now) >= seconds]


async def measure(node: StoreNode) -> None:
    """Forever: measure how much the blob tier holds, so that a full one erases sessions. Ends when it has no limit."""
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
        await node.clock.sleep(max(_MEASURE_S if sized else _SHORTEST_PAUSE_S, _SHARE * (node.clock.now() - began)))


async def expire(node: StoreNode, idle_s: float) -> None:
    """Forever: erase sessions unused for `idle_s`."""
    unchanged, took_s = Unchanged(), 0.0
    while True:
        pause_s = max(_SHORTEST_PAUSE_S, min(_LONGEST_PAUSE_S, idle_s / 4), _SHARE * took_s)
        await node.clock.sleep(pause_s)
        began = node.clock.now()
        await expire_once(node, idle_s, unchanged)
        took_s = node.clock.now() - began


async def expire_once(node: StoreNode, idle_s: float, unchanged: Unchanged) -> int:
    """One round; returns the number of expired sessions. None when the list of sessions is incomplete, because one that
    another node uses may look idle here.

    A session whose manifest another node's expiry has deleted is known from memory and leaves this node's tiers too.
    Clock differences: a `last_use_s` in the future only delays expiry, and one in the past counts only when the
    manifest was also unchanged for a while as seen from here.
    """
    await node.heed_tombstones()
    limit, unchanged_s = node.clock.wall() - idle_s, min(idle_s, _CLOCKS_DIFFER_S)
    named = Named()

    def look(page: Sequence[Manifest]) -> None:
        named.add([key for m in page if m.last_use_s >= limit for key in m.keys])

    if not await learn_sessions(node, look):
        return 0
    expired, last = 0, None
    expire = partial(_expire, node, limit=limit, named=named)
    while page := await node.catalogue.idle(limit, unchanged_s, last):
        gone = [row for row in page if await expire(row.session)]
        await node.catalogue.forget(gone)
        expired, last = expired + len(gone), page[-1]
        while node.write_back.pending > _MOST_PENDING:
            await node.clock.sleep(_PENDING_PAUSE_S)
    unchanged.begin()
    now, known = node.clock.now(), list(node.store.index.manifests.values())
    for start in range(0, len(known), _LOOKED_AT_ONCE):
        for manifest in known[start : start + _LOOKED_AT_ONCE]:
            if manifest.last_use_s < limit:
                unchanged.note(manifest, now)
        await asyncio.sleep(0)
    for session in unchanged.longer_than(unchanged_s, now):
        expired += await expire(session)
    if expired:
        count("sessions_expired", expired)
    completed("expiry", node.clock.wall())
    return expired


async def _expire(node: StoreNode, session: SessionKey, limit: float, named: Container[bytes]) -> bool:
    """Erase the session unless it was used meanwhile, here or on another node. named: chunks of sessions in use."""
    found = await node.blob.find_manifest(session)
    if isinstance(found, Manifest):
        node.handle(ev.ManifestFetched(session, found, node.clock.now()))
    elif found is not ev.Fault.MISSING:
        return False
    manifest = node.store.index.manifests.get(session)
    if manifest is None or manifest.last_use_s >= limit:
        return False
    node.handle(ev.SessionErased(session, node.clock.now(), expired=True, kept=named))
    return True


async def sweep(node: StoreNode, grace_s: float, directory: Path | None) -> None:
    """Forever: delete orphans from the SSD and the blob tier, and files left by killed writes. directory: as in
    `learn`."""
    took_s = 0.0
    while True:
        await node.clock.sleep(max(_SHORTEST_PAUSE_S, grace_s, _SHARE * took_s))
        began = node.clock.now()
        await sweep_once(node, grace_s)
        await _remove_staged(node, directory)
        took_s = node.clock.now() - began


async def sweep_once(node: StoreNode, grace_s: float) -> None:
    """One round: delete chunks that were also orphans in the last round; in blob only those older than the grace
    time. With more names than `Named` has room for, two rounds look at one share of blob's chunks and the next two at
    another; the catalogue keeps the place."""
    began, names = node.clock.wall(), 0
    number, shares = await node.catalogue.number(_SWEEP), 1 + await node.catalogue.number(_NAMES) // MOST
    named, sessions, session_keys = Named(number // 2 % shares, shares), Named(), node.blob.session_keys

    def look(page: Sequence[Manifest]) -> None:
        nonlocal names
        names += sum(len(m.keys) for m in page)
        named.add([key for m in page if m.session not in node.store.index.manifests for key in m.keys])
        sessions.add(session_keys.tags([m.session for m in page]))

    tombstones = await node.heed_tombstones()
    await confirm(node, tombstones)
    if not await learn_sessions(node, look):
        log.warning("not all sessions could be listed; orphans are kept for now")
        return
    node.handle(ev.OrphansSought(node.clock.now()))
    try:
        async for fingerprint, keys in node.blob.old_chunks(began - grace_s):
            for start in range(0, len(keys), _CHUNKS_AT_ONCE):
                node.handle(
                    ev.OldChunksListed(fingerprint, keys[start : start + _CHUNKS_AT_ONCE], node.clock.now(), named)
                )
                await asyncio.sleep(0)
        sessions.add(session_keys.tags([*node.store.index.manifests, *node.store.index.claims]))
        count("session_keys_removed", await session_keys.sweep(sessions, began - grace_s))
        count("older_objects_removed", await node.older.sweep(began))
    except Exception as e:
        log.warning("not all of the blob tier's chunks could be listed", error=repr(e))
        return
    await node.catalogue.note_number(_SWEEP, number + 1)
    await node.catalogue.note_number(_NAMES, names)
    completed("orphans", node.clock.wall())
