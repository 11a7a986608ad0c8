"""Keys that derive from the cluster secret, and the keyed hashes (BLAKE3) that slow tiers are checked with.

Whoever can write to a disk or bucket, but does not know the secret, can forge none of them: the digest of a stored
piece, the authenticator of a header, and that of a record (manifest, tombstone, confirmation). Each use has a key of
its own. A piece's digest also covers its chunk's key and its layer, and a record's authenticator its name, so that true
ones in another place are refused. A chunk key is a hash keyed by its tenant's salt (contracts/kv.py), so a digest
belongs to one tenant.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache

from blake3 import blake3

from contracts.ids import SessionKey

Buffer = bytes | bytearray | memoryview

#: Length of the authenticators of headers and records, and of a session's tag.
MAC_BYTES, TAG_BYTES = 32, 16
_LAYER = struct.Struct("<I")
#: Most tenants whose derived key is kept.
_TENANTS = 4096


class ClusterKeys:
    """See the module. Immutable; used from several threads."""

    def __init__(self, secret: bytes) -> None:
        """secret: the cluster secret (runtime/config_file.py)."""

        def derived(use: str, more: bytes = b"") -> bytes:
            return blake3(secret + more, derive_key_context=f"upbeat 2026 {use}").digest()

        self.pieces = derived("digests of stored pieces")
        self._headers = derived("authenticators of stored headers")
        self._records = derived("authenticators of records in the blob tier")
        self._sessions = derived("tags of sessions")
        self._of_tenant = lru_cache(_TENANTS)(
            lambda tenant: derived("tenant keys that wrap session keys", tenant.encode("utf-8", "surrogatepass"))
        )

    def digest(self, stored: Buffer, key: bytes, layer: int) -> int:
        """64 bits of the keyed hash of a stored piece. key: the chunk's."""
        h = blake3(stored, key=self.pieces)
        h.update(key + _LAYER.pack(layer))
        return int.from_bytes(h.digest(length=8), "little")

    def digests(self, pieces: Iterable[Buffer], key: bytes) -> tuple[int, ...]:
        """Of a chunk's stored pieces, in layer order."""
        return tuple(self.digest(piece, key, layer) for layer, piece in enumerate(pieces))

    def of_header(self, body: Buffer) -> bytes:
        """The authenticator of a header, MAC_BYTES long."""
        return blake3(body, key=self._headers).digest()

    def of_record(self, name: str, body: Buffer) -> bytes:
        """The authenticator of the record of this name, MAC_BYTES long."""
        prefix = name.encode()
        return blake3(struct.pack("<I", len(prefix)) + prefix + bytes(body), key=self._records).digest()

    def tag(self, session: SessionKey) -> bytes:
        """What stands for the session in names and headers, TAG_BYTES long: it reveals neither tenant nor session."""
        tenant, name = (part.encode("utf-8", "surrogatepass") for part in session)
        return blake3(struct.pack("<I", len(tenant)) + tenant + name, key=self._sessions).digest(length=TAG_BYTES)

    def of_tenant(self, tenant: str) -> bytes:
        """The tenant's key, which wraps its sessions' keys."""
        return self._of_tenant(tenant)
