"""Checksums of many ranges at a time: python-xxhash's digests, whoever computes them, and other threads run
meanwhile."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time

import hypothesis.strategies as st
import pytest
import xxhash
from hypothesis import given, settings

from kvstore.tiers import checksums
from runtime import native

DATA = bytearray(os.urandom(1 << 20))
VIEW = memoryview(DATA)
ADDRESS = ctypes.addressof(ctypes.c_char.from_buffer(DATA))


@pytest.fixture(params=["loop", "one by one"])
def computes(request, monkeypatch):
    if request.param == "loop" and not checksums.prepare(wait_s=60):
        pytest.skip("there is no compiler")
    if request.param != "loop":
        monkeypatch.setattr(checksums, "_loop", None)
    return request.param


@given(st.lists(st.tuples(st.integers(0, 1 << 19), st.integers(0, 1 << 19)), max_size=20))
@settings(deadline=None, max_examples=60)
def test_the_digests_are_those_of_python_xxhash(ranges):
    checksums.prepare(wait_s=60)
    expected = [xxhash.xxh3_64_intdigest(VIEW[offset : offset + length]) for offset, length in ranges]
    assert checksums.sums(VIEW, ADDRESS, ranges) == expected


def test_pieces_of_a_chunk_whoever_computes_them(computes):
    ranges = [(n * 65_536, 65_536) for n in range(16)]
    assert checksums.sums(VIEW, ADDRESS, ranges) == [xxhash.xxh3_64_intdigest(VIEW[o : o + n]) for o, n in ranges]
    assert checksums.sums(VIEW, ADDRESS, []) == []


@pytest.mark.parametrize("outside", [(-1, 4096), (0, (1 << 20) + 1), (1 << 20, 1), (4096, -1)])
def test_what_lies_outside_is_refused(computes, outside):
    with pytest.raises(ValueError, match="outside"):
        checksums.sums(VIEW, ADDRESS, [(0, 65_536), outside])


def test_other_threads_run_while_the_loop_computes():
    if not checksums.prepare(wait_s=60):
        pytest.skip("there is no compiler")
    ticks, stop = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0.00001)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # nobody takes the GIL from a thread that keeps it
    try:
        thread = threading.Thread(target=tick)
        ranges = [(n % 16 * 65_536, 65_536) for n in range(4000)]
        thread.start()
        before, until = ticks, time.monotonic() + 20  # a busy machine may not run the other thread at once
        while ticks == before and time.monotonic() < until:
            checksums.sums(VIEW, ADDRESS, ranges)
        assert ticks > before
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()


def test_without_a_compiler_the_digests_are_the_same_and_the_start_goes_on(tmp_path):
    program = (
        "from kvstore.tiers import checksums; import ctypes, xxhash\n"
        "assert not checksums.prepare(wait_s=60)\n"
        "data = bytearray(range(256)) * 1024\n"
        "address = ctypes.addressof(ctypes.c_char.from_buffer(data))\n"
        "assert checksums.sums(memoryview(data), address, [(0, len(data))]) == [xxhash.xxh3_64_intdigest(data)]\n"
    )
    environment = os.environ | {"CXX": str(tmp_path / "none"), "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=60)


def test_a_loop_that_computes_something_else_is_not_used(monkeypatch, tmp_path):
    source = tmp_path / "wrong" / "sums.cpp"
    source.parent.mkdir()
    source.write_text(checksums._SOURCE.read_text().replace("ranges[i][1]);", "ranges[i][1] / 2);"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(checksums, "_SOURCE", source)
    with pytest.raises(native.NotBuilt, match=r"not those|no C\+\+ compiler"):
        checksums._Loop()
