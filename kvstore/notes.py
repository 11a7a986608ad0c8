"""Encrypts what workers note in manifests (Manifest.note: it may hold a conversation's tokens), where chunks are.

A sealed note begins with the name of the session's key. The core and the blob tier see sealed ones only; a worker gets
its own back with an offer.
"""

from __future__ import annotations

import os
from dataclasses import replace

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from contracts.ids import SessionKey
from contracts.kv import Manifest
from kvstore.core import instructions as do
from kvstore.core.events import Fault
from kvstore.host import StoreHost
from kvstore.tiers.key_names import NAME_BYTES, KeyName
from runtime.service import Tasks

_MAGIC = b"\0UPBEATN\x01"
_NONCE_BYTES = 12


class Notes:
    """See the module. encrypts: whether new notes are sealed; sealed ones are opened in any case."""

    def __init__(self, node: StoreHost, tasks: Tasks, *, encrypts: bool) -> None:
        self._node, self._tasks, self._encrypts = node, tasks, encrypts

    def sealed(self, manifest: Manifest) -> Manifest:
        """The manifest with its note sealed, if notes are."""
        if not manifest.note or not self._encrypts:
            return manifest
        session = manifest.session
        name, key = self._node.write_back.secret_of((session, self._node.store.life(session)))
        nonce = os.urandom(_NONCE_BYTES)
        closed = AESGCM(key).encrypt(nonce, manifest.note, _bound(session))
        return replace(manifest, note=_MAGIC + name.pack() + nonce + closed)

    def offer(self, offer: do.Offer) -> None:
        """Offer the session to the device's workers, with the note as its worker wrote it; without one whose key is
        gone or cannot be read now."""
        if offer.note.startswith(_MAGIC):
            self._tasks.start(self._open(offer), "offer")
        else:
            self._tell(offer)

    async def _open(self, offer: do.Offer) -> None:
        start = len(_MAGIC)
        name, nonce, closed = (
            offer.note[start : start + NAME_BYTES],
            offer.note[start + NAME_BYTES :][:_NONCE_BYTES],
            offer.note[start + NAME_BYTES + _NONCE_BYTES :],
        )
        note = b""
        if len(closed) > 0:
            found = await self._node.blob.session_keys.find(KeyName.unpack(name))
            if not isinstance(found, Fault):
                try:
                    note = AESGCM(found.key).decrypt(nonce, closed, _bound(offer.session))
                except InvalidTag:
                    note = b""
        self._tell(replace(offer, note=note))

    def _tell(self, offer: do.Offer) -> None:
        for worker in self._node.workers.values():
            if worker.device == offer.device and offer.fingerprint in worker.fingerprints:
                worker.tell(offer)


def _bound(session: SessionKey) -> bytes:
    return _MAGIC + "\0".join(session).encode("utf-8", "surrogatepass")
