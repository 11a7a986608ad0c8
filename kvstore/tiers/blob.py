"""The blob tier, where every chunk and manifest is finally stored: any store that obstore supports, by default a local
directory.

Objects: `chunks/<first half of the fingerprint>/<key>` in the format of format.py, those of manifests.py, and the one
of owner.py. Every call is bounded in time. A failure is a value (None, False, faults), never an exception, because the
blob tier may be unreachable at any time.
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
from kvstore.metrics import count, log
from kvstore.tiers.arena import Arena
from kvstore.tiers.catalogue import Catalogue, Row, Seen
from kvstore.tiers.cluster_keys import ClusterKeys
from kvstore.tiers.codecs import Codecs, count_unreadable
from kvstore.tiers.encoded import Opened, decode_pieces
from kvstore.tiers.format import BLOCK, RAW, Header, decode_header, header_length, raw_layout
from kvstore.tiers.manifests import PREFIX, decode_manifest, encode_manifest, manifest_path
from kvstore.tiers.objects import Listed, Objects
from kvstore.tiers.owner import owner
from kvstore.tiers.session_keys import SessionKeys
from kvstore.tiers.ssd_recovery import folder_name
from kvstore.tiers.tombstones import TombstoneTier

#: Most header reads for loads at a time.
_PROBES = 64
#: A question with at least this timeout counts as a failure of the store when not answered in time.
PATIENT_S = 1.0
#: The prefix that trials list and write below.
_TRIAL_PATH = "trials"
#: Most encoded or encrypted objects whose header is remembered; others cost a failed read and one of the header.
_FORMS_LIMIT = 1 << 15
_CHUNK_NAME = re.compile("[0-9a-f]{64}")
_FOLDER_NAME = re.compile("[0-9a-f]{16}")


def chunk_path(key: bytes, fingerprint: bytes) -> str:
    """The name of a chunk's object."""
    return f"chunks/{folder_name(fingerprint)}/{key.hex()}"


class ManifestsUnread(Exception):
    """The listing was whole, but the store does not give some of its objects."""


