"""The name of a session's key: in headers of encrypted chunks, and as an object's path in the blob tier.

`keys/<tag of the session>/<life>-<number>`, in hexadecimal. A session has a key for each node and life that saved
something of it, so nodes need not agree on one. An erasure ends lives (kvstore/core/graves.py) and with them their
keys.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from kvstore.tiers.cluster_keys import TAG_BYTES

PREFIX = "keys"
_NUMBER_BYTES = 8
_NAME = struct.Struct(f"<{TAG_BYTES}sQ{_NUMBER_BYTES}s")
NAME_BYTES = _NAME.size
_PATH = re.compile(f"{PREFIX}/([0-9a-f]{{{2 * TAG_BYTES}}})/([0-9a-f]{{16}})-([0-9a-f]{{{2 * _NUMBER_BYTES}}})")


class KeyName(NamedTuple):
    """tag: the session's (ClusterKeys.tag). life: of the session. number: random, 8 bytes."""

    tag: bytes
    life: int
    number: bytes

    def pack(self) -> bytes:
        """NAME_BYTES bytes."""
        return _NAME.pack(*self)

    @classmethod
    def unpack(cls, packed: bytes) -> KeyName:
        """The inverse of `pack`."""
        return cls(*_NAME.unpack(packed))

    @property
    def path(self) -> str:
        """The name of the key's object."""
        return f"{folder_of(self.tag)}/{self.life:016x}-{self.number.hex()}"


def folder_of(tag: bytes) -> str:
    """The prefix of the session's keys."""
    return f"{PREFIX}/{tag.hex()}"


def name_of(path: str) -> KeyName | None:
    """The key whose object has this path; None when it is no key's."""
    match = _PATH.fullmatch(path)
    return KeyName(bytes.fromhex(match[1]), int(match[2], 16), bytes.fromhex(match[3])) if match else None
