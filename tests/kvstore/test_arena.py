"""The arena: a file that several processes map, on small, transparent huge or hugetlbfs pages."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contracts.errors import ConfigError
from contracts.ids import SessionKey
from kvstore.tiers.arena import Arena
from storelink.arena_file import Pages, free_bytes, map_file, offered, rounded
from storelink.arena_sharing import MARK_BYTES, SharedArena
from tests.kvstore.fake_worker import FakeWorker, assert_pieces, make_chunks, make_shape

MIB = 1 << 20
HUGE = 2 * MIB
_POOL = Path("/proc/sys/vm/nr_hugepages")
Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """A function: a fresh mount of a file system with these options; skips where mounting is not permitted."""
    mounted: list[Path] = []

    def make(file_system: str, options: str) -> Path:
        place = tmp_path / f"mount-{len(mounted)}"
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", file_system, "-o", options, "none", place], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"mounting {file_system} with {options} is not permitted here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield make
    for place in mounted:
        subprocess.run(["umount", "-l", place], check=True)


@pytest.fixture
def huge_pool() -> Iterator[Callable[[int], None]]:
    """A function: add so many pages to the machine's pool; skips where that is not permitted."""
    added = 0

    def add(pages: int) -> None:
        nonlocal added
        try:
            before = int(_POOL.read_text())
            _POOL.write_text(str(before + pages))
        except OSError as e:
            pytest.skip(f"the pool of huge pages cannot be changed here: {e}")
        added += int(_POOL.read_text()) - before
        if added < pages:
            pytest.skip(f"the machine gave {added} of {pages} huge pages")

    yield add
    if added:
        _POOL.write_text(str(max(0, int(_POOL.read_text()) - added)))


def huge_kib_of_this_process(path: Path) -> int:
    """How much of the mapping of `path` is mapped by huge pages."""
    total, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[0] in "0123456789abcdef" and "-" in line.split()[0]:
            here = line.endswith(str(path))
        elif here and line.split(":")[0] in ("ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb"):
            total += int(line.split()[1])
    return total


def test_an_arena_is_as_large_as_asked_and_gone_when_closed(tmp_path):
    arena = Arena(tmp_path / "arena", 3 * MIB + 4096)
    assert arena.size_bytes == len(arena.view) == os.stat(arena.path).st_size - MARK_BYTES == 3 * MIB + 4096
    arena.view[-4096:] = b"x" * 4096
    shared = SharedArena(arena.path, arena.size_bytes, arena.nonce, arena.attachment(), "auto")
    other = shared.mapped
    assert other[arena.size_bytes - 4096 : arena.size_bytes] == b"x" * 4096
    other[:4] = b"back"
    assert arena.view[:4] == b"back"
    arena.close()
    assert not arena.path.exists()


def test_a_file_that_is_shorter_than_announced_is_not_mapped(tmp_path):
    (tmp_path / "short").write_bytes(b"x" * 4096)
    with (tmp_path / "short").open("r+b") as file, pytest.raises(OSError, match="shorter"):
        map_file(file.fileno(), 8192, "auto")


def test_an_arena_that_does_not_fit_is_refused_with_the_remedy(mount):
    place = mount("tmpfs", "size=8m")
    with pytest.raises(OSError, match=r"needs 16 MiB .* has 8; lower kv\.dram_gib or enlarge it"):
        Arena(place / "arena", 16 * MIB)
    assert not list(place.iterdir())


def test_without_huge_pages_on_is_refused_and_auto_and_off_take_small_ones(mount):
    place = mount("tmpfs", "size=64m,huge=never")
    assert offered(place) == Pages("small", mmap.PAGESIZE)
    with pytest.raises(ConfigError, match=r"kv\.hugepages = 'on': .* set kv\.hugepages: auto"):
        Arena(place / "arena", 16 * MIB, "on")
    for wanted in ("auto", "off"):
        arena = Arena(place / "arena", 16 * MIB, wanted)
        assert arena.pages.kind == "small"
        arena.view[:] = b"x" * arena.size_bytes
        assert huge_kib_of_this_process(arena.path) == 0
        arena.close()


@pytest.mark.parametrize("option", ["advise", "within_size", "always"])
def test_a_tmpfs_that_offers_transparent_pages_gives_them(mount, option):
    place = mount("tmpfs", f"size=64m,huge={option}")
    if Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text().find("[deny]") >= 0:
        pytest.skip("the machine denies huge pages to every tmpfs")
    assert offered(place) == Pages("transparent", HUGE)
    for wanted in ("auto", "on"):
        arena = Arena(place / "arena", 16 * MIB, wanted)
        assert arena.pages.kind == "transparent"
        arena.view[:] = b"x" * arena.size_bytes
        assert huge_kib_of_this_process(arena.path) > 0
        arena.close()
    arena = Arena(place / "arena", 16 * MIB, "off")
    arena.view[:] = b"x" * arena.size_bytes
    assert (arena.pages.kind, huge_kib_of_this_process(arena.path)) == ("small", 0)
    arena.close()


def test_on_a_hugetlbfs_the_arena_is_rounded_up_and_every_process_maps_it(mount, huge_pool):
    huge_pool(4)
    place = mount("hugetlbfs", "pagesize=2M")
    assert offered(place) == Pages("hugetlbfs", HUGE)
    assert free_bytes(place) >= 4 * HUGE
    assert rounded(7 * MIB + 1, place) == 8 * MIB
    arena = Arena(place / "arena", 7 * MIB + 1, "on")
    assert arena.size_bytes == 8 * MIB - MARK_BYTES
    arena.view[:] = b"x" * arena.size_bytes
    assert huge_kib_of_this_process(arena.path) == 8 * 1024
    told = (
        "from pathlib import Path; from storelink.arena_sharing import SharedArena; import sys; size = "
        "int(sys.argv[2]);"
    )
    told += "m = SharedArena(Path(sys.argv[1]), size, bytes.fromhex(sys.argv[3]), 1, 'auto').mapped;"
    told += "assert m[size - 1 : size] == b'x'; m[:5] = b'other'"
    command = [sys.executable, "-c", told, arena.path, str(arena.size_bytes), arena.nonce.hex()]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    assert arena.view[:5] == b"other"
    with pytest.raises(ConfigError, match=r"kv\.hugepages = 'off'"):
        Arena(place / "second", MIB, "off")
    with pytest.raises(OSError, match=r"raise vm\.nr_hugepages"):
        Arena(place / "third", 1 << 40, "on")
    assert list(place.iterdir()) == [arena.path]
    arena.close()


async def test_a_store_and_its_workers_on_a_hugetlbfs(make_stack, mount, huge_pool):
    huge_pool(34)
    place = mount("hugetlbfs", "pagesize=2M")
    stack = make_stack(shm_dir=str(place), hugepages="on")
    stack.start(0)
    shape, session = make_shape(), SessionKey("default", "s")
    chunks = make_chunks(shape, 20)
    async with FakeWorker(stack.address(0), [shape]) as a, FakeWorker(stack.address(0), [shape]) as b:
        assert not (await a.save(session, shape, chunks)).refused
        assert_pieces(await b.load(shape, list(chunks), session=session), shape, chunks)
        assert (await b.flush()).complete
    assert '"pages": "hugetlbfs"' in stack.log(0)


async def test_a_store_that_is_told_on_where_there_are_none_does_not_start(make_stack, mount):
    stack = make_stack(shm_dir=str(mount("tmpfs", "size=128m,huge=never")), hugepages="on")
    stack.start(0)
    assert stack.processes[0].wait(30) == 2
    assert "kv.hugepages = 'on'" in stack.log(0)
