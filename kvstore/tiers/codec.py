"""The interface of a codec for slow tiers, and its errors."""

from __future__ import annotations

import sys
from typing import Protocol

from contracts.kv import KvShape

#: A command that works as printed, in the current environment.
INSTALL = f"{sys.executable} -m pip install --no-deps lmcache==0.5.6"


class Unencodable(Exception):
    """The values do not survive the codec (infinities, NaN, out of range): the chunk is stored raw."""


class Unavailable(Exception):
    """The codec does not work in this process. The message says what it needs."""


class Codec(Protocol):
    """A way to store a piece. Stateless; called from several threads.

    `piece` and `into` are a piece `[kv_heads, 2 (K, V), chunk_tokens, head_dim]` of the shape's dtype, contiguous.
    Encoding a decoded piece and decoding it again changes nothing, so a chunk may move between tiers repeatedly.
    """

    name: str  #: as in the configuration and in headers

    def encode(self, piece: memoryview, shape: KvShape, layer: int) -> memoryview:
        """The stored bytes. Raises Unencodable."""
        ...

    def decode(self, stored: memoryview, into: memoryview, shape: KvShape, layer: int) -> None:
        """Write the piece to `into`. Raises PieceLost when `stored` cannot be what `encode` returned."""
        ...
