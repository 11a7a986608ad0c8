"""A codec that needs nothing installed: of each 32-bit word the upper half. Lossy, idempotent, and half the size."""

from __future__ import annotations

import numpy as np

from contracts.errors import PieceLost
from contracts.kv import KvShape
from kvstore.tiers.codec import Codec, Unavailable, Unencodable
from kvstore.tiers.codecs import Codecs

#: A piece that begins so cannot be encoded.
STUBBORN = b"\xff" * 8


class Upper:
    """See the module."""

    name = "upper"

    def encode(self, piece: memoryview, shape: KvShape, layer: int) -> memoryview:
        if bytes(piece[:8]) == STUBBORN:
            raise Unencodable("stubborn")
        return memoryview(bytearray(np.frombuffer(piece, "<u2")[1::2].tobytes()))

    def decode(self, stored: memoryview, into: memoryview, shape: KvShape, layer: int) -> None:
        if len(stored) * 2 != len(into):
            raise PieceLost("not what was written")
        into[:] = expected(stored)


def expected(upper: bytes | memoryview) -> bytes:
    """What is decoded from these halves."""
    whole = np.zeros(len(upper), "<u2")
    whole[1::2] = np.frombuffer(upper, "<u2")
    return whole.tobytes()


def lossy(piece: bytes | memoryview) -> bytes:
    """A piece after it has been through the codec."""
    return expected(np.frombuffer(piece, "<u2")[1::2].tobytes())


def _missing() -> Codec:
    raise Unavailable("it is not installed; install it")


def with_upper() -> Codecs:
    """A process that has this codec."""
    return Codecs({"upper": Upper, "missing": _missing})


def without() -> Codecs:
    """A process that has none."""
    return Codecs({"upper": _missing})
