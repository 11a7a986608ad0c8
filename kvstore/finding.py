"""Where a session's chunks are on this node, for whoever asks. Reads; changes nothing but what is known of the blob tier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from contracts.ids import SessionKey
from contracts.kv import Manifest
from kvstore.core import events as ev
from kvstore.core.index import Residency
from kvstore.tiers.blob import PATIENT_S

if TYPE_CHECKING:
    from kvstore.node import Node


async def manifest_of(node: Node, session: SessionKey, *, local: bool = False) -> Manifest | None:
    """The session's manifest from memory, else (unless `local`) from the blob tier; none of a life that an erasure ended."""
    found = node.store.index.manifests.get(session) or (None if local else await node.blob.get_manifest(session))
    return found if found is None or not node.store.erasure.void(found) else None


async def residency(node: Node, manifest: Manifest, *, local: bool = False) -> Iterator[tuple[str, Residency]]:
    """What DRAM, SSD and blob hold of the session, the blob tier asked where this node does not know (unless `local`)."""
    index = node.store.index
    if not local:
        unknown = tuple(k for k in manifest.keys if (c := index.chunks.get(k)) is None or c.blob.name == "ABSENT")
        asked = unknown if node.store.meter.admits(ev.Tier.BLOB_READ) else ()
        found, failed = await node.blob.locate_many(asked, manifest.fingerprint, PATIENT_S, waited_for=False)
        node.handle(ev.Probed(("", ""), asked, found, node.clock.now(), failed))
    return ((tier, index.residency(manifest.keys, tier)) for tier in ("dram", "ssd", "blob"))
