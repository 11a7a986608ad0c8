"""Erasing a session on this node, and looking whether it is gone: from the worker's HBM, the arena, the SSD and the blob tier.

What is still in use, or in a tier that does not answer, is waited for and deleted again, at growing intervals. The first
answer comes when nothing is left or when `ANSWER_S` have passed; if something was left then, another one comes when it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from contracts.ids import SessionKey
from kvstore.core import events as ev
from kvstore.failpoints import reach
from kvstore.metrics import count, log
from kvstore.node import Node

#: How long a first answer may take, and for how long an erasure is repeated.
ANSWER_S, _PATIENCE_S = 8.0, 1800.0
_LIST_S = 3.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What an erasure came to. left: chunks by tier that are, or may be, still there."""

    session: SessionKey
    known: bool
    left: dict[str, int]

    @property
    def verified(self) -> bool:
        """Every tier was looked at, and nothing is there."""
        return not any(self.left.values())


async def erase(node: Node, session: SessionKey) -> AsyncIterator[Answer]:
    """Erase it, after learning which other sessions exist by now, so that shared chunks stay. One answer, or two: see the module."""
    begun, pause, answered = node.clock.now(), _FIRST_PAUSE_S, False
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LIST_S):
            await node.learn_sessions()
    told = await node.blob.get_tombstone(session)
    known = session in node.store.index.manifests or session in node.store.index.claims
    reach("erase.before")
    node.handle(ev.SessionErased(session, node.clock.now(), node.clock.wall(), told))
    reach("erase.queued")
    tombstone = node.store.erasure.tombstones[session]
    while True:
        left = await look(node, tombstone)
        answer = Answer(session, known, left)
        late = node.clock.now() - begun > ANSWER_S
        if answer.verified or (late and not answered):
            answered = True
            yield answer
        if answer.verified or node.clock.now() - begun > _PATIENCE_S:
            break
        await node.clock.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
        if left["blob"] and pause > 1.0:
            node.write_back.erase_again(tombstone, [key for key in tombstone.keys if key not in node.store.index.names])
    if not answer.verified:
        count("erasures_unfinished")
        log.warning("an erased session is still somewhere", session=str(session), left=answer.left)


async def look(node: Node, tombstone: ev.Tombstone) -> dict[str, int]:
    """How many of its chunks each tier has or may have; chunks that a session names by now are not its any more."""
    index = node.store.index
    keys = [key for key in tombstone.keys if key not in index.names]
    left = {"hbm": 0} | node.store.erasure.left(keys)
    if keys:
        files = await asyncio.to_thread(lambda: sum(node.ssd.path(key, tombstone.fingerprint).exists() for key in keys))
        left["ssd"] = max(left["ssd"], files)
    if not left["blob"]:
        left["blob"] = sum(await asyncio.gather(*(node.blob.has_chunk(key, tombstone.fingerprint) for key in keys)))
    if tombstone.session not in index.manifests and await node.blob.has_manifest(tombstone.session):
        left["blob"] += 1
    asked = [w.hbm(tombstone.fingerprint, keys) for w in node.workers.values() if keys and tombstone.fingerprint in w.fingerprints]
    for hbm in await asyncio.gather(*asked):
        left["hbm"] += len(keys) if hbm is None else max(hbm.layer_chunks, default=0)
    return left
