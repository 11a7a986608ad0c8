"""A world in virtual time for the KV store's core: the clock, the blob tier that all nodes share, links, and what
counts as wrong.

Bytes are tokens: the content of a piece is (key, layer, who wrote it), or SPOILED. Its checksum is a number that the
world gives to each content it has seen, so that equal contents and only those have equal checksums.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core.tombstone import Tombstone

PAGE = 4096
#: (key, layer, writer); the writer of a spoiled piece is negative.
Content = tuple[bytes, int, int]


class Wrong(AssertionError):
    """The store did what it must never do."""


@dataclass
class Copy:
    """A chunk in a slower tier: what its header says, and what its pieces really are."""

    shape: KvShape
    sums: tuple[int, ...]
    contents: list[Content]


@dataclass
class Blob:
    """The tier that all nodes share."""

    chunks: dict[bytes, Copy] = field(default_factory=dict)
    manifests: dict[SessionKey, Manifest] = field(default_factory=dict)
    tombstones: dict[tuple[SessionKey, int, tuple[bytes, ...]], Tombstone] = field(default_factory=dict)
    away: bool = False


class World:
    """The clock, the seed, and what is shared. `at` runs a call later; `run` runs them all, in order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.events = 0
        self.faulty = True
        self.blob = Blob()
        self.cut: set[tuple[str, str]] = set()  #: links (from, to) on which nothing arrives
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._sums: dict[Content, int] = {}
        self._writers = 0

    # ---- time

    def at(self, delay_s: float, call: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._calls, (self.now + delay_s, self._order, call))

    def soon(self, call: Callable[[], None], mean_s: float = 0.05) -> None:
        """After a random time: mostly short, now and then very long while there are faults."""
        delay = self.random.expovariate(1 / mean_s)
        self.at(delay * (80 if self.chance(0.05) else 1), call)

    def run(self, until: float) -> None:
        while self._calls and self._calls[0][0] <= until:
            self.now, _, call = heapq.heappop(self._calls)
            call()
        self.now = max(self.now, until)

    def chance(self, probability: float) -> bool:
        """Whether something goes wrong this time."""
        return self.random.random() < probability and self.faulty

    # ---- contents

    def write(self, key: bytes, layer: int) -> Content:
        """What a worker computes; the same chunk has other low bits each time."""
        self._writers += 1
        return key, layer, self._writers

    def spoil(self) -> Content:
        """Bytes that nobody wrote."""
        self._writers += 1
        return b"", 0, -self._writers

    def sum_of(self, content: Content) -> int:
        return self._sums.setdefault(content, len(self._sums) + 1)

    def check(self, content: Content | None, key: bytes, layer: int, where: str) -> None:
        """The content is that key's and layer's. Raises Wrong."""
        if content is None or content[:2] != (key, layer) or content[2] <= 0:
            raise Wrong(f"wrong bytes: {where} was given {content} for {key[:4].hex()} layer {layer} at {self.now:.2f}")

    def reaches(self, sender: str, receiver: str) -> bool:
        return (sender, receiver) not in self.cut


class Pages:
    """A node's arena, page by page: each says of which content it holds which part."""

    def __init__(self, size_bytes: int) -> None:
        self._pages: list[tuple[Content, int] | None] = [None] * (size_bytes // PAGE)

    def write(self, offset: int, size: int, content: Content) -> None:
        for part in range(-(-size // PAGE)):
            self._pages[offset // PAGE + part] = (content, part)

    def read(self, offset: int, size: int) -> Content | None:
        """The content, when all of it is there."""
        pages = self._pages[offset // PAGE : offset // PAGE + -(-size // PAGE)]
        first = pages[0]
        if first is None or pages != [(first[0], part) for part in range(len(pages))]:
            return None
        return first[0]
