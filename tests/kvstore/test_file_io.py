"""Every way of moving bytes between files and the arena keeps the same guarantees: threads, NIXL's POSIX backend, and
the fake."""

from __future__ import annotations

import errno
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from contracts.errors import ConfigError, PieceLost
from kvstore.tiers import nixl
from kvstore.tiers.file_io import NixlFileIo, Part, ThreadFileIo, make_file_io
from tests.kvstore.fake_tiers import FakeFileIo
from tests.kvstore.tier_harness import MIB, arena, file_io, nixl_io

__all__ = ["arena", "file_io"]


@pytest.fixture
def file(tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def content(arena, parts):
    return [bytes(arena.view[p.arena_offset : p.arena_offset + p.length]) for p in parts]


def test_what_is_written_to_a_file_is_read_back(file_io, arena, file):
    parts = [Part(4096 + i * 5000, i * 9000, 5000) for i in range(20)] + [Part(200_000, 500_000, 77)]
    file_io.write(file, parts)
    expected = content(arena, parts)
    for p, data in zip(parts, expected, strict=True):
        assert os.pread(file, p.length, p.file_offset) == data
    back = [Part(p.file_offset, p.arena_offset + MIB, p.length) for p in parts]
    file_io.read(file, back)
    assert content(arena, back) == expected


def test_more_parts_than_the_kernel_takes_in_one_call(file_io, arena, file):
    parts = [Part(i * 512, ((i * 7) % 3000) * 512, 512) for i in range(3000)]
    file_io.write(file, parts)
    assert os.fstat(file).st_size == 3000 * 512
    assert os.pread(file, 3000 * 512, 0) == b"".join(content(arena, parts))
    back = [Part(p.file_offset, 2 * MIB + p.file_offset, 512) for p in parts]
    file_io.read(file, back)
    assert content(arena, back) == content(arena, parts)


def test_parts_in_any_order_and_of_megabytes(file_io, arena, file):
    parts = [Part(MIB, 0, MIB), Part(0, MIB + 4096, 700_001)]
    file_io.write(file, parts)
    back = [Part(0, 2 * MIB, 700_001), Part(MIB, 3 * MIB, MIB)]
    file_io.read(file, back)
    assert content(arena, back) == content(arena, [parts[1], parts[0]])


def test_nothing_beside_the_parts_is_touched(file_io, arena, file):
    os.write(file, b"\xaa" * 65_536)
    before = bytes(arena.view)
    file_io.read(file, [Part(8192, 12_288, 4096), Part(100, 20_000, 33)])
    expected = bytearray(before)
    expected[12_288:16_384], expected[20_000:20_033] = b"\xaa" * 4096, b"\xaa" * 33
    assert bytes(arena.view) == expected
    file_io.write(file, [Part(4096, 0, 10)])
    assert os.pread(file, 65_536, 0) == b"\xaa" * 4096 + before[:10] + b"\xaa" * (65_536 - 4106)


@pytest.mark.parametrize("size", [0, 4095, 6000, 8191])
def test_a_short_file_is_a_lost_piece(file_io, file, size):
    os.write(file, b"x" * size)
    with pytest.raises(PieceLost):
        file_io.read(file, [Part(0, 0, 4096), Part(4096, 4096, 4096)])


def test_a_file_that_ends_where_the_part_does_is_whole(file_io, arena, file):
    os.write(file, b"y" * 8192)
    file_io.read(file, [Part(4096, 0, 4096)])
    assert arena.view[:4096] == b"y" * 4096


def test_a_descriptor_that_cannot_be_written_is_an_os_error(file_io, tmp_path):
    path = tmp_path / "read-only"
    path.write_bytes(b"x" * 8192)
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(OSError):  # noqa: PT011 - which errno depends on the implementation
        file_io.write(fd, [Part(0, 0, 4096)])
    os.close(fd)
    assert path.read_bytes() == b"x" * 8192


def test_after_an_error_the_next_call_works(file_io, arena, file, tmp_path):
    fd = os.open(tmp_path / "empty", os.O_RDONLY | os.O_CREAT)
    for _ in range(3):
        with pytest.raises(PieceLost):
            file_io.read(fd, [Part(0, 0, 4096)])
    os.close(fd)
    file_io.write(file, [Part(0, 0, 4096)])
    file_io.read(file, [Part(0, MIB, 4096)])
    assert arena.view[MIB : MIB + 4096] == arena.view[:4096]


def test_as_many_threads_may_call_as_it_says(file_io, arena, tmp_path):
    barrier = threading.Barrier(file_io.threads)

    def one(number: int) -> None:
        fd = os.open(tmp_path / f"file-{number}", os.O_RDWR | os.O_CREAT)
        barrier.wait(30)
        for turn in range(10):
            here, there = number * 65_536, 2 * MIB + number * 65_536
            file_io.write(fd, [Part(turn * 4096, here + turn * 4096, 4096)])
            file_io.read(fd, [Part(turn * 4096, there + turn * 4096, 4096)])
        os.close(fd)
        assert arena.view[there : there + 40_960] == arena.view[here : here + 40_960]

    with ThreadPoolExecutor(file_io.threads) as pool:
        list(pool.map(one, range(file_io.threads)))


def test_a_header_is_written_with_the_pieces(file_io, arena, file):
    header = os.urandom(4096)
    file_io.write(file, [Part(4096, 8192, 4096), Part(12_288, 0, 4096)], header)
    assert os.pread(file, 8192, 0) == header + bytes(arena.view[8192:12_288])
    assert os.pread(file, 4096, 12_288) == bytes(arena.view[:4096])


def test_many_transfers_are_under_way_at_once(file_io, arena, file):
    os.pwrite(file, data := os.urandom(64 * 4096), 0)
    moving = [file_io.begin("READ", file, [Part(i * 4096, i * 4096, 4096)]) for i in range(64)]
    while moving:
        moving = [m for m in moving if not m.ended()]
    assert bytes(arena.view[: len(data)]) == data


def joined(file_io, reads):
    moving = file_io.begin_joined(reads)
    while not moving.ended():
        time.sleep(0.0001)


def test_reads_of_several_files_go_as_one_transfer(file_io, arena, tmp_path):
    contents = [os.urandom(5 * 4096) for _ in range(6)]
    files = []
    for number, data in enumerate(contents):
        (tmp_path / f"file-{number}").write_bytes(data)
        files.append(os.open(tmp_path / f"file-{number}", os.O_RDONLY))
    reads = [(fd, [Part(4096 * i, (n * 5 + 4 - i) * 4096, 4096) for i in (1, 2, 4)]) for n, fd in enumerate(files)]
    joined(file_io, reads)
    for fd, parts in reads:
        assert content(arena, parts) == [os.pread(fd, p.length, p.file_offset) for p in parts]
        os.close(fd)


def test_one_bad_file_fails_the_transfer_that_it_is_part_of_and_the_next_one_works(file_io, arena, file, tmp_path):
    os.write(file, b"x" * 8192)
    bad = os.open(tmp_path / "write-only", os.O_WRONLY | os.O_CREAT)
    os.write(bad, b"y" * 8192)
    with pytest.raises(OSError):  # noqa: PT011 - which errno depends on the implementation
        joined(file_io, [(file, [Part(0, 0, 4096)]), (bad, [Part(0, 8192, 4096)])])
    os.close(bad)
    joined(file_io, [(file, [Part(0, 0, 4096)]), (file, [Part(4096, 8192, 4096)])])
    assert arena.view[:4096] == arena.view[8192:12_288] == b"x" * 4096


def test_gds_where_it_does_not_work_is_an_error_with_a_remedy(arena):
    if Path("/dev/nvidiactl").exists():
        pytest.skip("GDS may work here")
    nixl.set_environment("lo")
    with pytest.raises(ConfigError, match=r"kv.file_io = 'gds'.*set kv.file_io: auto or threads"):
        make_file_io("gds", arena, f"test-{time.monotonic_ns()}")


def test_two_instances_share_an_arena(arena, file):
    nixl.set_environment("lo")
    with nixl_io(arena) as writer, nixl_io(arena) as reader:
        writer.write(file, [Part(0, 0, 4096)])
        reader.read(file, [Part(0, MIB, 4096)])
    assert arena.view[MIB : MIB + 4096] == arena.view[:4096]


def test_the_choice_is_made_by_configuration(arena):
    nixl.set_environment("lo")
    assert isinstance(make_file_io("threads", arena, "test-choice"), ThreadFileIo)
    assert isinstance(make_file_io("nixl", arena, f"test-{time.monotonic_ns()}"), NixlFileIo)


def test_nixl_that_does_not_work_is_refused_by_name_and_auto_takes_threads(arena):
    taken = f"test-{time.monotonic_ns()}"
    arena.address = 1  # no memory of ours: registering it must fail, and what fails may not be used
    arena.size_bytes = -1
    with pytest.raises(ConfigError, match=r"kv\.file_io"):
        make_file_io("nixl", arena, taken)
    assert isinstance(make_file_io("auto", arena, taken), ThreadFileIo)


def test_the_fake_fails_when_told_to(arena, file):
    fake = FakeFileIo(arena)
    fake.error = OSError(errno.EIO, "medium error")
    for call in (fake.read, fake.write):
        with pytest.raises(OSError, match="medium error"):
            call(file, [Part(0, 0, 4096)])
