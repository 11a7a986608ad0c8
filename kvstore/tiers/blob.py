"""The blob tier, where every chunk and every manifest ends up: any store that obstore can reach, a local directory by default.

`chunks/<first half of the fingerprint>/<key>` in the format of format.py and `manifests/...`. Every call is bounded in
time; a failure is a value (None, False, faults), never an exception: the blob tier being away is an ordinary day.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import GenericError
from obstore.store import LocalStore, from_url

from contracts.errors import ConfigError, PieceLost
from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core.events import Fault, FoundCopy
from kvstore.core.instructions import FetchPiece
from kvstore.failpoints import reach
from kvstore.tiers.arena import Arena
from kvstore.tiers.format import BLOCK, RAW, decode_header, header_length, object_bytes, piece_offset
from kvstore.tiers.manifests import PREFIX, decode_manifest, encode_manifest, manifest_path
from kvstore.tiers.ssd import folder_name, verify
from runtime import telemetry

_READ_S, _WRITE_S = 5.0, 30.0
_LIST_CONCURRENCY = 32
#: After so many failures in a row, probes answer at once for this long.
_PATIENCE, _AWAY_S = 3, 5.0
#: A call that was cancelled earlier than this is no failure of the store.
_HASTY_S = 1.0
#: obstore's words for a server that ignores `Range`.
_NO_RANGES = "non-partial response"

log = telemetry.logger("kvstore.blob")


def open_store(url: str, options: dict[str, str], default: Path) -> Any:
    """The store that `kv.blob_url` names. Raises ConfigError naming key, value and remedy."""
    if not url:
        return LocalStore(default, mkdir=True)
    retry: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=4)}
    client: Any = {"timeout": timedelta(seconds=20), "connect_timeout": timedelta(seconds=2), "allow_http": True}
    try:
        if url.startswith("file://"):
            return LocalStore(Path(url.removeprefix("file://")), mkdir=True)
        config: Any = options
        return from_url(url, config=config, client_options=client, retry_config=retry)
    except Exception as e:
        raise ConfigError(
            f"kv.blob_url = {url!r}: {e}; give s3://bucket/prefix, gs://…, az://… or file:///path, and kv.blob_options"
        ) from e


def chunk_path(key: bytes, fingerprint: bytes) -> str:
    """The object's name."""
    return f"chunks/{folder_name(fingerprint)}/{key.hex()}"