class BlobTier:
    """See the module. Used from one event loop."""

    def __init__(
        self,
        store: Any,
        arena: Arena,
        keys: ClusterKeys,
        codecs: Codecs | None = None,
        catalogue: Catalogue | None = None,
    ) -> None:
        """catalogue: keeps manifests from one listing to the next; None: each listing reads all of them."""
        self._objects = Objects(store)
        self._keys = keys
        self._probes = asyncio.Semaphore(_PROBES)
        self._arena = arena
        self._codecs = codecs or Codecs()
        self._forms: dict[bytes, Header] = {}  #: of objects last seen encoded or encrypted; others are assumed neither
        self._catalogue = catalogue
        self.tombstones = TombstoneTier(self._objects, keys)
        self.session_keys = SessionKeys(self._objects, keys)

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
                opened = await self._opened(found)
                if isinstance(opened, Opened):
                    return FoundCopy(key, found.shape, found.checksums)
                if opened is Fault.ERASED:
                    await self.delete_chunk(key, fingerprint)
                return Fault.UNAVAILABLE if opened is Fault.LOCKED else Fault.MISSING
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
        found = decode_header(self._keys, header)
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
        self._forms.pop(header.key, None)
        if header.layout.codec != RAW or header.seal is not None:
            self._forms[header.key] = header
            if len(self._forms) > _FORMS_LIMIT:
                del self._forms[next(iter(self._forms))]

    async def _opened(self, header: Header) -> Opened | Fault:
        """What reads the object's pieces; UNAVAILABLE where its codec does not work, ERASED without its session's key,
        LOCKED when that cannot be read now."""
        codec = secret = None
        if header.layout.codec != RAW:
            codec = await asyncio.to_thread(self._codecs.find, header.layout.codec)
            if codec is None:
                count_unreadable()
                return Fault.UNAVAILABLE
        if header.seal is not None:
            found = await self.session_keys.find(header.seal.key)
            if isinstance(found, Fault):
                return Fault.LOCKED if found is Fault.UNAVAILABLE else found
            secret = found
        return Opened(self._keys, header, codec, secret)

    async def read(
        self,
        shape: KvShape,
        pieces: Sequence[FetchPiece],
        sums: dict[int, int] | None = None,
        entering: Callable[[], None] = lambda: None,
    ) -> dict[int, Fault]:
        """Read consecutive layers of one chunk into the arena and verify them. Returns the faults by index.

        Mutates `sums`: by index, the arena's checksums. entering: called before the arena is written. The call may be
        cancelled until then, but not after, because a thread goes on writing.
        """
        key, sums = pieces[0].key, {} if sums is None else sums
        assumed = self._forms.get(key) or Header(key, shape, raw_layout(shape), ())
        faults = await self._read(shape, assumed, pieces, sums, entering)
        if not {Fault.CORRUPT, Fault.ERASED}.intersection(faults.values()):
            return faults
        # It may not be damaged: a node may have replaced it, by another codec or under another key.
        try:
            header = await self._header(chunk_path(key, shape.fingerprint), key, shape.fingerprint)
        except Exception:
            return faults
        if header.shape != shape or (header.layout, header.seal) == (assumed.layout, assumed.seal):
            return faults
        sums.clear()
        pieces = [replace(p, checksum=header.checksums[p.layer]) for p in pieces]
        return await self._read(shape, header, pieces, sums, entering)

    async def _read(
        self,
        shape: KvShape,
        header: Header,
        pieces: Sequence[FetchPiece],
        sums: dict[int, int],
        entering: Callable[[], None],
    ) -> dict[int, Fault]:
        every, layout = range(len(pieces)), header.layout
        start, last = layout.offsets[pieces[0].layer], pieces[-1].layer
        end = layout.offsets[last] + layout.lengths[last]
        path = chunk_path(header.key, shape.fingerprint)
        opened = await self._opened(header)
        if isinstance(opened, Fault):
            return dict.fromkeys(every, opened)
        try:
            data, size = await self._objects.range(path, start, end - start)
        except FileNotFoundError:
            return dict.fromkeys(every, Fault.MISSING)
        except Exception:
            fault = Fault.CORRUPT if await self._wrong_size(path, layout.object_bytes) else Fault.UNAVAILABLE
            return dict.fromkeys(every, fault)
        if size != layout.object_bytes:
            fault = Fault.CORRUPT if await self._wrong_size(path, layout.object_bytes) else Fault.UNAVAILABLE
            return dict.fromkeys(every, fault)
        entering()
        reach("blob.after_read")
        return await asyncio.to_thread(decode_pieces, self._arena, opened, header, pieces, data, start, sums)

    async def _wrong_size(self, path: str, expected: int) -> bool:
        """Whether the store itself names a wrong size. A short answer alone may have other reasons."""
        try:
            return await self._objects.size(path) != expected
        except Exception:
            return False

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
        return await self._objects.put(
            "manifest", manifest_path(manifest.session), encode_manifest(self._keys, manifest)
        )

    async def get_manifest(self, session: SessionKey) -> Manifest | None:
        """The session's manifest; None when it is missing, damaged, or not answered in time."""
        found = await self.find_manifest(session)
        return found if isinstance(found, Manifest) else None

    async def find_manifest(self, session: SessionKey) -> Manifest | Fault:
        """Like `get_manifest`, with the reason: MISSING, CORRUPT or UNAVAILABLE."""
        path = manifest_path(session)
        try:
            return decode_manifest(self._keys, path, await self._objects.get(path))
        except FileNotFoundError:
            return Fault.MISSING
        except PieceLost:
            return Fault.CORRUPT
        except Exception:
            return Fault.UNAVAILABLE

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

    async def owner(self, own_id: str) -> str:
        """See `owner.owner`."""
        return await owner(self._objects, own_id)

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
        deleted meanwhile. Raises OSError when the listing is incomplete, and ManifestsUnread at its end when single
        ones could not be read."""
        catalogue, unread = self._catalogue, 0
        seen = catalogue.begin() if catalogue is not None else Seen()
        try:
            async for page in self._objects.listed(PREFIX + "/"):
                known = await catalogue.known(page, seen) if catalogue is not None else {}
                new = [item for item in page if item.path not in known]
                read = await asyncio.gather(*(self._manifest_row(item) for item in new), return_exceptions=True)
                rows = [row for row in read if isinstance(row, Row)]
                if catalogue is not None:
                    await catalogue.note(rows, seen)
                yield [*known.values(), *(row.manifest for row in rows)]
                for item, failed in zip(new, read, strict=True):
                    if isinstance(failed, BaseException) and not isinstance(failed, _GONE):
                        unread += 1
                        log.warning("a session's manifest cannot be read", session=item.path, error=repr(failed))
        except Exception as e:
            raise OSError(f"the sessions cannot be listed: {e!r}") from e
        if unread:
            raise ManifestsUnread(f"{unread} manifests cannot be read")
        if catalogue is not None:
            await catalogue.complete(seen)

    async def _manifest_row(self, item: Listed) -> Row:
        async with self._objects.looks:
            data = await self._objects.get(item.path)
        return Row(item, decode_manifest(self._keys, item.path, data), data)


#: Errors for an object that is listed but deleted meanwhile, or damaged.
_GONE = (FileNotFoundError, PieceLost)
