"""Shares granules with another process: handles, their transfer over a Unix socket, and ranges that map them.

A handle is a file descriptor: of the memfd on the host, of one granule's allocation on CUDA (the driver's POSIX
handle). If the exporting process drops the memory, the other process keeps its mapping, but the two no longer share it.
The ledger decides which granules are lent and until when.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from dataclasses import dataclass

from worker.memory import mappings

#: Descriptors in one message at most (SCM_MAX_FD is 253).
_AT_ONCE = 200
#: Header: bytes of a granule, numbers of granules and descriptors. Place: a descriptor's index and an offset.
_HEAD = struct.Struct("<QII")
_PLACE = struct.Struct("<IQ")


@dataclass(frozen=True, slots=True)
class Exported:
    """Exported granules. files: descriptors, owned by the holder of this object. places: `(index into files, byte
    offset)` of each granule."""

    granule_bytes: int
    files: tuple[int, ...]
    places: tuple[tuple[int, int], ...]

    def close(self) -> None:
        """Closes the descriptors; existing mappings stay."""
        for file in self.files:
            os.close(file)


def send(to: socket.socket, exported: Exported) -> None:
    """Sends it over a connected Unix stream socket. The descriptors stay open here. Raises OSError."""
    to.sendall(_HEAD.pack(exported.granule_bytes, len(exported.places), len(exported.files)))
    for first in range(0, len(exported.files), _AT_ONCE):
        socket.send_fds(to, [b"f"], exported.files[first : first + _AT_ONCE])
    to.sendall(b"".join(_PLACE.pack(*place) for place in exported.places))


def receive(source: socket.socket) -> Exported:
    """Receives what `send` sent, with descriptors of this process. Raises OSError; ConnectionError when the sender ends
    early."""
    granule_bytes, count, wanted = _HEAD.unpack(exactly(source, _HEAD.size))
    files = array.array("i")
    try:
        while len(files) < wanted:
            said, some, _, _ = socket.recv_fds(source, 1, _AT_ONCE)
            files.extend(some)
            if not said:
                raise ConnectionError("the exporting process ended before all handles came")
        places = tuple((file, offset) for file, offset in _PLACE.iter_unpack(exactly(source, count * _PLACE.size)))
    except BaseException:
        for file in files:
            os.close(file)
        raise
    return Exported(granule_bytes, tuple(files), places)


class HostWindow:
    """Exported host granules, mapped contiguously in this process from `address`, readable and writable until
    `close`."""

    def __init__(self, exported: Exported) -> None:
        """Raises OSError. The descriptors may be closed afterwards."""
        self.bytes = exported.granule_bytes * len(exported.places)
        self.address = mappings.reserve(self.bytes)
        for n, (file, offset) in enumerate(exported.places):
            at = self.address + n * exported.granule_bytes
            mappings.show_file(at, exported.granule_bytes, exported.files[file], offset)

    def close(self) -> None:
        """Unmaps the range, which must be unused."""
        mappings.release(self.address, self.bytes)


def exactly(source: socket.socket, count: int) -> bytes:
    """The next `count` bytes. Raises OSError; ConnectionError when there are fewer."""
    got = b""
    while len(got) < count:
        some = source.recv(count - len(got))
        if not some:
            raise ConnectionError("the exporting process ended before all was sent")
        got += some
    return got
