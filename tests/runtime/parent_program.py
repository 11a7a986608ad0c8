"""A parent for tests: prints what its child has open and its number, and how many fork handlers ran; its child is then
in the middle of work, and it waits to be killed."""

from __future__ import annotations

import ctypes
import os
import sys

import uvloop

from runtime.children import Children


async def main() -> None:
    children = Children(
        [sys.executable, "-m", "tests.runtime.child_program"], count=1, memory_bytes=1 << 30, per_owner=4
    )
    secret = os.open(__file__, os.O_RDONLY)
    os.set_inheritable(secret, True)
    forks = []
    handler = ctypes.CFUNCTYPE(None)(lambda: forks.append(1))
    getattr(ctypes.CDLL(None), "__register_atfork")(handler, None, None, None)  # as gRPC does
    print(b" ".join((await children.call("a", b"open", 20)).split(b"\n")).decode())
    print((await children.call("a", b"pid", 20)).decode(), flush=True)
    print(len(forks), flush=True)
    await children.call("a", b"spin 60", 60)


uvloop.run(main())
