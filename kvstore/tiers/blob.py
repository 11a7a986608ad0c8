"""The blob tier, where every chunk and manifest is finally stored: any store that obstore supports, by default a local
directory.

Objects: `chunks/<first half of the fingerprint>/<key>` in the format of format.py, and those of manifests.py. Every
call is bounded in time. A failure is a value (None, False, faults), never an exception, because the blob tier may be
unreachable at any time.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from contracts.errors import PieceLost
from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core.events import Fault, FoundCopy
from kvstore.core.instructions import FetchPiece
from kvstore.failpoints import reach
from kvstore.metrics import count
from kvstore.tiers.arena import Arena
from kvstore.tiers.catalogue import Catalogue, Row, Seen
from kvstore.tiers.codecs import Codecs, count_unreadable
from kvstore.tiers.encoded import decode_pieces
from kvstore.tiers.format import BLOCK, RAW, Header, Layout, decode_header, header_length, piece_offset, raw_layout
from kvstore.tiers.manifests import PREFIX, decode_manifest, encode_manifest, manifest_path
from kvstore.tiers.objects import Listed, Objects
from kvstore.tiers.ssd_reads import verify
from kvstore.tiers.ssd_recovery import folder_name
from kvstore.tiers.tombstones import TombstoneTier

#: Most header reads for loads at a time.
_PROBES = 64
#: A question with at least this timeout counts as a failure of the store when not answered in time.
PATIENT_S = 1.0
#: The prefix that trials list and write below.
_TRIAL_PATH = "trials"
#: Most encoded objects whose layout is remembered; others cost a failed read and one of the header.
_LAYOUTS_LIMIT = 1 << 16
_CHUNK_NAME = re.compile("[0-9a-f]{64}")
_FOLDER_NAME = re.compile("[0-9a-f]{16}")


def chunk_path(key: bytes, fingerprint: bytes) -> str:
    """The name of a chunk's object."""
    return f"chunks/{folder_name(fingerprint)}/{key.hex()}"


