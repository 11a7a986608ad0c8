"""An object store as obstore reaches it: opened by its URL, every call bounded in time, ranges where the server has them.

Names and meanings of objects are blob.py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import obstore
from obstore.exceptions import GenericError
from obstore.store import LocalStore, from_url

from contracts.errors import ConfigError, PieceLost
from kvstore.failpoints import reach
from kvstore.tiers.links import link
from runtime import telemetry
from runtime.disk_shares import local_directory

_READ_S, _WRITE_S = 5.0, 30.0
#: A listing comes in pages; each has this long.
_LIST_S = 10.0
#: Objects of a page; how often a page is asked for, and how long it takes to ask again.
_PAGE, _LIST_TRIES, _LIST_PAUSE_S = 1000, 3, 0.5
#: Small reads at once that somebody looks around with: for a listing, an erasure, the display. A directory's take a thread each.
_LOOKS = 32
#: obstore's words for a server that ignores `Range`.
_NO_RANGES = "non-partial response"

log = telemetry.logger("kvstore.blob")


class Listed(NamedTuple):
    """An object as a listing shows it. written: by the store's clock. version: another after every write; "" where there is none."""

    path: str
    written: float
    version: str


class Directory:
    """A directory as a store, which may not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self) -> LocalStore:
        """Make the directory. Raises OSError, never FileNotFoundError: that no object is there is another thing."""
        try:
            return LocalStore(self._path, mkdir=True)
        except Exception as e:
            raise OSError(f"{self._path}: {e}") from e


def open_store(url: str, options: dict[str, str], default: Path) -> Any:
    """The store that `kv.blob_url` names. Raises ConfigError naming key, value and remedy. A directory that cannot be made now is no
    mistake of the configuration: it is a Directory, and tried again whenever it is used."""
    if path := local_directory(url, default):
        directory = Directory(path)
        try:
            return directory.open()
        except OSError:
            return directory
    retry: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=4)}
    client: Any = {"timeout": timedelta(seconds=20), "connect_timeout": timedelta(seconds=2), "allow_http": True}
    try:
        config: Any = options
        return from_url(url, config=config, client_options=client, retry_config=retry)
    except Exception as e:
        why = str(e).partition("\n")[0]  # what follows is a dump of obstore's own
        raise ConfigError(
            f"kv.blob_url = {url!r}: {why}; give s3://bucket/prefix, gs://…, az://… or file:///path, and kv.blob_options"
        ) from e


class Objects:
    """See the module. What fails raises, except where a method says otherwise; FileNotFoundError: there is no such object."""

    def __init__(self, store: Any) -> None:
        self._opened = store
        self._ranges = True
        self._links = True  #: until a file could not be linked into the store
        self.looks = asyncio.Semaphore(_LOOKS)

    @property
    def _store(self) -> Any:
        if isinstance(self._opened, Directory):
            self._opened = self._opened.open()
        return self._opened

    async def range(self, path: str, start: int, length: int) -> tuple[memoryview, int]:
        """A range and the whole object's size, in one request. The range is shorter only where the object ends."""
        try:
            data, size = await self._whole_or_partial(path, start, length)
        except GenericError as e:
            if await self._ends_by(path, start):
                raise PieceLost("the object ends before what is wanted of it") from e
            raise
        if len(data) != max(0, min(length, size - start)):
            raise OSError(f"{len(data)} of {length} bytes came")
        return data, size

    async def _ends_by(self, path: str, start: int) -> bool:
        """Whether a range could not be had because the object is too short: it is damaged then, and the store is well."""
        try:
            return await self.size(path) <= start
        except Exception:
            return False

    async def _whole_or_partial(self, path: str, start: int, length: int) -> tuple[memoryview, int]:
        async with asyncio.timeout(_READ_S):
            if self._ranges:
                try:
                    return await self._partial(path, start, length)
                except GenericError as e:
                    if _NO_RANGES not in str(e):
                        raise
                    log.warning("this blob store answers range requests with whole objects; every read will be of a whole chunk")
                    self._ranges = False
            result = await obstore.get_async(self._store, path)
            data = memoryview(await result.bytes_async())
            return data[start : start + length], len(data)

    async def _partial(self, path: str, start: int, length: int) -> tuple[memoryview, int]:
        result = await obstore.get_async(self._store, path, options={"range": (start, start + length)})
        return memoryview(await result.bytes_async()), result.meta["size"]

    async def get(self, path: str) -> bytes:
        """The whole of a small object."""
        async with asyncio.timeout(_READ_S):
            result = await obstore.get_async(self._store, path)
            return bytes(await result.bytes_async())

    async def size(self, path: str) -> int:
        """The object's size, as the store itself says."""
        async with asyncio.timeout(_READ_S):
            meta = await obstore.head_async(self._store, path)
        return int(meta["size"])

    async def has(self, path: str) -> bool | None:
        """Whether the object is there; None when the store does not answer."""
        try:
            await self.size(path)
        except FileNotFoundError:
            return False
        except Exception:
            return None
        return True

    async def names(self, prefix: str) -> AsyncIterator[list[str]]:
        """Paths below `prefix`, in batches. Raises when the store fails, or is silent for too long."""
        async for batch in self.listed(prefix):
            yield [item.path for item in batch]

    async def listed(self, prefix: str) -> AsyncIterator[list[Listed]]:
        """As `names`, with what the store says of each object. Pages come one at a time. A store that lists in order and fails on the way
        is asked again from where it failed, some times."""
        last, ordered, tries = "", True, _LIST_TRIES
        while True:
            try:
                batches = aiter(obstore.list(self._store, prefix, offset=last or None, chunk_size=_PAGE))
                while True:
                    async with asyncio.timeout(_LIST_S):
                        batch = await anext(batches, None)
                    if batch is None:
                        return
                    page = [Listed(item["path"], item["last_modified"].timestamp(), item["e_tag"] or "") for item in batch]
                    ordered = ordered and all(a < b for a, b in pairwise([last, *(item.path for item in page)]))
                    last, tries = page[-1].path if page else last, _LIST_TRIES
                    yield page
            except Exception:
                tries -= 1
                if not last or not ordered or not tries:
                    raise
                await asyncio.sleep(_LIST_PAUSE_S)

    async def stored_bytes(self) -> int:
        """Of all objects. Raises when the store fails, or is silent for too long."""
        size = 0
        batches = aiter(obstore.list(self._store))
        while True:
            async with asyncio.timeout(_LIST_S):
                batch = await anext(batches, None)
            if batch is None:
                return size
            size += sum(item["size"] for item in batch)

    async def put(self, kind: str, path: str, data: Path | bytes) -> bool:
        """Store the object, whole or not at all; false when that failed. A file is linked where it can be. `kind`: for failpoints."""
        try:
            reach(f"{kind}.before_put")
            async with asyncio.timeout(_WRITE_S):
                if not (isinstance(data, Path) and await self._linked(data, path)):
                    await obstore.put_async(self._store, path, data)
            reach(f"{kind}.after_put")
        except Exception:
            return False
        return True

    async def _linked(self, source: Path, path: str) -> bool:
        """Whether the file became the object without being copied."""
        if self._links and isinstance(self._store, LocalStore):
            self._links = await asyncio.to_thread(link, source, Path(str(self._store.prefix)) / path)
            return self._links
        return False

    async def delete(self, path: str) -> None:
        """Remove the object; nothing when there is none or the store does not answer."""
        try:
            reach("blob.before_delete")
            async with asyncio.timeout(_READ_S):
                await obstore.delete_async(self._store, path)
            reach("blob.after_delete")
        except Exception:
            return

    async def forget(self, path: str) -> None:
        """`delete`, among the looks: nobody waits for it."""
        async with self.looks:
            await self.delete(path)
