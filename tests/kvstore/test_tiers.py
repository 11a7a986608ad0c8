"""Every implementation of a seam keeps the same promises: file I/O twice, the blob tier on a directory and on a real S3 server,
transports twice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.errors import PieceLost
from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core.events import Fault
from kvstore.core.instructions import FetchPiece, WriteSsd
from kvstore.tiers import nixl
from kvstore.tiers.arena import Arena
from kvstore.tiers.blob import BlobTier, chunk_path, open_store
from kvstore.tiers.file_io import NixlFileIo, Part, ThreadFileIo
from kvstore.tiers.format import object_bytes, piece_offset
from kvstore.tiers.ssd import SsdTier, chunk_object
from kvstore.tiers.transport import Card, LeasedRanges, PeerRange
from kvstore.tiers.transport_auto import AutoTransport
from kvstore.tiers.transport_nixl import NixlTransport
from kvstore.tiers.transport_socket import SocketTransport

MIB = 1 << 20
SHAPE = KvShape(b"f" * 32, 5, 3, 17, 16, "float32")  # pieces of no round size
KEY, OTHER_KEY = b"k" * 32, b"o" * 32
STRIDE = 8192


@pytest.fixture(autouse=True)
def _loopback() -> None:
    nixl.set_environment("lo")


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = Arena(tmp_path / "arena", 4 * MIB)
    made.view[:] = os.urandom(made.size_bytes)
    yield made
    made.close()


@pytest.fixture(params=["threads", "nixl"])
def file_io(request: pytest.FixtureRequest, arena: Arena):
    return ThreadFileIo(arena) if request.param == "threads" else NixlFileIo(arena, f"test-{time.monotonic_ns()}")


# ---- file I/O


def test_what_is_written_to_a_file_is_read_back(file_io, arena, tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    parts = [Part(4096 + i * 5000, i * 9000, 5000) for i in range(20)] + [Part(200_000, 500_000, 77)]
    file_io.write(fd, parts)
    expected = [bytes(arena.view[p.arena_offset : p.arena_offset + p.length]) for p in parts]
    for p, data in zip(parts, expected, strict=True):
        assert os.pread(fd, p.length, p.file_offset) == data
    back = [Part(p.file_offset, p.arena_offset + MIB, p.length) for p in parts]
    file_io.read(fd, back)
    assert [bytes(arena.view[p.arena_offset : p.arena_offset + p.length]) for p in back] == expected
    os.close(fd)


def test_a_short_file_is_a_lost_piece(file_io, tmp_path):
    path = tmp_path / "short"
    path.write_bytes(b"x" * 6000)
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(PieceLost):
        file_io.read(fd, [Part(0, 0, 4096), Part(4096, 4096, 4096)])
    os.close(fd)


def test_a_descriptor_that_cannot_be_written_is_an_os_error(file_io, tmp_path):
    path = tmp_path / "read-only"
    path.write_bytes(b"x" * 8192)
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(OSError):  # noqa: PT011 - which errno depends on the implementation
        file_io.write(fd, [Part(0, 0, 4096)])
    os.close(fd)


# ---- the SSD


@pytest.fixture
def ssd(tmp_path: Path, arena: Arena, file_io) -> SsdTier:
    return SsdTier(tmp_path / "ssd", arena, file_io, file_io)


def written(arena: Arena, key: bytes = KEY, base: int = 0) -> WriteSsd:
    offsets = tuple(base + layer * STRIDE for layer in range(SHAPE.layers))
    return WriteSsd(key, SHAPE, offsets, tuple(arena.checksum(o, SHAPE.piece_bytes) for o in offsets))


def wanted(write: WriteSsd, layers: range, base: int = 2 * MIB) -> list[FetchPiece]:
    return [FetchPiece(write.key, layer, base + layer * STRIDE, 0, write.checksums[layer]) for layer in layers]


def assert_same(arena: Arena, write: WriteSsd, pieces: list[FetchPiece]) -> None:
    size = SHAPE.piece_bytes
    for p in pieces:
        assert bytes(arena.view[p.offset : p.offset + size]) == bytes(arena.view[write.offsets[p.layer] :][:size])


def test_a_chunk_comes_back_from_the_ssd_whole_and_in_parts(ssd, arena):
    write = written(arena)
    assert ssd.write([write]) == [True]
    for layers in (range(5), range(2), range(3, 5)):
        pieces = wanted(write, layers)
        assert ssd.read(SHAPE, pieces) == {}
        assert_same(arena, write, pieces)


def test_recovery_finds_what_is_whole_and_deletes_the_rest(ssd, arena):
    good, short, flipped = written(arena), written(arena, b"s" * 32), written(arena, b"h" * 32)
    assert ssd.write([good, short, flipped]) == [True] * 3
    path = ssd.path(short.key, SHAPE.fingerprint)
    os.truncate(path, object_bytes(SHAPE) - 1)
    header = ssd.path(flipped.key, SHAPE.fingerprint)
    header.write_bytes(header.read_bytes()[:40] + b"\x55" + header.read_bytes()[41:])
    ssd.path(b"r" * 32, SHAPE.fingerprint).write_bytes(path.parent.joinpath(good.key.hex()).read_bytes())  # another chunk's name
    (path.parent / "not-hexadecimal").write_bytes(b"")
    (path.parent / (b"t" * 32).hex()).with_suffix(".part").write_bytes(b"torn")
    recovery = ssd.recover()
    assert [(c.key, c.shape, c.checksums) for c in recovery.copies] == [(KEY, SHAPE, good.checksums)]
    assert recovery.deleted == 5
    assert [p.name for p in path.parent.iterdir()] == [KEY.hex()]


def test_a_flipped_bit_in_a_piece_is_that_pieces_fault_only(ssd, arena):
    write = written(arena)
    ssd.write([write])
    path = ssd.path(KEY, SHAPE.fingerprint)
    data = bytearray(path.read_bytes())
    data[piece_offset(SHAPE, 2) + 9] ^= 4
    path.write_bytes(data)
    assert ssd.read(SHAPE, wanted(write, range(5))) == {2: Fault.CORRUPT}


def test_a_missing_file_and_a_short_one_are_faults_and_not_errors(ssd, arena):
    write = written(arena)
    assert set(ssd.read(SHAPE, wanted(write, range(5))).values()) == {Fault.MISSING}
    ssd.write([write])
    os.truncate(ssd.path(KEY, SHAPE.fingerprint), piece_offset(SHAPE, 3))
    assert set(ssd.read(SHAPE, wanted(write, range(5))).values()) == {Fault.CORRUPT}


def test_a_chunk_that_cannot_be_written_leaves_nothing_and_does_not_harm_its_group(ssd, arena):
    good, bad = written(arena), written(arena, OTHER_KEY)
    ssd.path(OTHER_KEY, SHAPE.fingerprint).mkdir(parents=True)  # a rename onto it must fail
    assert ssd.write([good, bad]) == [True, False]
    assert [p.name for p in ssd.path(KEY, SHAPE.fingerprint).parent.iterdir() if p.is_file()] == [KEY.hex()]


# ---- the blob tier


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    rclone = Path(sys.executable).with_name("rclone")
    root = tmp_path_factory.mktemp("s3")
    (root / "bucket").mkdir()
    port = 20_000 + os.getpid() % 5_000
    address = f"127.0.0.1:{port}"
    command = [rclone, "serve", "s3", "--addr", address, "--auth-key", "access,secret", root]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield {"endpoint": f"http://{address}", "access_key_id": "access", "secret_access_key": "secret", "region": "us-east-1"}
    server.kill()
    server.wait()


@pytest.fixture(params=["directory", "s3"])
async def blob(request: pytest.FixtureRequest, arena: Arena, tmp_path: Path) -> BlobTier:
    if request.param == "directory":
        return BlobTier(open_store("", {}, tmp_path / "blob"), arena)
    tier = BlobTier(open_store("s3://bucket", request.getfixturevalue("s3"), tmp_path), arena)
    async with asyncio.timeout(20):
        while not await tier.write(b"p" * 32, SHAPE.fingerprint, b"probe"):  # noqa: ASYNC110 - until the server is up
            await asyncio.sleep(0.1)
    return tier


async def test_a_chunk_comes_back_from_the_blob_tier_from_memory_and_from_a_file(blob, arena, ssd):
    write, second = written(arena), written(arena, OTHER_KEY, MIB)
    assert await blob.write(KEY, SHAPE.fingerprint, chunk_object(arena, KEY, SHAPE, write.offsets, write.checksums))
    ssd.write([second])
    assert await blob.write(OTHER_KEY, SHAPE.fingerprint, ssd.path(OTHER_KEY, SHAPE.fingerprint))
    for w in (write, second):
        found = await blob.probe(w.key, SHAPE.fingerprint)
        assert found is not None and (found.shape, found.checksums) == (SHAPE, w.checksums)
        for layers in (range(5), range(1), range(2, 4)):
            pieces = wanted(w, layers)
            assert await blob.read(SHAPE, pieces) == {}
            assert_same(arena, w, pieces)


async def test_what_is_not_in_the_blob_tier_is_missing(blob, arena):
    absent = b"a" * 32
    assert await blob.probe(absent, SHAPE.fingerprint) is None
    write = WriteSsd(absent, SHAPE, (), (0,) * 5)
    assert set((await blob.read(SHAPE, wanted(write, range(5)))).values()) == {Fault.MISSING}
    await blob.delete_chunk(absent, SHAPE.fingerprint)


async def test_damaged_objects_are_faults_and_a_damaged_header_deletes_the_object(blob, arena):
    write = written(arena)
    whole = chunk_object(arena, KEY, SHAPE, write.offsets, write.checksums)
    flipped = bytearray(whole)
    flipped[piece_offset(SHAPE, 1)] ^= 1
    await blob.write(KEY, SHAPE.fingerprint, bytes(flipped))
    assert await blob.read(SHAPE, wanted(write, range(5))) == {1: Fault.CORRUPT}
    await blob.write(KEY, SHAPE.fingerprint, whole[: piece_offset(SHAPE, 2)])
    assert set((await blob.read(SHAPE, wanted(write, range(3, 5)))).values()) == {Fault.CORRUPT}
    assert await blob.probe(KEY, SHAPE.fingerprint) is None
    await blob.write(KEY, SHAPE.fingerprint, b"\0" * 10_000)
    assert await blob.probe(KEY, SHAPE.fingerprint) is None
    assert set((await blob.read(SHAPE, wanted(write, range(5)))).values()) == {Fault.MISSING}


async def test_manifests_are_stored_listed_replaced_and_deleted(blob):
    sessions = [SessionKey("tenant", "s:1"), SessionKey("tenant", "..x"), SessionKey("../etc", "s")]
    manifests = [Manifest(s, "m", b"f" * 32, [KEY], 16, 1.0) for s in sessions]
    for m in manifests:
        assert await blob.put_manifest(m)
    assert sorted(await blob.list_manifests(100), key=str) == sorted(manifests, key=str)
    newer = Manifest(sessions[0], "m", b"f" * 32, [KEY, OTHER_KEY], 32, 2.0)
    await blob.put_manifest(newer)
    assert await blob.get_manifest(sessions[0]) == newer
    await blob.delete_manifest(sessions[0])
    assert await blob.get_manifest(sessions[0]) is None
    assert len(await blob.list_manifests(1)) == 1
    for m in manifests:
        await blob.delete_manifest(m.session)


async def test_a_store_that_is_not_there_is_a_miss_in_bounded_time(arena, tmp_path):
    options = {"endpoint": "http://127.0.0.1:9", "access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
    away = BlobTier(open_store("s3://bucket", options, tmp_path), arena)
    async with asyncio.timeout(30):
        assert await away.probe(KEY, SHAPE.fingerprint) is None
        assert await away.get_manifest(SessionKey("t", "s")) is None


def test_objects_lie_where_the_format_says():
    assert chunk_path(KEY, SHAPE.fingerprint) == f"chunks/{'66' * 8}/{KEY.hex()}"


# ---- transports


@pytest.fixture(params=["socket", "nixl", "auto", "auto with a peer that NIXL does not reach"])
async def pair(request: pytest.FixtureRequest, arena: Arena, tmp_path: Path, free_ports):
    """(owner's transport, its card, its leases, reader's transport); the owner's arena is `arena`."""
    mine = Arena(tmp_path / "reader-arena", 4 * MIB)
    leases = LeasedRanges()
    address, tag = f"127.0.0.1:{free_ports(1)}", time.monotonic_ns()
    owner, reader = (
        SocketTransport(arena, leases, address, address),
        SocketTransport(mine, LeasedRanges(), f"127.0.0.1:{free_ports(1)}", ""),
    )
    if request.param != "socket":
        nixl_owner, nixl_reader = NixlTransport(arena, leases, f"owner-{tag}"), NixlTransport(mine, LeasedRanges(), f"reader-{tag}")
        if request.param == "nixl":
            owner, reader = nixl_owner, nixl_reader
        else:
            owner, reader = AutoTransport(nixl_owner, owner), AutoTransport(nixl_reader, reader)
    await owner.start()
    await reader.start()
    card = owner.fill(Card("node-0", f"i-{time.monotonic_ns()}", b"", arena.address, arena.size_bytes, ""))
    if "not reach" in request.param:
        card = card._replace(nixl_metadata=b"nonsense")
    yield card, leases, reader, mine
    await reader.stop()
    await owner.stop()
    mine.close()