class BlobTier:
    """See the module. Used from one event loop."""

    def __init__(self, store: Any, arena: Arena) -> None:
        self._store = store
        self._arena = arena
        self._ranges = True
        self._failures = 0
        self._away_until = 0.0

    # ---- chunks

    async def probe(self, key: bytes, fingerprint: bytes) -> FoundCopy | None:
        """The chunk's header, or None: not there, damaged (then it is deleted), or no answer in time.

        A store that failed several times in a row is not asked for a while, or every new prompt would wait for it.
        """
        path = chunk_path(key, fingerprint)
        if asyncio.get_running_loop().time() < self._away_until:
            return None
        try:
            start, size = await self._range(path, 0, BLOCK)
            length = header_length(start)
            header = start if length == BLOCK else (await self._range(path, 0, length))[0]
            found = decode_header(header)
            if found.key != key or found.shape.fingerprint != fingerprint or size != found.layout.object_bytes:
                raise PieceLost("the header names another chunk, or its length is wrong")
        except PieceLost:
            await self.delete_chunk(key, fingerprint)
            return None
        except Exception:
            return None
        return FoundCopy(key, found.shape, found.checksums) if found.layout.codec == RAW else None

    async def read(self, shape: KvShape, pieces: Sequence[FetchPiece]) -> dict[int, Fault]:
        """Consecutive layers of one chunk into the arena, verified. Returns the faults by index."""
        start = piece_offset(shape, pieces[0].layer)
        end = piece_offset(shape, pieces[-1].layer) + shape.piece_bytes
        path = chunk_path(pieces[0].key, shape.fingerprint)
        try:
            data, size = await self._range(path, start, end - start)
        except FileNotFoundError:
            return dict.fromkeys(range(len(pieces)), Fault.MISSING)
        except Exception:
            fault = Fault.CORRUPT if await self._wrong_size(path, object_bytes(shape)) else Fault.UNAVAILABLE
            return dict.fromkeys(range(len(pieces)), fault)
        if len(data) != end - start or size != object_bytes(shape):
            return dict.fromkeys(range(len(pieces)), Fault.CORRUPT)
        reach("blob.after_read")
        return await asyncio.to_thread(self._enter, shape, pieces, data, start)

    async def _wrong_size(self, path: str, expected: int) -> bool:
        """Whether a read failed because the object is too short, which never heals."""
        try:
            async with asyncio.timeout(_READ_S):
                meta = await obstore.head_async(self._store, path)
        except Exception:
            return False
        return bool(meta["size"] != expected)

    def _enter(self, shape: KvShape, pieces: Sequence[FetchPiece], data: memoryview, start: int) -> dict[int, Fault]:
        for piece in pieces:
            at = piece_offset(shape, piece.layer) - start
            self._arena.view[piece.offset : piece.offset + shape.piece_bytes] = data[at : at + shape.piece_bytes]
        return verify(self._arena, shape, pieces)

    async def write(self, key: bytes, fingerprint: bytes, data: Path | bytes) -> bool:
        """Store the object, whole or not at all. `data`: its bytes, or the SSD's file of it."""
        return await self._put("blob", chunk_path(key, fingerprint), data)

    async def delete_chunk(self, key: bytes, fingerprint: bytes) -> None:
        """Remove the object; nothing when there is none or the store does not answer."""
        await self._delete(chunk_path(key, fingerprint))

    async def list_chunks(self, fingerprint: bytes, limit: int) -> set[bytes] | None:
        """Keys of the model's chunks; None when the store does not answer or has more than `limit`."""
        keys: set[bytes] = set()
        try:
            async for batch in obstore.list(self._store, f"chunks/{folder_name(fingerprint)}/"):
                names = (item["path"].rpartition("/")[2] for item in batch)
                keys |= {bytes.fromhex(name) for name in names if len(name) == 64}
                if len(keys) > limit:
                    return None
        except Exception:
            return None
        return keys

    # ---- manifests

    async def put_manifest(self, manifest: Manifest) -> bool:
        """Store the session's manifest in place of the older one."""
        return await self._put("manifest", manifest_path(manifest.session), encode_manifest(manifest))

    async def get_manifest(self, session: SessionKey) -> Manifest | None:
        """The session's manifest; None when there is none, it is damaged, or no answer came in time."""
        manifest = await self._manifest_at(manifest_path(session))
        return manifest if manifest is not None and manifest.session == session else None

    async def delete_manifest(self, session: SessionKey) -> None:
        """Remove the session's manifest."""
        await self._delete(manifest_path(session))

    async def list_manifests(self, limit: int) -> list[Manifest]:
        """All sessions' manifests, `limit` of them at most; what cannot be read is left out."""
        paths: list[str] = []
        try:
            async for batch in obstore.list(self._store, PREFIX + "/"):
                paths += [item["path"] for item in batch]
                if len(paths) >= limit:
                    break
        except Exception:
            return []
        gate = asyncio.Semaphore(_LIST_CONCURRENCY)

        async def one(path: str) -> Manifest | None:
            async with gate:
                return await self._manifest_at(path)

        return [m for m in await asyncio.gather(*(one(p) for p in paths[:limit])) if m is not None]

    async def _manifest_at(self, path: str) -> Manifest | None:
        try:
            async with asyncio.timeout(_READ_S):
                result = await obstore.get_async(self._store, path)
                manifest = decode_manifest(bytes(await result.bytes_async()))
            return manifest if manifest_path(manifest.session) == path else None
        except Exception:
            return None

    # ---- objects

    async def _range(self, path: str, start: int, length: int) -> tuple[memoryview, int]:
        """A range and the whole object's size, in one request."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            answer = await self._whole_or_partial(path, start, length)
        except FileNotFoundError:
            self._failures = 0
            raise
        except BaseException as e:
            hasty = isinstance(e, asyncio.CancelledError) and loop.time() - began < _HASTY_S
            self._failures += not hasty
            if self._failures >= _PATIENCE:
                self._away_until = loop.time() + _AWAY_S
            raise
        self._failures = 0
        return answer

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

    async def _put(self, kind: str, path: str, data: Path | bytes) -> bool:
        try:
            reach(f"{kind}.before_put")
            async with asyncio.timeout(_WRITE_S):
                await obstore.put_async(self._store, path, data)
            reach(f"{kind}.after_put")
        except Exception:
            return False
        return True

    async def _delete(self, path: str) -> None:
        try:
            reach("blob.before_delete")
            async with asyncio.timeout(_READ_S):
                await obstore.delete_async(self._store, path)
            reach("blob.after_delete")
        except Exception:
            return
