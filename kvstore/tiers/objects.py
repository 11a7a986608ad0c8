"""An object store through obstore: opened by URL, every call bounded in time, range reads where the server supports
them.

Names and meanings of objects are in blob.py.
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
from kvstore.tiers.durability import sync_folder
from kvstore.tiers.links import link
from runtime import telemetry
from runtime.disk_shares import local_directory

_READ_S, _WRITE_S = 5.0, 30.0
#: Timeout of each page of a listing.
_LIST_S = 10.0
#: Objects of a page, tries per page, and the pause between them.
_PAGE, _LIST_TRIES, _LIST_PAUSE_S = 1000, 3, 0.5
#: Most small background reads at a time: for listings, erasures, the display. On a directory each takes a
#: thread.
_LOOKS = 32
#: Part of obstore's error for a server that ignores `Range`.
_NO_RANGES = "non-partial response"
#: Where objects of this format version are. Another version has another root, so that stores of both may run on one
#: bucket (docs/design/0040).
ROOT = "v3"

log = telemetry.logger("kvstore.blob")


class Listed(NamedTuple):
    """An object in a listing. written: by the store's clock. version: changes with every write; "" where the store has
    none."""

    path: str
    written: float
    version: str


class Directory:
    """A directory as a store. It may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self) -> LocalStore:
        """Make the directory. Raises OSError, but never FileNotFoundError, which means a missing object."""
        try:
            return LocalStore(self._path, mkdir=True)
        except Exception as e:
            raise OSError(f"{self._path}: {e}") from e


def open_store(url: str, options: dict[str, str], default: Path, root: str = ROOT) -> Any:
    """The store at `root` of what `kv.blob_url` names. Raises ConfigError naming key, value and remedy. A directory
    that cannot be made now is not an error: it is a Directory, tried again at every use."""
    if path := local_directory(url, default):
        directory = Directory(path / root)
        try:
            return directory.open()
        except OSError:
            return directory
    retry: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=4)}
    client: Any = {"timeout": timedelta(seconds=20), "connect_timeout": timedelta(seconds=2), "allow_http": True}
    try:
        config: Any = options
        return from_url(
            "/".join((url.rstrip("/"), root)).rstrip("/"), config=config, client_options=client, retry_config=retry
        )
    except Exception as e:
        why = str(e).partition("\n")[0]  # the rest is obstore's debug output
        raise ConfigError(
            f"kv.blob_url = {url!r}: {why}; give s3://bucket/prefix, gs://…, az://… or file:///path, and "
            "kv.blob_options"
        ) from e


class Objects:
    """See the module. Methods raise on failure unless they say otherwise; FileNotFoundError: the object does not
    exist."""

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
        """Whether a range failed because the object is too short: then the object is damaged, not the store."""
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
                    log.warning(
                        "this blob store answers range requests with whole objects; every read will be of a whole chunk"
                    )
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
        """The object's size, as the store reports it."""
        async with asyncio.timeout(_READ_S):
            meta = await obstore.head_async(self._store, path)
        return int(meta["size"])

    async def has(self, path: str) -> bool | None:
        """Whether the object exists; None when the store does not answer."""
        try:
            await self.size(path)
        except FileNotFoundError:
            return False
        except Exception:
            return None
        return True

    async def names(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yields paths below `prefix` in batches. Raises when the store fails or is silent for too long."""
        async for batch in self.listed(prefix):
            yield [item.path for item in batch]

    async def listed(self, prefix: str) -> AsyncIterator[list[Listed]]:
        """Like `names`, with each object's metadata, one page at a time. A store that lists in order and fails is asked
        again from where it failed, a few times."""
        last, ordered, tries = "", True, _LIST_TRIES
        while True:
            try:
                batches = aiter(obstore.list(self._store, prefix, offset=last or None, chunk_size=_PAGE))
                while True:
                    async with asyncio.timeout(_LIST_S):
                        batch = await anext(batches, None)
                    if batch is None:
                        return
                    page = [
                        Listed(item["path"], item["last_modified"].timestamp(), item["e_tag"] or "") for item in batch
                    ]
                    ordered = ordered and all(a < b for a, b in pairwise([last, *(item.path for item in page)]))
                    last, tries = page[-1].path if page else last, _LIST_TRIES
                    yield page
            except Exception:
                tries -= 1
                if not last or not ordered or not tries:
                    raise
                await asyncio.sleep(_LIST_PAUSE_S)

    async def stored_bytes(self) -> int:
        """Total size of all objects. Raises when the store fails or is silent for too long."""
        size = 0
        batches = aiter(obstore.list(self._store))
        while True:
            async with asyncio.timeout(_LIST_S):
                batch = await anext(batches, None)
            if batch is None:
                return size
            size += sum(item["size"] for item in batch)

    async def put(self, kind: str | None, path: str, data: Path | bytes) -> bool:
        """Store the object, completely or not at all; false on failure. A file is hard-linked where possible. kind: for
        failpoints; None: there are none."""
        try:
            if kind is not None:
                reach(f"{kind}.before_put")
            async with asyncio.timeout(_WRITE_S):
                if not (isinstance(data, Path) and await self._linked(data, path)):
                    await obstore.put_async(self._store, path, data)
            if kind is not None:
                reach(f"{kind}.after_put")
        except Exception:
            return False
        return True

    async def _linked(self, source: Path, path: str) -> bool:
        """Whether the file was hard-linked into the store."""
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

    async def delete_durably(self, kind: str, path: str) -> None:
        """Remove the object so that it does not come back when the machine fails. Raises when that failed; nothing when
        there is none. kind: for failpoints."""
        reach(f"{kind}.before_delete")
        async with asyncio.timeout(_READ_S):
            try:
                await obstore.delete_async(self._store, path)
            except FileNotFoundError:
                return
            if isinstance(self._store, LocalStore):
                await asyncio.to_thread(sync_folder, (Path(str(self._store.prefix)) / path).parent)
        reach(f"{kind}.after_delete")

    async def forget(self, path: str) -> None:
        """Like `delete`, within the limit of background reads: no request waits for it."""
        async with self.looks:
            await self.delete(path)
