"""A disk that the kernel slows for one process: what it reads takes as long as was asked for, and no longer
afterwards."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.disk_pace import Unslowable, slowed

MIB = 1 << 20
#: Says how long it takes to read a file past the page cache, whenever it is asked.
READER = """
import mmap, os, sys, time
memory = mmap.mmap(-1, 1 << 20)
for _ in sys.stdin:
    file = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
    began = time.monotonic()
    while os.readv(file, [memory]):
        pass
    os.close(file)
    print(time.monotonic() - began, flush=True)
"""


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(4 * MIB))
    with subprocess.Popen(
        [sys.executable, "-c", READER, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def seconds(reader: subprocess.Popen[str]) -> float:
    assert reader.stdin is not None and reader.stdout is not None
    reader.stdin.write("read\n")
    reader.stdin.flush()
    return float(reader.stdout.readline())


def test_a_process_reads_no_faster_than_that_and_as_before_afterwards(
    reader: subprocess.Popen[str], tmp_path: Path
) -> None:
    before_s = min(seconds(reader) for _ in range(3))
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(slowed([reader.pid], tmp_path, 4 * MIB))
        except Unslowable as e:
            pytest.skip(str(e))
        assert seconds(reader) > 0.7
    assert min(seconds(reader) for _ in range(3)) < 0.5 + before_s
    assert not list(Path("/sys/fs/cgroup").glob(f"**/upbeat-paced-{reader.pid}")), "nothing of it is left"
