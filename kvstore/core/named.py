"""Chunks named by sessions whose manifests are not kept in memory: a Bloom filter (Bloom 1970) over chunk keys, which
are hashes already.

It contains every chunk that was added and, falsely, a few others: such an orphan stays for one more sweep. MOST names
set a third of the bits. Where there are more, a sweep looks at a share of all chunks: of the others it contains all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: 64 MiB of bits; a key sets one bit for each of its first six 32-bit words.
_BITS, _WORDS = 1 << 29, 6
#: Most names of one share.
MOST = 30_000_000


class Named:
    """See the module. Allocates its memory when the first chunk is added. share, shares: which part of all chunks is
    looked at, of how many."""

    def __init__(self, share: int = 0, shares: int = 1) -> None:
        self._share, self._shares = share, shares
        self._bits = np.zeros(0, np.uint8)

    def add(self, keys: Sequence[bytes]) -> None:
        """Add named chunks."""
        if not keys:
            return
        if not len(self._bits):
            self._bits = np.zeros(_BITS // 8, np.uint8)
        every = np.frombuffer(b"".join(keys), "<u4").reshape(len(keys), -1)
        if self._shares > 1:
            every = every[every[:, -1] % self._shares == self._share]
        words = every[:, :_WORDS].ravel() % np.uint32(_BITS)
        np.bitwise_or.at(self._bits, words >> 3, np.left_shift(np.uint8(1), (words & 7).astype(np.uint8)))

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, bytes):
            return False
        if int.from_bytes(key[-4:], "little") % self._shares != self._share:
            return True
        if not len(self._bits):
            return False
        bits = self._bits
        words = (int.from_bytes(key[4 * n : 4 * n + 4], "little") % _BITS for n in range(_WORDS))
        return all(bits[word >> 3] >> (word & 7) & 1 for word in words)
