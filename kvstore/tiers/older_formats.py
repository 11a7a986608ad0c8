"""What stores of an older format left in the blob tier.

Every format version has a root of its own in the bucket (objects.py: ROOT), so that stores of different versions on one
bucket neither read nor delete each other's objects. This is what stores before ROOT wrote, at the bucket's top. Nobody
here reads it, because it is not authenticated. It is deleted with its session, and when nobody has written it for
KEPT_S: by then no store of that format should run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

import msgpack

from contracts.ids import SessionKey
from contracts.kv import KEY_BYTES
from kvstore.tiers.manifests import manifest_path
from kvstore.tiers.objects import Objects
from kvstore.tiers.ssd_recovery import folder_name

#: How each of their objects began.
_MAGIC = b"UPBEAT"
_PREFIXES = ("chunks/", "manifests/", "tombstones/", "confirmed/")
#: A rolling upgrade must not take longer.
KEPT_S = 7 * 86400.0
#: Of a manifest: magic and checksum.
_BEFORE_BODY = 9 + 8


class OlderFormats:
    """See the module. objects: at the bucket's top."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._old: set[str] = set()  #: at the last sweep, at most all that older stores left

    async def erase(self, session: SessionKey, chunks: Mapping[bytes, bytes]) -> bool:
        """Delete the session's manifest, what that names, and these chunks (key -> fingerprint). False when the store
        does not answer."""
        path = manifest_path(session)
        try:
            old = dict(chunks)
            with contextlib.suppress(FileNotFoundError):
                old |= _named(await self._objects.get(path))
            if old and await self._has_chunks():
                names = (f"chunks/{folder_name(fingerprint)}/{key.hex()}" for key, fingerprint in old.items())
                await asyncio.gather(*map(self._objects.forget, names))
            await self._objects.delete(path)
            return await self._objects.has(path) is False
        except Exception:
            return False

    async def _has_chunks(self) -> bool:
        async for page in self._objects.names("chunks/"):
            if page:
                return True
        return False

    async def sweep(self, now_s: float) -> int:
        """Delete what is older than KEPT_S by the store's clock, and was at the last sweep. Returns the number of
        objects. Raises when the store fails. now_s: seconds since the epoch.

        Others may keep objects of theirs below the same names, so each one's first bytes are looked at.
        """
        before, self._old = self._old, set()
        removed = 0
        for prefix in _PREFIXES:
            async for page in self._objects.listed(prefix):
                for path in [item.path for item in page if item.written < now_s - KEPT_S]:
                    if path not in before:
                        self._old.add(path)
                    elif await self._is_ours(path):
                        await self._objects.forget(path)
                        removed += 1
        return removed

    async def _is_ours(self, path: str) -> bool:
        try:
            async with self._objects.looks:
                start, _ = await self._objects.range(path, 0, len(_MAGIC))
        except FileNotFoundError:
            return False
        return bytes(start) == _MAGIC


def _named(manifest: bytes) -> dict[bytes, bytes]:
    """The chunks that it names, as far as it can be read: it only decides what is deleted."""
    try:
        fields = msgpack.unpackb(manifest[_BEFORE_BODY:])
        fingerprint, joined = bytes(fields[3]), bytes(fields[4]) + (bytes(fields[7]) if len(fields) > 7 else b"")
    except (ValueError, TypeError, IndexError, msgpack.UnpackException):
        return {}
    return {joined[i : i + KEY_BYTES]: fingerprint for i in range(0, len(joined), KEY_BYTES)}
