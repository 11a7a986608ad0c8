"""A child for tests: does what it is told."""

from __future__ import annotations

import os
import sys
import time

from runtime.child import serve

_told = b""


def begin(setup: bytes) -> None:
    global _told
    _told = setup
    if setup == b"do not start":
        raise SystemExit(7)


def handle(payload: bytes) -> bytes:
    verb, _, rest = payload.partition(b" ")
    match verb:
        case b"echo":
            print("this is no answer")
            return rest
        case b"setup":
            return _told
        case b"pid":
            return str(os.getpid()).encode()
        case b"nice":
            return str(os.nice(0)).encode()
        case b"session":
            return f"{os.getsid(0)} {os.getpgid(0)}".encode()
        case b"open":
            links = [f"/proc/self/fd/{fd}".encode() for fd in os.listdir("/proc/self/fd")]
            return b"\n".join(os.readlink(link) for link in links if os.path.lexists(link))
        case b"sleep":
            time.sleep(float(rest))
            return b"slept"
        case b"spin":
            until = time.monotonic() + float(rest)
            while time.monotonic() < until:
                pass
            return b"spun"
        case b"allocate":
            return str(len(bytearray(int(rest)))).encode()
        case b"crash":
            os.abort()
        case b"exit":
            sys.exit(int(rest))
    raise ValueError(payload)


if __name__ == "__main__":
    serve(handle, begin)
