"""Tombstones in the blob tier, and which node has confirmed which of them.

A tombstone is an object that is never changed. Each node has one object that lists the tombstones it has confirmed. A
tombstone is deleted when every node has confirmed it: no node holds anything of the ended lives any more.

A node that left the fleet for good has an object that says so. Nobody waits for it; if it comes back, it must forget
what it holds before it removes that object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from contracts.errors import PieceLost
from contracts.ids import SessionKey
from kvstore.core.tombstone import Tombstone
from kvstore.tiers.cluster_keys import ClusterKeys
from kvstore.tiers.manifests import (
    CONFIRMED_PREFIX,
    ERASED_PREFIX,
    GONE_PREFIX,
    confirmed_path,
    decode_confirmed,
    decode_gone,
    decode_tombstone,
    encode_confirmed,
    encode_gone,
    encode_tombstone,
    gone_path,
    object_name,
    tombstone_folder,
    tombstone_path,
)
from kvstore.tiers.objects import Objects
from kvstore.tiers.remembered import Remembered

#: Most tombstones kept from one listing to the next. Others are read again each time.
_REMEMBERED = 100_000
#: Errors for an object that is listed but deleted meanwhile, or damaged.
_GONE = (FileNotFoundError, PieceLost)


class Listing(NamedTuple):
    """Tombstones by path. complete: the listing has all of them."""

    by_path: dict[str, Tombstone]
    complete: bool


def confirmed_by_all(
    paths: Iterable[str],
    confirmed: Mapping[str, frozenset[str]],
    nodes: Iterable[str],
    gone: Collection[str] = (),
) -> list[str]:
    """Those of `paths` that every node has confirmed: the deployment's `nodes`, and every node that ever confirmed
    anything and is not `gone`, because it may come back with its data. confirmed, gone: from `list_confirmed` and
    `list_gone`."""
    expected = {object_name(node) for node in nodes} | (confirmed.keys() - set(gone))
    said = [confirmed.get(node, frozenset()) for node in expected]
    return [path for path in paths if all(path.rpartition("/")[2] in names for names in said)]


class TombstoneTier:
    """See the module. A failure is a value, as in blob.py."""

    def __init__(self, objects: Objects, keys: ClusterKeys) -> None:
        self._objects = objects
        self._keys = keys
        self._read = Remembered(objects, partial(decode_tombstone, keys), _REMEMBERED)
        self._confirmed = Remembered(objects, partial(decode_confirmed, keys), _REMEMBERED)
        self._gone = Remembered(objects, partial(decode_gone, keys), _REMEMBERED)

    async def put(self, tombstone: Tombstone) -> bool:
        """Store the tombstone, beside others of the session."""
        data = encode_tombstone(self._keys, tombstone)
        return await self._objects.put("tombstone", tombstone_path(tombstone.session, data), data)

    async def has(self, tombstone: Tombstone) -> bool:
        """Whether exactly this tombstone is stored."""
        return bool(await self._objects.has(tombstone_path(tombstone.session, encode_tombstone(self._keys, tombstone))))

    async def find(self, session: SessionKey) -> list[Tombstone] | None:
        """The session's tombstones; None when the store does not answer."""
        try:
            names = [name async for page in self._objects.names(tombstone_folder(session) + "/") for name in page]
            read = await asyncio.gather(*(self._one(name) for name in names))
        except Exception:
            return None
        return [t for t in read if t is not None and t.session == session]

    async def _one(self, path: str) -> Tombstone | None:
        """The tombstone; None when it was deleted meanwhile or is damaged."""
        try:
            async with self._objects.looks:
                return decode_tombstone(self._keys, path, await self._objects.get(path))
        except _GONE:
            return None

    async def list_all(self) -> Listing:
        """All tombstones; those read before are not read again. Skips damaged ones and those deleted meanwhile."""
        found: dict[str, Tombstone] = {}
        self._read.begin()
        try:
            async for page in self._objects.listed(ERASED_PREFIX + "/"):
                read = dict(zip((item.path for item in page), await self._read.read(page), strict=True))
                found.update({path: t for path, t in read.items() if isinstance(t, Tombstone)})
                if any(isinstance(t, BaseException) and not isinstance(t, _GONE) for t in read.values()):
                    return Listing(found, complete=False)
        except Exception:
            return Listing(found, complete=False)
        self._read.complete()
        return Listing(found, complete=True)

    async def delete(self, path: str) -> None:
        """Delete the tombstone that every node has confirmed."""
        await self._objects.forget(path)

    async def put_confirmed(self, node: str, paths: Iterable[str]) -> bool:
        """Store which tombstones the node has confirmed, replacing its earlier list."""
        names = (path.rpartition("/")[2] for path in paths)
        return await self._objects.put("tombstone", confirmed_path(node), encode_confirmed(self._keys, node, names))

    async def put_gone(self, node: str) -> bool:
        """Note that the node has left for good."""
        return await self._objects.put("tombstone", gone_path(node), encode_gone(self._keys, node))

    async def is_gone(self, node: str) -> bool | None:
        """Whether the node has left for good; None when the store does not answer."""
        gone = await self.list_gone()
        return None if gone is None else object_name(node) in gone

    async def back(self, node: str) -> bool:
        """The node is back, and has forgotten what it held. Whether that is noted."""
        await self._objects.delete(gone_path(node))
        return await self.is_gone(node) is False

    async def list_gone(self) -> frozenset[str] | None:
        """The object names of nodes that have left for good. None when the store does not answer."""
        found: set[str] = set()
        self._gone.begin()
        try:
            async for page in self._objects.listed(GONE_PREFIX + "/"):
                read = dict(zip((item.path for item in page), await self._gone.read(page), strict=True))
                found.update(path.rpartition("/")[2] for path, node in read.items() if isinstance(node, str))
                if any(isinstance(node, BaseException) and not isinstance(node, _GONE) for node in read.values()):
                    return None
        except Exception:
            return None
        self._gone.complete()
        return frozenset(found)

    async def list_confirmed(self) -> dict[str, frozenset[str]] | None:
        """By node's object name, the last parts of the paths of the tombstones it has confirmed. None when the store
        does not answer."""
        found: dict[str, frozenset[str]] = {}
        self._confirmed.begin()
        try:
            async for page in self._objects.listed(CONFIRMED_PREFIX + "/"):
                read = dict(zip((item.path for item in page), await self._confirmed.read(page), strict=True))
                # An unreadable list confirms nothing.
                found |= {
                    path.rpartition("/")[2]: c if isinstance(c, frozenset) else frozenset() for path, c in read.items()
                }
        except Exception:
            return None
        self._confirmed.complete()
        return found
