"""What the SSD holds is not served until it is known what was erased while this node was down."""

from __future__ import annotations

import asyncio
import contextlib

from kvstore.core import events as ev
from kvstore.host import StoreHost
from kvstore.metrics import log
from kvstore.tiers.ssd_recovery import Recovery
from kvstore.tiers.tombstones import Listing
from runtime.collector import collecting_nothing


class Heeding:
    """See the module. heeded: tombstones were read since the start, or need not be."""

    def __init__(self, node: StoreHost, *, heeded: bool) -> None:
        self._node = node
        self._heeded = heeded
        self._found: Recovery | None = None  #: what the SSD holds, while it is not served
        self._returning = asyncio.Lock()

    @property
    def held_back(self) -> Recovery | None:
        """What the SSD holds and is not served yet."""
        return self._found

    async def recovered(self, found: Recovery) -> None:
        """The SSD was read."""
        self._found = found
        await self._serve()

    async def heed(self) -> Listing:
        """Read the tombstones, and apply erasures that this node missed."""
        node = self._node
        listing = await node.blob.tombstones.list_all()
        node.handle(ev.TombstonesListed(list(listing.by_path.values()), node.clock.now(), listing.complete))
        if listing.complete:
            async with self._returning:
                self._heeded = self._heeded or await self._belongs()
            await self._serve()
        return listing

    async def _belongs(self) -> bool:
        """Whether this node is known to belong to the fleet. One that had left for good forgets what is on its SSD
        first: nobody has waited for it with erasures since."""
        node = self._node
        gone = await node.blob.tombstones.is_gone(node.name)
        if not gone:
            return gone is False
        found = self._found
        if found is None:
            return False  # the SSD cannot be read yet
        log.warning("this node had left the fleet: what its SSD holds is deleted, not served", chunks=found.chunks)
        await node.write_back.on_thread(lambda: _delete(node, found))
        self._found = Recovery()
        return await node.blob.tombstones.back(node.name)

    async def _serve(self) -> None:
        """Serve what the SSD holds, once tombstones have been read."""
        node, found = self._node, self._found
        if found is None or not self._heeded:
            return
        self._found = None
        with collecting_nothing():
            node.handle(ev.Recovered(found.copies, found.listed))
        with contextlib.suppress(OSError):
            limit = await node.sizes.ssd_limit_bytes(node.store.index.ssd_stored_bytes)
            node.handle(ev.TierSized("ssd", limit, node.clock.now()))


def _delete(node: StoreHost, found: Recovery) -> None:
    listed = [(key, shape.fingerprint) for shape, keys in found.listed for key in keys]
    for key, fingerprint in [*listed, *((copy.key, copy.shape.fingerprint) for copy in found.copies)]:
        with contextlib.suppress(OSError):
            node.ssd.delete(key, fingerprint)
