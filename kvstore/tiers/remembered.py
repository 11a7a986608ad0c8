"""Small objects that are listed repeatedly: each is read again only when the listing shows another version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvstore.tiers.objects import Listed, Objects

T = TypeVar("T")


class Remembered(Generic[T]):
    """Decoded objects of the last listing, at most `most`. decode: gets an object's path and bytes; when it raises,
    nothing is kept."""

    def __init__(self, objects: Objects, decode: Callable[[str, bytes], T], most: int) -> None:
        self._objects = objects
        self._decode = decode
        self._most = most
        self._known: dict[str, tuple[str, T]] = {}
        self._seen: dict[str, tuple[str, T]] = {}

    def begin(self) -> None:
        """A listing begins."""
        self._seen = {}

    def complete(self) -> None:
        """The current listing has shown all objects: forget those not in it."""
        self._known = self._seen

    async def read(self, listed: Sequence[Listed]) -> list[T | BaseException]:
        """For each object of this part of a listing, in order, its decoded value or the exception of its read."""
        kept = {
            i.path: known[1]
            for i in listed
            if i.version and (known := self._known.get(i.path)) and known[0] == i.version
        }
        new = [item for item in listed if item.path not in kept]
        found: dict[str, T | BaseException] = dict(kept)
        found |= dict(
            zip(
                (i.path for i in new),
                await asyncio.gather(*(self._one(i.path) for i in new), return_exceptions=True),
                strict=True,
            )
        )
        for item in listed:
            value = found[item.path]
            if len(self._seen) < self._most and not isinstance(value, BaseException):
                self._seen[item.path] = item.version, value
        return [found[item.path] for item in listed]

    async def _one(self, path: str) -> T:
        async with self._objects.looks:
            return self._decode(path, await self._objects.get(path))