async def test_leased_ranges_arrive_byte_for_byte(pair, arena):
    card, leases, reader, mine = pair
    ranges = [PeerRange(i * 70_000, ((i * 7) % 40) * 70_000, 65_000) for i in range(40)]
    leases.open("lease")
    leases.add("lease", [(r.remote_offset, r.length) for r in ranges])
    for _ in range(2):
        assert await reader.read(card, "lease", ranges)
        for r in ranges:
            assert mine.view[r.local_offset : r.local_offset + r.length] == arena.view[r.remote_offset : r.remote_offset + r.length]


async def test_concurrent_reads_do_not_mix(pair, arena):
    card, leases, reader, mine = pair
    groups = [[PeerRange((g * 10 + i) * 40_000, (g * 10 + i) * 40_000, 40_000) for i in range(10)] for g in range(8)]
    leases.open("lease")
    leases.add("lease", [(r.remote_offset, r.length) for group in groups for r in group])
    assert all(await asyncio.gather(*(reader.read(card, "lease", group) for group in groups)))
    assert mine.view[: 80 * 40_000] == arena.view[: 80 * 40_000]


async def test_sockets_serve_exactly_what_is_leased_to_the_asker(arena, tmp_path, free_ports):
    leases, mine = LeasedRanges(), Arena(tmp_path / "reader-arena", MIB)
    address = f"127.0.0.1:{free_ports(1)}"
    owner, reader = (
        SocketTransport(arena, leases, address, address),
        SocketTransport(mine, LeasedRanges(), f"127.0.0.1:{free_ports(1)}", ""),
    )
    await owner.start()
    card = owner.fill(Card("node-0", "i", b"", 0, arena.size_bytes, ""))
    leases.open("mine")
    leases.open("other")
    leases.add("mine", [(4096, 4096)])
    assert await reader.read(card, "mine", [PeerRange(4096, 0, 4096)])
    for lease, offset, length in (
        ("mine", 4096, 4095),
        ("mine", 0, 4096),
        ("other", 4096, 4096),
        ("unknown", 4096, 4096),
        ("mine", 1 << 60, 8),
    ):
        assert not await reader.read(card, lease, [PeerRange(offset, 0, length)])
    leases.close("mine")
    assert not await reader.read(card, "mine", [PeerRange(4096, 0, 4096)])
    await reader.stop()
    await owner.stop()
    mine.close()


async def test_nonsense_on_the_socket_harms_nobody(arena, free_ports):
    address = f"127.0.0.1:{free_ports(1)}"
    owner = SocketTransport(arena, LeasedRanges(), address, address)
    await owner.start()
    host, port = address.split(":")
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"UPBT" + b"\xff" * 6, b"UPBT\x05\x00\x01\x00\x00\x00\xff\xfe\xfd\xfc\xfb" + b"\0" * 16):
        with contextlib.suppress(ConnectionError):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(nonsense)
            assert await asyncio.wait_for(reader.read(), 10) == b""
            writer.close()
    await owner.stop()
