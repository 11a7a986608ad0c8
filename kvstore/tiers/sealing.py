"""Encryption of stored chunks: AES-256-GCM, piece by piece, under a key of the chunk's session.

Each object has a key of its own, the keyed hash of a random salt and the chunk's key under the session's key, so a
piece's nonce is its layer and never repeats. The associated data binds a piece to its chunk, layer and format version.
Tags are in the header, so pieces keep their length and alignment. A piece goes through the codec first.

Without the session's key no piece can be read: erasing the key erases every copy (session_keys.py).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from contracts.errors import PieceLost
from kvstore.tiers.cluster_keys import Buffer
from kvstore.tiers.format import SALT_BYTES, VERSION, Seal
from kvstore.tiers.key_names import KeyName

_TAG = struct.Struct("<QQ")
_BOUND = struct.Struct("<I32sI")
_NONCE_BYTES = 12


class SessionSecret(NamedTuple):
    """A session's key, 32 bytes, and its name."""

    name: KeyName
    key: bytes


class Sealer:
    """Encrypts and decrypts the pieces of one object. key: the chunk's."""

    def __init__(self, secret: SessionSecret, salt: bytes, key: bytes) -> None:
        self._aead = AESGCM(blake3(salt + key, key=secret.key).digest())
        self._key = key

    def close(self, piece: Buffer, layer: int) -> tuple[memoryview, int, int]:
        """The encrypted piece, which is as long, and its tag's halves."""
        sealed = memoryview(self._aead.encrypt(_nonce(layer), piece, self._bound(layer)))
        return sealed[: -_TAG.size], *_TAG.unpack(sealed[-_TAG.size :])

    def open_into(self, sealed: Buffer, layer: int, tag: tuple[int, int], into: memoryview) -> None:
        """Decrypt to `into`, which has the piece's length. Raises PieceLost when it is not what `close` returned; what
        is in `into` then may not be used."""
        try:
            self._aead.decrypt_into(_nonce(layer), b"".join((sealed, _TAG.pack(*tag))), self._bound(layer), into)
        except (InvalidTag, ValueError) as e:
            raise PieceLost("the piece is not what was encrypted") from e

    def _bound(self, layer: int) -> bytes:
        return _BOUND.pack(VERSION, self._key, layer)


def _nonce(layer: int) -> bytes:
    return layer.to_bytes(_NONCE_BYTES, "little")


def seal_pieces(
    secret: SessionSecret, key: bytes, pieces: Sequence[Buffer]
) -> tuple[list[memoryview], tuple[int, ...], Seal]:
    """The encrypted pieces of a chunk, in layer order, the first halves of their tags, and the seal for its header."""
    salt = os.urandom(SALT_BYTES)
    sealer = Sealer(secret, salt, key)
    closed = [sealer.close(piece, layer) for layer, piece in enumerate(pieces)]
    return [c[0] for c in closed], tuple(c[1] for c in closed), Seal(secret.name, salt, tuple(c[2] for c in closed))
