"""Runs in the other stores' environment: puts and gets chunks with one store and answers commands with seconds.

other_store_child.py lmcache FOLDER COUNT CHUNK_BYTES DIRECT
other_store_child.py mooncake PORT COUNT CHUNK_BYTES
"""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import json
import mmap
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def say(**answer: object) -> None:
    print(json.dumps(answer), flush=True)


def serve(commands: dict[str, Callable[[], float]]) -> None:
    say(ready=True)
    for line in sys.stdin:
        try:
            say(seconds=commands[line.strip()]())
        except Exception as e:
            say(error=repr(e))


def buffers(count: int, size: int) -> tuple[mmap.mmap, list[memoryview]]:
    memory = mmap.mmap(-1, count * size)
    block = os.urandom(size)
    for i in range(count):
        memory[i * size : (i + 1) * size] = block
    view = memoryview(memory)
    return memory, [view[i * size : (i + 1) * size] for i in range(count)]


def lmcache(folder: str, count: int, size: int, direct: bool) -> None:
    import torch  # noqa: F401 - the extension links to its libraries

    Path(folder).mkdir(parents=True, exist_ok=True)
    found = next(f for p in sys.path for f in glob.glob(f"{p}/lmcache/lmcache_fs*.so"))
    spec = importlib.util.spec_from_file_location("lmcache.lmcache_fs", found)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    client = module.LMCacheFSClient(folder, 4, "", direct, 0)
    _, sources = buffers(count, size)
    _, targets = buffers(count, size)
    keys = [f"bench@00000000@0@{i:064x}" for i in range(count)]

    def files() -> list[Path]:
        return [p for p in Path(folder).rglob("*") if p.is_file()]

    def run(number: int) -> None:
        while True:
            select.select([client.event_fd()], [], [], 30)
            for done, ok, error, *_ in client.drain_completions():
                if not ok:
                    raise RuntimeError(str(error))
                if int(done) == int(number):
                    return

    def put(sync: bool) -> float:
        for path in files():
            path.unlink()
        begun = time.perf_counter()
        run(client.submit_batch_set(keys, sources))
        if sync:
            for path in files():
                fd = os.open(path, os.O_RDONLY)
                os.fdatasync(fd)
                os.close(fd)
            fd = os.open(folder, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        return time.perf_counter() - begun

    def get(cold: bool) -> float:
        if cold:
            for path in files():
                fd = os.open(path, os.O_RDONLY)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)
        begun = time.perf_counter()
        run(client.submit_batch_get(keys, targets))
        seconds = time.perf_counter() - begun
        if bytes(targets[-1]) != bytes(sources[-1]):
            raise RuntimeError("other bytes came back")
        return seconds

    serve(
        {
            "put": lambda: put(False),
            "put-sync": lambda: put(True),
            "get": lambda: get(False),
            "get-cold": lambda: get(True),
        }
    )


def mooncake(port: int, count: int, size: int) -> None:
    import mooncake
    from mooncake.store import MooncakeDistributedStore

    binary = Path(mooncake.__file__).with_name("mooncake_master")
    binary.chmod(binary.stat().st_mode | 0o111)
    flags = [
        f"--rpc_port={port}",
        "--enable_http_metadata_server=true",
        f"--http_metadata_server_port={port + 1}",
        f"--metrics_port={port + 2}",
    ]
    quiet = subprocess.DEVNULL
    master = subprocess.Popen([str(binary), *flags], stdin=quiet, stdout=quiet, stderr=quiet)
    time.sleep(2)
    # The memory's owner is a separate process.
    read, write = os.pipe()
    owner = os.fork()
    where = (f"http://127.0.0.1:{port + 1}/metadata",)
    if owner == 0:
        os.close(read)
        store = MooncakeDistributedStore()
        status = store.setup("127.0.0.1", *where, 24 * count * size, 1 << 24, "tcp", "", f"127.0.0.1:{port}")
        os.write(write, b"1" if status == 0 else b"0")
        while os.getppid() > 1:
            time.sleep(0.2)
        os._exit(0)
    os.close(write)
    try:
        if os.read(read, 1) != b"1":
            raise RuntimeError("the owner of the memory could not set up")
        store = MooncakeDistributedStore()
        if store.setup("127.0.0.1", *where, 0, 1 << 27, "tcp", "", f"127.0.0.1:{port}"):
            raise RuntimeError("the client could not set up")
        memory, _ = buffers(count, size)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if store.register_buffer(base, count * size):
            raise RuntimeError("the buffer could not be registered")
        addresses, sizes = [base + i * size for i in range(count)], [size] * count
        turn = 0

        def put() -> float:
            nonlocal turn
            turn += 1
            keys = [f"bench-{turn}-{i}" for i in range(count)]
            begun = time.perf_counter()
            results = store.batch_put_from(keys, addresses, sizes)
            seconds = time.perf_counter() - begun
            if any(results):
                raise RuntimeError(f"put answered {results}")
            return seconds

        def get() -> float:
            if not turn:
                put()
            keys = [f"bench-{turn}-{i}" for i in range(count)]
            begun = time.perf_counter()
            results = store.batch_get_into(keys, addresses, sizes)
            seconds = time.perf_counter() - begun
            if any(n != size for n in results):
                raise RuntimeError(f"get answered {results}")
            return seconds

        serve({"put": put, "get": get})
    finally:
        os.kill(owner, 9)
        os.waitpid(owner, 0)
        master.kill()
        master.wait()


if __name__ == "__main__":
    try:
        if sys.argv[1] == "lmcache":
            lmcache(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] == "1")
        else:
            mooncake(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    except Exception as e:
        say(error=repr(e))
