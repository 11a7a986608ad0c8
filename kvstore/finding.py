"""Where a session's chunks are on this node, and its manifest. Changes only what is known of the blob tier."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from contracts.ids import SessionKey
from contracts.kv import Manifest
from kvstore.core import events as ev
from kvstore.core.residency import Residency
from kvstore.host import StoreHost
from kvstore.tiers.blob import PATIENT_S

#: Most manifests read for hints at a time.
_AT_ONCE = 16


class HintedManifests:
    """Reads manifests of hinted sessions, and the keys of those that exist: a made-up name costs one read."""

    def __init__(self, node: StoreHost) -> None:
        self._node = node
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def fetch(self, session: SessionKey) -> None:
        """Give the core the session's manifest, or None."""
        blob = self._node.blob
        async with self._turns:
            if (manifest := await blob.get_manifest(session)) is not None:
                await blob.session_keys.learn(session)
        self._node.handle(ev.ManifestFetched(session, manifest, self._node.clock.now()))


async def manifest_of(node: StoreHost, session: SessionKey, *, local: bool = False) -> Manifest | None:
    """The session's manifest from memory, else (unless `local`) from the blob tier. None if its life has ended."""
    found = node.store.index.manifests.get(session) or (None if local else await node.blob.get_manifest(session))
    return found if found is None or not node.store.erasure.void(found) else None


async def residency(node: StoreHost, manifest: Manifest, *, local: bool = False) -> Iterator[tuple[str, Residency]]:
    """What DRAM, SSD and blob hold of the session. Asks the blob tier about unknown chunks, unless `local`."""
    index = node.store.index
    if not local:
        unknown = tuple(k for k in manifest.keys if (c := index.chunks.get(k)) is None or c.blob.name == "ABSENT")
        asked = unknown if node.store.meter.admits(ev.TierChannel.BLOB_READ) else ()
        found, failed = await node.blob.locate_many(asked, manifest.fingerprint, PATIENT_S, waited_for=False)
        node.handle(ev.Probed(("", ""), asked, found, node.clock.now(), failed))
    return ((tier, index.residency(manifest.keys, tier)) for tier in ("dram", "ssd", "blob"))
