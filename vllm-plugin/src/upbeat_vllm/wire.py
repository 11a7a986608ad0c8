"""Between the scheduler side and the ranks, which are processes of one machine: messages over a Unix socket, and the
arena's file with one of them.

The socket is in Linux's abstract namespace, named after the engine. Only processes of the same user are spoken to. A
message is a length and msgpack: `[kind, ...]`.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgpack

_LENGTH = struct.Struct("<I")
_PEER = struct.Struct("3i")
MAX_MESSAGE_BYTES = 64 << 20

# To a rank: ARENA (bytes; with the file), GONE (number), PIECES (load, chunks, layers, offsets), END (load), DROP
# (load), GRANT (save, indices, offsets).
ARENA, GONE, PIECES, END, DROP, GRANT = range(6)
# From a rank: HELLO (first layer, layers), TAKEN (load, chunks, layers), LOADED (load, pieces, seconds until the first
# one, seconds from then on), COPIED (save, indices), LEFT (number).
HELLO, TAKEN, LOADED, COPIED, LEFT = range(10, 15)


def address(engine_id: str) -> str:
    """The socket of the engine's scheduler side."""
    return f"\0upbeat-vllm-{os.getuid()}-{engine_id}"


def is_same_user(connection: socket.socket) -> bool:
    """Whether the other end is a process of this user."""
    _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(uid == os.getuid())


def encode(message: Sequence[Any]) -> bytes:
    """The message with its length."""
    body: bytes = msgpack.packb(message, use_bin_type=True)
    return _LENGTH.pack(len(body)) + body


def send(connection: socket.socket, message: Sequence[Any], file: int | None = None) -> None:
    """Send all of it; with a file's descriptor, if one is given. Raises OSError."""
    data = encode(message)
    if file is not None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))]
        sent = connection.sendmsg([data], rights)
        data = data[sent:]
    connection.sendall(data)


def end(connection: socket.socket) -> None:
    """Close it for both ends; a thread that reads from it sees the end."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class Reader:
    """Reads messages from a blocking socket. files: descriptors that came and were not taken."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = bytearray()
        self.files: list[int] = []

    def read(self) -> list[Any] | None:
        """The next message; None: the other end is gone. Raises ValueError for what is no message."""
        while True:
            if len(self._buffer) >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer)
                if length > MAX_MESSAGE_BYTES:
                    raise ValueError(f"a message of {length} bytes")
                end = _LENGTH.size + length
                if len(self._buffer) >= end:
                    body = bytes(self._buffer[_LENGTH.size : end])
                    del self._buffer[:end]
                    found = msgpack.unpackb(body, raw=False, use_list=True)
                    if not isinstance(found, list) or not found:
                        raise ValueError("a message is a list")
                    return found
            try:
                data, rights, _, _ = self._connection.recvmsg(1 << 20, socket.CMSG_SPACE(8 * 4))
            except OSError:
                return None
            for level, kind, raw in rights:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    files = array.array("i")
                    files.frombytes(raw[: len(raw) - len(raw) % files.itemsize])
                    self.files.extend(files)
            if not data:
                return None
            self._buffer += data
