"""Pages of the arena are made ahead of what is used, and not far ahead."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.tiers import populate
from kvstore.tiers.populate import Populating

MIB = 1 << 20


class Memory:
    """A shared file on a tmpfs. `made`: bytes of it that take memory."""

    def __init__(self, size_bytes: int) -> None:
        self.path = Path("/dev/shm") / f"upbeat-test-populate-{time.monotonic_ns()}"
        with self.path.open("wb+") as file:
            file.truncate(size_bytes)
            self._map = mmap.mmap(file.fileno(), size_bytes)
        self._view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @property
    def made(self) -> int:
        return self.path.stat().st_blocks * 512


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory(500 * MIB)
    yield memory
    memory.path.unlink()


def until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_pages_are_made_a_way_ahead_and_no_further(memory):
    pages = Populating(memory.address, 500 * MIB)
    until(lambda: pages.made_bytes == 256 * MIB)
    pages.used_to(128 * MIB)
    time.sleep(0.05)
    assert memory.made == 256 * MIB, "half of it is enough"
    pages.used_to(140 * MIB)
    until(lambda: pages.made_bytes == 396 * MIB)
    pages.used_to(500 * MIB)
    until(lambda: pages.made_bytes == 500 * MIB)
    pages.close()
    assert memory.made == 500 * MIB


def test_what_lies_in_pages_already_is_left_as_it_is(memory):
    memory._view[5 * MIB : 5 * MIB + 4] = b"here"
    pages = Populating(memory.address, 500 * MIB)
    until(lambda: pages.made_bytes == 256 * MIB)
    pages.close()
    assert memory._view[5 * MIB : 5 * MIB + 4] == b"here"


def test_a_kernel_that_cannot_do_it_leaves_pages_to_whoever_touches_them(memory, monkeypatch):
    monkeypatch.setattr(populate, "_MADV_POPULATE_WRITE", 9999)
    pages = Populating(memory.address, 500 * MIB)
    pages._thread.join(20)
    assert not pages._thread.is_alive() and pages.made_bytes == memory.made == 0
    pages.used_to(200 * MIB)
    pages.close()


def test_closing_ends_it_in_the_middle(memory):
    pages = Populating(memory.address, 500 * MIB)
    pages.close()
    made = memory.made
    pages.used_to(500 * MIB)
    time.sleep(0.05)
    assert memory.made == made
