"""Virtual time, and a model that is a hash of all KV that its pages hold; see virtual_engine."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from contracts.kv import KvShape
from worker.devices.runner import Slice

CHUNK, LAYERS, VOCABULARY = 4, 3, 256
SHAPE = KvShape.of_heads(b"f" * 32, LAYERS, 1, 1, CHUNK, "float32")
_MIX = (1 << 61) - 1
#: Of each layer, how many tokens a token sees; 0: all.
Windows = tuple[int, ...]
NO_WINDOWS: Windows = (0,) * LAYERS


def _entry(before: int, oldest: int, token: int, layer: int) -> int:
    """KV of a token: of the one before and, where the layer has a window, of the oldest that it sees."""
    return (before * 6364136223846793005 + oldest * 31 + (token + 7) * 1442695040888963407 + layer * 97) % _MIX


def _oldest(at: int, window: int) -> int:
    """The oldest token that the one at this position sees."""
    return max(at - window + 1, 0) if window else 0


def _choice(entries: np.ndarray, windows: Windows) -> int:
    """The next token, of KV `[layers, tokens]`."""
    entries = entries.copy()
    for layer, window in enumerate(windows):
        entries[layer, : _oldest(entries.shape[1] - 1, window)] = 0
    weights = np.arange(1, entries.shape[1] + 1, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(1)
    mixed = int((entries.astype(np.uint64) * weights[None]).sum()) & ((1 << 64) - 1)
    return 3 + (mixed >> 20) % (VOCABULARY - 3)


def cold(prompt: list[int], count: int, windows: Windows = NO_WINDOWS) -> list[int]:
    """The tokens that follow `prompt`."""
    entries = np.zeros((LAYERS, len(prompt) + count), np.int64)
    tokens = list(prompt)
    for at in range(len(prompt) + count - 1):
        if at >= len(tokens):
            tokens.append(_choice(entries[:, :at], windows))
        for layer, window in enumerate(windows):
            before = int(entries[layer, at - 1]) if at else 0
            oldest = int(entries[layer, _oldest(at, window)]) if window else 0
            entries[layer, at] = _entry(before, oldest, tokens[at], layer)
    tokens.append(_choice(entries[:, : len(prompt) + count - 1], windows))
    return tokens[len(prompt) :]


@dataclass
class World:
    """Virtual time, and what will happen in it. A clock, too."""

    time_s: float = 0.0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: int = 0

    def at(self, delay_s: float, then: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.time_s + delay_s, self._count, then))

    def now(self) -> float:
        return self.time_s

    def wall(self) -> float:
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError("the engine's thread never sleeps by its clock")

    def pass_(self, seconds: float) -> None:
        """Time passes, and everything happens that is due."""
        end = self.time_s + seconds
        while self._events and self._events[0][0] <= end:
            self.time_s, _, then = heapq.heappop(self._events)
            then()
        self.time_s = end

    def next(self, most_s: float) -> None:
        """The next thing happens, or that much time passes."""
        if self._events and self._events[0][0] <= self.time_s + most_s:
            self.time_s, _, then = heapq.heappop(self._events)
            then()
        else:
            self.time_s += most_s

    # A condition whose waits are virtual.
    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def wait(self, timeout: float) -> None:
        self.next(timeout)

    def notify_all(self) -> None:
        return None


@dataclass
class Granules:
    """A device's memory: as many slabs as it can map at once, of all models."""

    total: int
    mapped: int = 0


class Pages:
    """HBM: a number a token of each page. Stale numbers stay until somebody writes, or the slab is unmapped."""

    def __init__(self, pages: int, granules: Granules | None = None) -> None:
        self.numbers = np.full((pages, CHUNK), -1, np.int64)
        self.slabs: set[int] = set()
        self._granules = granules or Granules(pages)

    def map_slab(self, slab: int) -> None:
        assert slab not in self.slabs and self._granules.mapped < self._granules.total, "more is mapped than there is"
        self.slabs.add(slab)
        self._granules.mapped += 1

    def unmap_slab(self, slab: int, *, keep: bool = False) -> None:
        self.slabs.remove(slab)
        self._granules.mapped -= 1
        self.numbers[slab * LAYERS : (slab + 1) * LAYERS] = -2


class HashRunner:
    """Computes steps of the hash model and takes virtual time for it."""

    def __init__(
        self,
        pages: Pages,
        world: World,
        *,
        step_s: float = 0.002,
        token_s: float = 0.001,
        windows: Windows = NO_WINDOWS,
    ) -> None:
        self.windows = windows
        self.pages, self.world, self.step_s, self.token_s = pages, world, step_s, token_s
        #: (when it ended, tokens) of every step.
        self.steps: list[tuple[float, int]] = []

    def step(
        self, slices: list[Slice], before_layer: Callable[[int], None], after_layer: Callable[[int], None]
    ) -> torch.Tensor:
        tokens = sum(len(s.tokens) for s in slices)
        seen = [np.zeros((LAYERS, s.start + len(s.tokens)), np.int64) for s in slices]
        for layer in range(LAYERS):
            self.world.pass_((self.step_s + self.token_s * tokens) / LAYERS)
            before_layer(layer)
            window = self.windows[layer]
            for s, entries in zip(slices, seen, strict=True):
                for n, token in enumerate(s.tokens):
                    at = s.start + n
                    before = self._read(s, layer, at - 1) if at else 0
                    # A token without one before it sees itself only, which is not written yet.
                    oldest = self._read(s, layer, _oldest(at, window)) if window and at else 0
                    self.pages.numbers[s.pages[layer, at // CHUNK], at % CHUNK] = _entry(before, oldest, token, layer)
                first = _oldest(s.start, window) // CHUNK
                assert (s.pages[layer, first:] >= 0).all(), "a page that is read is not there"
                entries[layer, first * CHUNK :] = self.pages.numbers[s.pages[layer, first:]].reshape(-1)[
                    : entries.shape[1] - first * CHUNK
                ]
            after_layer(layer)
        self.steps.append((self.world.now(), tokens))
        wanted = [entries for s, entries in zip(slices, seen, strict=True) if s.want_logits]
        logits = torch.zeros(len(wanted), VOCABULARY)
        for row, entries in enumerate(wanted):
            logits[row, _choice(entries, self.windows)] = 1.0
        return logits

    def _read(self, s: Slice, layer: int, at: int) -> int:
        assert s.pages[layer, at // CHUNK] >= 0, "a page that is read is not there"
        return int(self.pages.numbers[s.pages[layer, at // CHUNK], at % CHUNK])


def random_prompt(dice: random.Random, length: int) -> list[int]:
    """Token ids of the hash model."""
    return [dice.randrange(3, VOCABULARY) for _ in range(length)]
