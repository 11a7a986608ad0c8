"""What the SSD holds is not served until it is known what was erased while this node was down.

A node that had left the fleet for good, by its own work or because it was given up as lost, holds what nobody has
waited for it to erase. It forgets that before it serves; one that runs all the while ends, to be started again.
"""

from __future__ import annotations

import asyncio
import contextlib

from contracts.errors import UpbeatError
from kvstore.core import events as ev
from kvstore.host import StoreHost
from kvstore.metrics import log
from kvstore.tiers.ssd_recovery import Recovery
from kvstore.tiers.tombstones import Listing
from runtime.collector import collecting_nothing

#: Tombstones heeded at a time; anything else may happen in between.
_PART = 500


class DeclaredLost(UpbeatError):
    """An operator gave this node up as lost, and it runs."""


class Heeding:
    """See the module."""

    def __init__(self, node: StoreHost, *, alone: bool) -> None:
        """alone: the node's own journal has every erasure, so that it may serve before tombstones were read."""
        self._node = node
        self._heeded, self._belongs = alone, False
        #: The node leaves for good: it says so itself.
        self.leaves = False
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
        found = list(listing.by_path.values())
        last = max(0, len(found) - 1) // _PART * _PART
        for start in range(0, last, _PART):
            node.handle(ev.TombstonesListed(found[start : start + _PART], node.clock.now()))
            await asyncio.sleep(0)
        node.handle(ev.TombstonesListed(found[last:], node.clock.now(), listing.complete, found[:last]))
        if listing.complete:
            async with self._returning:
                await self._check()
            await self._serve()
        return listing

    async def _check(self) -> None:
        """Learn whether the node had left for good, and act on it."""
        node = self._node
        gone = None if self.leaves else await node.blob.tombstones.is_gone(node.name)
        if gone is None:
            return
        if gone and self._belongs:
            node.fail(DeclaredLost(f"{node.name} was declared lost (`upbeat leave --lost`), and it runs"))
            return
        if gone and not self._heeded:
            if self._found is None:
                return  # the SSD cannot be read yet
            await self._forget(self._found)
        self._belongs = not gone or await node.blob.tombstones.back(node.name)
        self._heeded = self._heeded or self._belongs

    async def _forget(self, found: Recovery) -> None:
        node = self._node
        log.warning("this node had left the fleet: what its SSD holds is deleted, not served", chunks=found.chunks)
        await node.write_back.on_thread(lambda: _delete(node, found))
        self._found = Recovery()

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
