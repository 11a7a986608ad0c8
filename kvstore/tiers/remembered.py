"""Small objects that are listed again and again: each is read only when the listing shows another version of it than last time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvstore.tiers.objects import Listed, Objects

T = TypeVar("T")


class Remembered(Generic[T]):
    """What was decoded of the objects that were listed last. `decode` gets an object's path and bytes; what it raises is not kept."""

    def __init__(self, objects: Objects, decode: Callable[[str, bytes], T]) -> None:
        self._objects = objects
        self._decode = decode
        self._known: dict[str, tuple[str, T]] = {}

    async def read(self, listed: Sequence[Listed], *, complete: bool) -> list[T | BaseException]:
        """Each of `listed`, or what kept it from being read. Others are forgotten when the listing was `complete`."""
        kept = {i.path: known[1] for i in listed if i.version and (known := self._known.get(i.path)) and known[0] == i.version}
        new = [item for item in listed if item.path not in kept]
        found = dict(kept) | dict(
            zip((i.path for i in new), await asyncio.gather(*(self._one(i.path) for i in new), return_exceptions=True), strict=True)
        )
        seen = {i.path: (i.version, o) for i in listed if not isinstance(o := found[i.path], BaseException)}
        self._known = seen if complete else self._known | seen
        return list(found.values())

    async def _one(self, path: str) -> T:
        async with self._objects.looks:
            return self._decode(path, await self._objects.get(path))