class BlobTier:
    """See the module. Used from one event loop."""

    def __init__(
        self, store: Any, arena: Arena, codecs: Codecs | None = None, catalogue: Catalogue | None = None
    ) -> None:
        """catalogue: keeps manifests from one listing to the next; None: each listing reads all of them."""
        self._objects = Objects(store)
        self._probes = asyncio.Semaphore(_PROBES)
        self._arena = arena
        self._codecs = codecs or Codecs()
        self._encoded: dict[bytes, Layout] = {}  #: layouts of objects last seen encoded; others are assumed raw
        self._catalogue = catalogue
        self.tombstones = TombstoneTier(self._objects)

    # ---- chunks

    async def probe(self, key: bytes, fingerprint: bytes) -> FoundCopy | None:
        """The chunk's header; None when it is missing, damaged (it is then deleted), or not answered in time."""
        found = await self.locate(key, fingerprint)
        return found if isinstance(found, FoundCopy) else None

    async def locate(self, key: bytes, fingerprint: bytes) -> FoundCopy | Fault:
        """Like `probe`, with the reason: MISSING, CORRUPT or UNAVAILABLE."""
        path = chunk_path(key, fingerprint)
        for last in (False, True):
            try:
                found = await self._header(path, key, fingerprint)
            except PieceLost:
                if last:  # asked twice, because the answer may be damaged and not the object
                    count("blob_headers_damaged")
                    await self.delete_chunk(key, fingerprint)
            except FileNotFoundError:
                return Fault.MISSING
            except Exception:
                return Fault.UNAVAILABLE
            else:
                return FoundCopy(key, found.shape, found.checksums) if await self._readable(found) else Fault.MISSING
        return Fault.CORRUPT

    async def locate_many(
        self, keys: Sequence[bytes], fingerprint: bytes, timeout_s: float, *, waited_for: bool = True
    ) -> tuple[list[FoundCopy], int]:
        """Headers of the chunks found within the time, and the number of questions not answered. waited_for: by a load;
        other callers use a separate limit."""
        gate = self._probes if waited_for else self._objects.looks
        found: list[FoundCopy] = []
        failed = 0

        async def one(key: bytes) -> None:
            nonlocal failed
            async with gate:
                copy = await self.locate(key, fingerprint)
            if isinstance(copy, FoundCopy):
                found.append(copy)
            else:
                failed += copy is Fault.UNAVAILABLE

        asking = [asyncio.ensure_future(one(key)) for key in keys]
        if asking:
            _, late = await asyncio.wait(asking, timeout=timeout_s)
            for task in late:
                task.cancel()
            if late:
                count("probes_timed_out", len(late))
                failed += len(late)
        # An unanswered question with a short timeout is no failure.
        return found, failed if timeout_s >= PATIENT_S else 0

    async def _header(self, path: str, key: bytes, fingerprint: bytes) -> Header:
        start, size = await self._objects.range(path, 0, BLOCK)
        length = header_length(start)
        header = start if length == BLOCK else (await self._objects.range(path, 0, length))[0]
        found = decode_header(header)
        if found.key != key or found.shape.fingerprint != fingerprint:
            raise PieceLost("the header names another chunk")
        if size != found.layout.object_bytes:
            if await self._wrong_size(path, found.layout.object_bytes):
                raise PieceLost("the object's length is not what its header says")
            raise OSError("the store's answer is not the whole object")
        self._remember(found)
        return found

    async def answers(self) -> bool:
        """Whether the store answers at all."""
        return await self._objects.has(_TRIAL_PATH) is not None

    async def try_write(self, node: str) -> bool:
        """Whether an empty object can be stored and removed."""
        path = f"{_TRIAL_PATH}/{node}"
        if not await self._objects.put("blob", path, b""):
            return False
        await self._objects.delete(path)
        return True

    def _remember(self, header: Header) -> None:
        self._encoded.pop(header.key, None)
        if header.layout.codec != RAW:
            self._encoded[header.key] = header.layout
            if len(self._encoded) > _LAYOUTS_LIMIT:
                del self._encoded[next(iter(self._encoded))]

    async def _readable(self, header: Header) -> bool:
        """Whether the object's codec works in this process."""
        if header.layout.codec == RAW or await asyncio.to_thread(self._codecs.find, header.layout.codec) is not None:
            return True
        count_unreadable()
        return False

    async def read(
        self,
        shape: KvShape,
        pieces: Sequence[FetchPiece],
        sums: dict[int, int] | None = None,
        entering: Callable[[], None] = lambda: None,
    ) -> dict[int, Fault]:
        """Read consecutive layers of one chunk into the arena and verify them. Returns the faults by index.

        Mutates `sums`: by index, the arena's checksums where they differ from those of the FetchPiece. entering: called
        before the arena is written. The call may be cancelled until then, but not after, because a thread goes on
        writing.
        """
        key, sums = pieces[0].key, {} if sums is None else sums
        assumed = self._encoded.get(key) or raw_layout(shape)
        faults = await self._read(shape, assumed, pieces, sums, entering)
        if Fault.CORRUPT not in faults.values():
            return faults
        # It may not be damaged: a node with another codec may have replaced it.
        try:
            header = await self._header(chunk_path(key, shape.fingerprint), key, shape.fingerprint)
        except Exception:
            return faults
        if header.shape != shape or header.layout == assumed or not await self._readable(header):
            return faults
        pieces = [replace(p, checksum=header.checksums[p.layer]) for p in pieces]
        sums.update({i: p.checksum for i, p in enumerate(pieces)})
        return await self._read(shape, header.layout, pieces, sums, entering)

    async def _read(
        self,
        shape: KvShape,
        layout: Layout,
        pieces: Sequence[FetchPiece],
        sums: dict[int, int],
        entering: Callable[[], None],
    ) -> dict[int, Fault]:
        start, last = layout.offsets[pieces[0].layer], pieces[-1].layer
        end = layout.offsets[last] + layout.lengths[last]
        path = chunk_path(pieces[0].key, shape.fingerprint)
        try:
            data, size = await self._objects.range(path, start, end - start)
        except FileNotFoundError:
            return dict.fromkeys(range(len(pieces)), Fault.MISSING)
        except Exception:
            fault = Fault.CORRUPT if await self._wrong_size(path, layout.object_bytes) else Fault.UNAVAILABLE
            return dict.fromkeys(range(len(pieces)), fault)
        if size != layout.object_bytes:
            fault = Fault.CORRUPT if await self._wrong_size(path, layout.object_bytes) else Fault.UNAVAILABLE
            return dict.fromkeys(range(len(pieces)), fault)
        entering()
        reach("blob.after_read")
        if layout.codec == RAW:
            return await asyncio.to_thread(self._enter, shape, pieces, data, start)
        return await asyncio.to_thread(self._decode, shape, layout, pieces, data, start, sums)

    def _decode(
        self,
        shape: KvShape,
        layout: Layout,
        pieces: Sequence[FetchPiece],
        data: memoryview,
        start: int,
        sums: dict[int, int],
    ) -> dict[int, Fault]:
        codec = self._codecs.find(layout.codec)
        if codec is None:
            return dict.fromkeys(range(len(pieces)), Fault.UNAVAILABLE)
        return decode_pieces(self._arena, codec, shape, layout, pieces, data, start, sums)

    async def _wrong_size(self, path: str, expected: int) -> bool:
        """Whether the store itself names a wrong size. A short answer alone may have other reasons."""
        try:
            return await self._objects.size(path) != expected
        except Exception:
            return False

    def _enter(self, shape: KvShape, pieces: Sequence[FetchPiece], data: memoryview, start: int) -> dict[int, Fault]:
        for piece in pieces:
            at = piece_offset(shape, piece.layer) - start
            self._arena.view[piece.offset : piece.offset + shape.piece_bytes] = data[at : at + shape.piece_bytes]
        return verify(self._arena, [(shape, pieces)])[0]

    async def write(self, key: bytes, fingerprint: bytes, data: Path | bytes, header: Header | None = None) -> bool:
        """Store the object, completely or not at all. data: its bytes, or the SSD's file of it. header: its header, if
        known."""
        ok = await self._objects.put("blob", chunk_path(key, fingerprint), data)
        if ok and header is not None:
            self._remember(header)
        return ok

    async def delete_chunk(self, key: bytes, fingerprint: bytes) -> None:
        """Remove the object; nothing when there is none or the store does not answer."""
        await self._objects.delete(chunk_path(key, fingerprint))

    async def list_chunks(self, fingerprint: bytes) -> AsyncIterator[list[bytes]]:
        """Yields the keys that the store has as chunks of the model, in pages. Raises when the store fails."""
        async for names in self._objects.names(f"chunks/{folder_name(fingerprint)}/"):
            found = (name.rpartition("/")[2] for name in names)
            yield [bytes.fromhex(name) for name in found if _CHUNK_NAME.fullmatch(name)]

    # ---- manifests

    async def put_manifest(self, manifest: Manifest) -> bool:
        """Store the session's manifest, replacing the older one."""
        return await self._objects.put("manifest", manifest_path(manifest.session), encode_manifest(manifest))

    async def get_manifest(self, session: SessionKey) -> Manifest | None:
        """The session's manifest; None when it is missing, damaged, or not answered in time."""
        found = await self.find_manifest(session)
        return found if isinstance(found, Manifest) else None

    async def find_manifest(self, session: SessionKey) -> Manifest | Fault:
        """Like `get_manifest`, with the reason: MISSING, CORRUPT or UNAVAILABLE."""
        path = manifest_path(session)
        try:
            manifest = manifest_at(path, await self._objects.get(path))
        except FileNotFoundError:
            return Fault.MISSING
        except PieceLost:
            return Fault.CORRUPT
        except Exception:
            return Fault.UNAVAILABLE
        return manifest if manifest.session == session else Fault.CORRUPT

    async def delete_manifest(self, session: SessionKey) -> None:
        """Remove the session's manifest."""
        await self._objects.delete(manifest_path(session))

    # ---- what is there

    async def stored_bytes(self) -> int | None:
        """Total size of all objects; None when the store does not answer."""
        try:
            return await self._objects.stored_bytes()
        except Exception:
            return None

    async def has_chunk(self, key: bytes, fingerprint: bytes) -> bool:
        """Whether the chunk's object is there, or may be because the store does not answer."""
        async with self._objects.looks:
            return await self._objects.has(chunk_path(key, fingerprint)) is not False

    async def has_manifest(self, session: SessionKey) -> bool:
        """Like `has_chunk`, for the session's manifest."""
        return await self._objects.has(manifest_path(session)) is not False

    async def old_chunks(self, before_s: float) -> AsyncIterator[tuple[bytes, list[bytes]]]:
        """Yields (first half of a fingerprint, keys) of chunks written before that time, by the store's clock. Raises
        when the store fails."""
        async for batch in self._objects.listed("chunks/"):
            found: dict[bytes, list[bytes]] = {}
            for path, written, _ in batch:
                _, folder, name = path.split("/", 2) if path.count("/") == 2 else ("", "", "")
                if written < before_s and _CHUNK_NAME.fullmatch(name) and _FOLDER_NAME.fullmatch(folder):
                    found.setdefault(bytes.fromhex(folder), []).append(bytes.fromhex(name))
            for fingerprint, keys in found.items():
                yield fingerprint, keys

    async def manifests(self) -> AsyncIterator[list[Manifest]]:
        """Yields all sessions' manifests in pages; unchanged ones come from the catalogue. Skips damaged ones and those
        deleted meanwhile. Raises OSError when one cannot be read or the listing is incomplete."""
        seen, catalogue = Seen(), self._catalogue
        try:
            async for page in self._objects.listed(PREFIX + "/"):
                known = await catalogue.known(page, seen) if catalogue is not None else {}
                new = [item for item in page if item.path not in known]
                read = await asyncio.gather(*(self._manifest_row(item) for item in new), return_exceptions=True)
                rows = [row for row in read if isinstance(row, Row)]
                if catalogue is not None:
                    await catalogue.note(rows, seen)
                yield [*known.values(), *(row.manifest for row in rows)]
                for failed in read:
                    if isinstance(failed, BaseException) and not isinstance(failed, _GONE):
                        raise OSError(f"a manifest cannot be read: {failed!r}") from failed
        except OSError:
            raise
        except Exception as e:
            raise OSError(f"the sessions cannot be listed: {e!r}") from e
        if catalogue is not None:
            await catalogue.complete(seen)

    async def _manifest_row(self, item: Listed) -> Row:
        async with self._objects.looks:
            data = await self._objects.get(item.path)
        return Row(item, manifest_at(item.path, data), data)


#: Errors for an object that is listed but deleted meanwhile, or damaged.
_GONE = (FileNotFoundError, PieceLost)


def manifest_at(path: str, data: bytes) -> Manifest:
    """Decode the manifest in the object of that name. Raises PieceLost when it is damaged or belongs to another
    session."""
    manifest = decode_manifest(data)
    if manifest_path(manifest.session) != path:
        raise PieceLost("another session's manifest")
    return manifest
