"""What is kept with a session so that a hint can bring its KV into an engine's own cache: the tokens, by which such an
engine finds it. A vLLM connector writes them as the manifest's `note`, which stores do not read.

Runs in vLLM's environment: see ARCHITECTURE.md about `upbeat-vllm`.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgpack

from contracts.ids import SessionKey
from contracts.kv import MAX_NOTE_BYTES

#: Token ids of a note at most; longer sessions come into the arena only.
MOST_TOKENS = 1 << 19


@dataclass(frozen=True, slots=True)
class WarmUp:
    """cache_salt: vLLM's, of the session's requests. tokens: none: the session was erased. expires_s: seconds from
    now."""

    session: SessionKey
    cache_salt: str
    tokens: Sequence[int]
    expires_s: float


def note_of(cache_salt: str, tokens: Sequence[int]) -> bytes:
    """The manifest's note; empty when it would be too long."""
    if len(tokens) > MOST_TOKENS:
        return b""
    note: bytes = msgpack.packb([cache_salt, zlib.compress(_swapped(array("I", tokens)).tobytes(), 1)])
    return note if len(note) <= MAX_NOTE_BYTES else b""


def encode_warm_up(session: SessionKey, note: bytes, tokens: int, expires_s: float) -> bytes:
    """A message of the connector to its sidecar. tokens: so many of the note's have KV in the arena."""
    message: bytes = msgpack.packb([session.tenant, session.session_id, note, tokens, expires_s])
    return message


def encode_forget(session: SessionKey) -> bytes:
    """A message of the connector to its sidecar: the session was erased."""
    message: bytes = msgpack.packb([session.tenant, session.session_id, b"", 0, 0.0])
    return message


def decode_warm_up(message: bytes) -> WarmUp:
    """Raises ValueError for anything else."""
    try:
        tenant, session_id, note, count, expires_s = msgpack.unpackb(message)
        session = SessionKey(str(tenant), str(session_id))
        if not count:
            return WarmUp(session, "", (), 0.0)
        cache_salt, packed = msgpack.unpackb(note)
        reader = zlib.decompressobj()
        data = reader.decompress(packed, 4 * MOST_TOKENS)
        if not reader.eof or len(data) % 4:
            raise ValueError("no list of tokens")
        tokens = array("I")
        tokens.frombytes(data)
        if not tokens[:count]:
            raise ValueError("no tokens")
        return WarmUp(session, str(cache_salt), _swapped(tokens)[:count], float(expires_s))
    except (ValueError, TypeError, msgpack.UnpackException, zlib.error) as e:
        raise ValueError(f"no message about a session to warm up: {e}") from e


def _swapped(tokens: array[int]) -> array[int]:
    """Little-endian, or back."""
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens
