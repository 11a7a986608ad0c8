"""Records and objects of a bucket, and everything that may be done to their bits: for test_forgeries.py and
tests/faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import xxhash

from contracts.errors import PieceLost
from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core.tombstone import Tombstone
from kvstore.tiers.encoded import Opened, StoredChunk, encode_chunk
from kvstore.tiers.format import decode_header
from kvstore.tiers.key_names import KeyName
from kvstore.tiers.manifests import (
    confirmed_path,
    decode_confirmed,
    decode_manifest,
    decode_tombstone,
    encode_confirmed,
    encode_manifest,
    encode_tombstone,
    manifest_path,
    tombstone_path,
)
from kvstore.tiers.sealing import SessionSecret
from kvstore.tiers.session_keys import decode_key, encode_key
from tests.kvstore.tier_harness import KEY, KEYS

SESSION = SessionKey("tenant", "session")
SMALL = KvShape.of_heads(b"s" * 32, 2, 1, 8, 8, "float16")
SECRET = SessionSecret(KeyName(KEYS.tag(SESSION), 3, b"number.."), b"S" * 32)


class Subject(NamedTuple):
    """Stored bytes, and what reads them: it raises PieceLost, or returns what is compared."""

    name: str
    data: bytes
    read: Callable[[bytes], object]


def chunk(secret: SessionSecret | None, key: bytes = KEY, seed: int = 1) -> StoredChunk:
    """A small chunk of random pieces."""
    rng = random.Random(seed)
    pieces = [memoryview(rng.randbytes(SMALL.piece_bytes)) for _ in range(SMALL.layers)]
    sums = tuple(map(xxhash.xxh3_64_intdigest, pieces))
    return encode_chunk(KEYS, key, SMALL, pieces, sums, None, secret)


def read_chunk(data: bytes, key: bytes = KEY, secret: SessionSecret | None = SECRET) -> list[bytes]:
    """All pieces of the chunk's object, as the tiers read them. Raises PieceLost."""
    header = decode_header(KEYS, data)
    if header.key != key or len(data) != header.layout.object_bytes:
        raise PieceLost("another chunk, or another length")
    opened = Opened(KEYS, header, None, secret if header.seal is not None else None)
    pieces = []
    for layer, (at, length) in enumerate(zip(header.layout.offsets[:-1], header.layout.lengths, strict=True)):
        into = memoryview(bytearray(SMALL.piece_bytes))
        opened.read(memoryview(data)[at : at + length], layer, header.checksums[layer], into)
        pieces.append(bytes(into))
    return pieces


def subjects() -> list[Subject]:
    """One of each kind."""
    manifest = Manifest(SESSION, "model", SMALL.fingerprint, [b"a" * 32, b"b" * 32], 128, 12.5, [b"c" * 32], 3, b"note")
    tombstone = Tombstone(SESSION, 4, {b"a" * 32: SMALL.fingerprint, b"b" * 32: SMALL.fingerprint})
    grave = encode_tombstone(KEYS, tombstone)
    path, grave_path = manifest_path(SESSION), tombstone_path(SESSION, grave)
    confirmed = encode_confirmed(KEYS, "node-0", ["x" * 32, "y" * 32])
    return [
        Subject("plain chunk", chunk(None).to_bytes(), read_chunk),
        Subject("encrypted chunk", chunk(SECRET).to_bytes(), read_chunk),
        Subject("manifest", encode_manifest(KEYS, manifest), lambda data: decode_manifest(KEYS, path, data)),
        Subject("tombstone", grave, lambda data: decode_tombstone(KEYS, grave_path, data)),
        Subject("confirmation", confirmed, lambda data: decode_confirmed(KEYS, confirmed_path("node-0"), data)),
        Subject(
            "session key", encode_key(KEYS, SESSION.tenant, SECRET), lambda data: decode_key(KEYS, SECRET.name, data)
        ),
    ]


def flip_bits(times: int, seed: int) -> dict[str, int]:
    """Flip single bits, one after the other. Returns by subject how many were noticed; raises AssertionError where a
    flipped bit changed what is read. Bits of padding are the only ones that may go unnoticed."""
    rng, noticed = random.Random(seed), dict[str, int]()
    made = [(s, s.read(s.data), bytearray(s.data)) for s in subjects()]
    for n in range(times):
        subject, right, data = made[n % len(made)]
        bit = rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        try:
            found = subject.read(bytes(data))
        except PieceLost:
            noticed[subject.name] = noticed.get(subject.name, 0) + 1
        else:
            assert found == right, f"{subject.name}: bit {bit} changed what is read (seed {seed})"
            assert "chunk" in subject.name, f"{subject.name}: bit {bit} was not noticed (seed {seed})"
        data[bit // 8] ^= 1 << bit % 8
    return noticed
