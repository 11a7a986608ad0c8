"""Ways in which the bytes of stored objects go bad, at random. Each function changes at least one byte, length or
name."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from kvstore.tiers.cluster_keys import ClusterKeys
from kvstore.tiers.format import BLOCK

#: In a header: where the pieces' entries begin, and their length.
_PIECES, _PIECE_BYTES = 176, 20

Damage = Callable[[random.Random, list[Path]], int]


def flip(rng: random.Random, paths: list[Path]) -> int:
    """One to eight bits."""
    data = bytearray(paths[0].read_bytes())
    for bit in rng.sample(range(len(data) * 8), rng.randint(1, 8)):
        data[bit // 8] ^= 1 << bit % 8
    paths[0].write_bytes(data)
    return 1


def truncate(rng: random.Random, paths: list[Path]) -> int:
    """To nothing, by a byte, at a block, or anywhere."""
    size = paths[0].stat().st_size
    cut = rng.choice([0, size - 1, rng.randrange(size // BLOCK) * BLOCK, rng.randrange(size)])
    with paths[0].open("r+b") as f:
        f.truncate(cut)
    return 1


def extend(rng: random.Random, paths: list[Path]) -> int:
    """By a byte, a block of zeros, or by something."""
    more = rng.choice([b"\0", b"\0" * BLOCK, rng.randbytes(rng.randint(1, 3 * BLOCK))])
    with paths[0].open("ab") as f:
        f.write(more)
    return 1


def swap_within(rng: random.Random, paths: list[Path]) -> int:
    """Two blocks of one object change places."""
    data = paths[0].read_bytes()
    blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    a, b = rng.sample(range(len(blocks)), 2)
    if blocks[a] == blocks[b]:
        return 0
    blocks[a], blocks[b] = blocks[b], blocks[a]
    paths[0].write_bytes(b"".join(blocks))
    return 1


def swap_between(rng: random.Random, paths: list[Path]) -> int:
    """A block of one object and one of another change places."""
    first, second = (bytearray(p.read_bytes()) for p in paths[:2])
    same = rng.random() < 0.5
    a = rng.randrange(len(first) // BLOCK) * BLOCK
    b = min(a, len(second) - BLOCK) if same else rng.randrange(len(second) // BLOCK) * BLOCK
    one, other = first[a : a + BLOCK], second[b : b + BLOCK]
    if one == other:
        return 0
    first[a : a + BLOCK], second[b : b + BLOCK] = other, one
    for path, data in zip(paths, (first, second), strict=False):
        path.write_bytes(data)
    return 2


def zero(rng: random.Random, paths: list[Path]) -> int:
    """One to three blocks read as zeros, or everything from somewhere on."""
    data = bytearray(paths[0].read_bytes())
    before = bytes(data)
    blocks = len(data) // BLOCK
    if rng.random() < 0.3:
        first = rng.randrange(blocks)
        data[first * BLOCK :] = bytes(len(data) - first * BLOCK)
    else:
        for block in rng.sample(range(blocks), rng.randint(1, min(3, blocks))):
            data[block * BLOCK : (block + 1) * BLOCK] = bytes(BLOCK)
    if data == before:
        return 0
    paths[0].write_bytes(data)
    return 1


def garble(rng: random.Random, paths: list[Path]) -> int:
    """A run of random bytes somewhere."""
    data = bytearray(paths[0].read_bytes())
    at = rng.randrange(len(data))
    run = rng.randbytes(min(rng.randint(1, 2 * BLOCK), len(data) - at))
    if data[at : at + len(run)] == run:
        return 0
    data[at : at + len(run)] = run
    paths[0].write_bytes(data)
    return 1


def rename(rng: random.Random, paths: list[Path]) -> int:
    """Two objects have each other's name."""
    one, other = paths[:2]
    aside = one.with_name(one.name + "-aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    return 2


def header(rng: random.Random, paths: list[Path]) -> int:
    """Bytes of the header only."""
    data = bytearray(paths[0].read_bytes())
    for at in rng.sample(range(BLOCK), rng.randint(1, 16)):
        data[at] ^= rng.randint(1, 255)
    paths[0].write_bytes(data)
    return 1


def old_format(rng: random.Random, paths: list[Path]) -> int:
    """A sound header of another format version: what an older or newer release left behind."""
    data = bytearray(paths[0].read_bytes())
    version = int.from_bytes(data[8:12], "little")
    data[8:12] = rng.choice([v for v in (0, 1, 2, 3, 4, 1 << 20) if v != version]).to_bytes(4, "little")
    paths[0].write_bytes(data)
    return 1


def forge(rng: random.Random, paths: list[Path]) -> int:
    """Other pieces, with digests and a header that are right for whoever does not know the cluster secret."""
    data = bytearray(paths[0].read_bytes())
    at = rng.randrange(BLOCK, len(data))
    data[at] ^= rng.randint(1, 255)
    layers = int.from_bytes(data[80:84], "little")
    for layer in range(layers):
        entry = _PIECES + _PIECE_BYTES * layer
        length = int.from_bytes(data[entry + 16 : entry + 20], "little")
        start = BLOCK + layer * -(-length // BLOCK) * BLOCK
        data[entry : entry + 8] = blake3(data[start : start + length]).digest(length=8)
    body = bytes(data[: BLOCK - 32])
    data[BLOCK - 32 : BLOCK] = (
        ClusterKeys(rng.randbytes(32)).of_header(body) if rng.random() < 0.5 else blake3(body).digest()
    )
    paths[0].write_bytes(data)
    return 1


#: How often each kind is drawn.
KINDS: dict[Damage, int] = {
    flip: 20,
    truncate: 12,
    extend: 6,
    swap_within: 10,
    swap_between: 12,
    zero: 12,
    garble: 10,
    rename: 8,
    header: 6,
    old_format: 4,
    forge: 8,
}
