"""Where a session's chunks are on this node. Changes nothing except what is known of the blob tier."""

from __future__ import annotations

from collections.abc import Iterator

from contracts.ids import SessionKey
from contracts.kv import Manifest
from kvstore.core import events as ev
from kvstore.core.index import Residency
from kvstore.host import StoreHost
from kvstore.tiers.blob import PATIENT_S


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
