"""Chunks named by sessions whose manifests are not kept in memory: a Bloom filter (Bloom 1970) over chunk keys, which
are hashes already.

It contains every chunk that was added and, falsely, a few others: such an orphan stays for one more sweep. A million
sessions of 30 chunks set a third of the bits. With many times that it contains everything, and no orphan is deleted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: 64 MiB of bits; a key sets one bit for each of its first six 32-bit words.
_BITS, _WORDS = 1 << 29, 6


class Named:
    """See the module. Allocates its memory when the first chunk is added."""

    def __init__(self) -> None:
        self._bits = np.zeros(0, np.uint8)

    def add(self, keys: Sequence[bytes]) -> None:
        """Add named chunks."""
        if not keys:
            return
        if not len(self._bits):
            self._bits = np.zeros(_BITS // 8, np.uint8)
        words = np.frombuffer(b"".join(keys), np.uint32).reshape(len(keys), -1)[:, :_WORDS].ravel() % np.uint32(_BITS)
        np.bitwise_or.at(self._bits, words >> 3, np.left_shift(np.uint8(1), (words & 7).astype(np.uint8)))

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, bytes) or not len(self._bits):
            return False
        bits = self._bits
        words = (int.from_bytes(key[4 * n : 4 * n + 4], "little") % _BITS for n in range(_WORDS))
        return all(bits[word >> 3] >> (word & 7) & 1 for word in words)
