"""Tombstones in the blob tier, and which node has confirmed which of them.

A tombstone is an object of its own that is never changed. Each node has one object with the tombstones that it has confirmed. A
tombstone is deleted when every node has: nobody has anything of what it ended, and nobody will write it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from contracts.errors import PieceLost
from contracts.ids import SessionKey
from kvstore.core.tombstone import Tombstone
from kvstore.tiers.manifests import (
    CONFIRMED_PREFIX,
    ERASED_PREFIX,
    confirmed_path,
    decode_confirmed,
    decode_tombstone,
    encode_confirmed,
    encode_tombstone,
    object_name,
    tombstone_folder,
    tombstone_path,
)
from kvstore.tiers.objects import Objects
from kvstore.tiers.remembered import Remembered

#: Tombstones that are kept from one listing to the next. Others are read again each time.
_REMEMBERED = 100_000
#: An object that is listed and was deleted or is damaged.
_GONE = (FileNotFoundError, PieceLost)


class Listing(NamedTuple):
    """By path; `complete`: there are no others, as far as the store says."""

    by_path: dict[str, Tombstone]
    complete: bool


def confirmed_by_all(paths: Iterable[str], confirmed: Mapping[str, frozenset[str]], nodes: Iterable[str]) -> list[str]:
    """Those of the tombstones at `paths` that every node has confirmed: those of the deployment (`nodes`), and whichever has ever confirmed
    anything, as it may come back with what it had. confirmed: as of `list_confirmed`."""
    expected = {object_name(node) for node in nodes} | confirmed.keys()
    said = [confirmed.get(node, frozenset()) for node in expected]
    return [path for path in paths if all(path.rpartition("/")[2] in names for names in said)]


class TombstoneTier:
    """See the module. A failure is a value, as in blob.py."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._read = Remembered(objects, _tombstone_of, _REMEMBERED)
        self._confirmed = Remembered(objects, lambda _, data: decode_confirmed(data), _REMEMBERED)

    async def put(self, tombstone: Tombstone) -> bool:
        """Store the tombstone beside those that say something else."""
        data = encode_tombstone(tombstone)
        return await self._objects.put("tombstone", tombstone_path(tombstone.session, data), data)

    async def has(self, tombstone: Tombstone) -> bool:
        """Whether just this one is there."""
        return bool(await self._objects.has(tombstone_path(tombstone.session, encode_tombstone(tombstone))))

    async def find(self, session: SessionKey) -> list[Tombstone] | None:
        """The session's; None when the store does not answer."""
        try:
            names = [name async for page in self._objects.names(tombstone_folder(session) + "/") for name in page]
            read = await asyncio.gather(*(self._one(name) for name in names))
        except Exception:
            return None
        return [t for t in read if t is not None and t.session == session]

    async def _one(self, path: str) -> Tombstone | None:
        """None: it went meanwhile, or is damaged."""
        try:
            async with self._objects.looks:
                return _tombstone_of(path, await self._objects.get(path))
        except _GONE:
            return None

    async def list_all(self) -> Listing:
        """All; those that were read before are not read again. Damaged ones, and those that go meanwhile, are left out."""
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
        """Every node has confirmed it."""
        await self._objects.forget(path)

    async def put_confirmed(self, node: str, paths: Iterable[str]) -> bool:
        """Which tombstones the node has confirmed, in place of what it said before."""
        return await self._objects.put("tombstone", confirmed_path(node), encode_confirmed(p.rpartition("/")[2] for p in paths))

    async def list_confirmed(self) -> dict[str, frozenset[str]] | None:
        """By node's object name: the last parts of the paths of the tombstones that it has confirmed. None: the store does not answer."""
        found: dict[str, frozenset[str]] = {}
        self._confirmed.begin()
        try:
            async for page in self._objects.listed(CONFIRMED_PREFIX + "/"):
                read = dict(zip((item.path for item in page), await self._confirmed.read(page), strict=True))
                # What cannot be read confirms nothing.
                found |= {path.rpartition("/")[2]: c if isinstance(c, frozenset) else frozenset() for path, c in read.items()}
        except Exception:
            return None
        self._confirmed.complete()
        return found


def _tombstone_of(path: str, data: bytes) -> Tombstone:
    """The tombstone in the object of that name. Raises PieceLost when it is damaged or another one's."""
    tombstone = decode_tombstone(data)
    if tombstone_path(tombstone.session, data) != path:
        raise PieceLost("another session's tombstone")
    return tombstone
