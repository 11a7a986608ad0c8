"""What the tiers' conformance suites share: an arena of random bytes, a shape of no round size, and chunks in it."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from contracts.kv import KvShape
from kvstore.core.instructions import FetchPiece, WriteSsd
from kvstore.tiers import nixl
from kvstore.tiers.arena import Arena
from kvstore.tiers.cluster_keys import ClusterKeys
from kvstore.tiers.encoded import encode_chunk, views
from kvstore.tiers.file_io import FileIo, NixlFileIo, ThreadFileIo
from tests.kvstore.fake_tiers import FakeFileIo

MIB = 1 << 20
SHAPE = KvShape.of_heads(b"f" * 32, 5, 3, 17, 16, "float32")  # pieces of no round size
#: An object of 10 MiB, which obstore sends in several parts.
BIG = KvShape.of_heads(b"B" * 32, 4, 16, 128, 160, "float32")
KEY, OTHER_KEY = b"k" * 32, b"o" * 32
KEYS = ClusterKeys(b"secret of the tests")


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = Arena(tmp_path / "arena", 4 * MIB)
    made.view[:] = os.urandom(made.size_bytes)
    yield made
    made.close()


@pytest.fixture(params=["threads", "nixl", "fake"])
def file_io(request: pytest.FixtureRequest, arena: Arena) -> Iterator[FileIo]:
    """Each way of moving bytes between files and the arena."""
    nixl.set_environment("lo")
    if request.param == "nixl":
        with nixl_io(arena) as made:
            yield made
    else:
        yield (ThreadFileIo if request.param == "threads" else FakeFileIo)(arena)


@contextlib.contextmanager
def nixl_io(arena: Arena) -> Iterator[NixlFileIo]:
    """NIXL's. Its agent goes while the arena is still mapped, not whenever the garbage collector comes: in the middle
    of another test, with memory registered that is somebody else's now."""
    made = NixlFileIo(arena, f"test-{time.monotonic_ns()}")
    agent = weakref.ref(made._agent)
    try:
        yield made
    finally:
        del made._agent
    # A thread that has just moved something may hold it for a moment still.
    gone_by_s = time.monotonic() + 10.0
    while agent() is not None and time.monotonic() < gone_by_s:
        gc.collect()
        time.sleep(0.01)
    assert agent() is None


@pytest.fixture
def big_arena(tmp_path: Path) -> Iterator[Arena]:
    made = Arena(tmp_path / "big-arena", 2 * BIG.chunk_bytes)
    made.view[: BIG.chunk_bytes] = os.urandom(BIG.chunk_bytes)
    yield made
    made.close()


def written(arena: Arena, key: bytes = KEY, base: int = 0, shape: KvShape = SHAPE) -> WriteSsd:
    """A chunk whose pieces lie one after the other from `base` on, with the arena's checksums."""
    offsets = tuple(base + layer * shape.piece_bytes for layer in range(shape.layers))
    return WriteSsd(key, shape, offsets, tuple(arena.checksum(o, shape.piece_bytes) for o in offsets))


def object_of(arena: Arena, write: WriteSsd) -> bytes:
    """The chunk as an object."""
    return encode_chunk(
        KEYS, write.key, write.shape, views(arena, write.shape, write.offsets), write.checksums
    ).to_bytes()


def digests(arena: Arena, write: WriteSsd) -> tuple[int, ...]:
    """The checksums of a raw, unencrypted copy of the chunk."""
    return KEYS.digests(views(arena, write.shape, write.offsets), write.key)


def wanted(
    arena: Arena, write: WriteSsd, layers: Sequence[int], base: int = 2 * MIB, sums: Sequence[int] | None = None
) -> list[FetchPiece]:
    """These layers of the chunk, wanted from `base` on. sums: of the copy; by default, of a raw one."""
    size, sums = write.shape.piece_bytes, digests(arena, write) if sums is None else sums
    return [FetchPiece(write.key, layer, base + layer * size, 0, sums[layer]) for layer in layers]


def assert_same(arena: Arena, write: WriteSsd, pieces: Sequence[FetchPiece]) -> None:
    """What was brought is what was written."""
    size = write.shape.piece_bytes
    for p in pieces:
        assert bytes(arena.view[p.offset : p.offset + size]) == bytes(arena.view[write.offsets[p.layer] :][:size])
