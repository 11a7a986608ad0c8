"""Codecs for slow tiers: how a piece may be kept in fewer bytes on the SSD or in blob than in the arena.

One small interface; the implementations are LMCache's (codecs_lmcache.py), which need torch and the extra `[lmcache]` and are
imported when the configuration or a header names one, never before. All of them lose precision (docs/design/0006).
A codec sees whole pieces whose checksums were verified, and decides nothing: which tier uses which is configuration,
where the bytes lie is format.py.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from contracts.errors import ConfigError
from contracts.kv import KvShape
from kvstore.metrics import count, log
from kvstore.tiers.format import RAW

#: A command that works as it is printed, in whatever environment this is.
INSTALL = f"{sys.executable} -m pip install --no-deps lmcache==0.5.6"


class Unencodable(Exception):
    """These values do not survive the codec (infinities, NaN, beyond its range): the chunk is stored raw."""


class Unavailable(Exception):
    """The codec does not work in this process. The message says what it needs."""


class Codec(Protocol):
    """One way to store a piece. Stateless, called from several threads at a time.

    `piece` and `into` are a piece `[kv_heads, 2 (K, V), chunk_tokens, head_dim]` of the shape's dtype, contiguous.
    Encoding what was decoded and decoding that again changes nothing, so that a chunk may go from tier to tier.
    """

    name: str  #: as in the configuration and in headers

    def encode(self, piece: memoryview, shape: KvShape, layer: int) -> memoryview:
        """The stored bytes. Raises Unencodable."""
        ...

    def decode(self, stored: memoryview, into: memoryview, shape: KvShape, layer: int) -> None:
        """Write the piece to `into`. Raises PieceLost when `stored` cannot be what `encode` returned."""
        ...


def _fp8() -> Codec:
    from kvstore.tiers.codecs_lmcache import Fp8

    return Fp8()


def _k16v8() -> Codec:
    from kvstore.tiers.codecs_lmcache import K16V8

    return K16V8()


def _cachegen() -> Codec:
    from kvstore.tiers.codecs_cachegen import CacheGen

    return CacheGen("cuda")


MAKERS: Mapping[str, Callable[[], Codec]] = {"fp8": _fp8, "k16v8": _k16v8, "cachegen": _cachegen}


class Codecs:
    """The codecs of this process, each made when it is first asked for. Safe to use from several threads."""

    def __init__(self, makers: Mapping[str, Callable[[], Codec]] = MAKERS) -> None:
        self._makers = makers
        self._made: dict[str, Codec | Unavailable] = {}
        self._lock = threading.Lock()

    def configured(self, key: str, name: str) -> Codec | None:
        """The codec that the setting `key` names; None for raw. Raises ConfigError naming key, value and remedy."""
        if name == RAW:
            return None
        made = self._make(name)
        if isinstance(made, Unavailable):
            raise ConfigError(f"{key} = {name!r} does not work here: {made}; or set {key}: raw")
        return made

    def find(self, name: str) -> Codec | None:
        """The codec that a header names; None where it does not work. The first call may take seconds: it imports torch."""
        made = self._make(name)
        return None if isinstance(made, Unavailable) else made

    def _make(self, name: str) -> Codec | Unavailable:
        with self._lock:
            if name not in self._made:
                try:
                    self._made[name] = self._makers[name]()
                except KeyError:
                    self._made[name] = Unavailable(f"there is no such codec; there are {', '.join(self._makers)}")
                except Unavailable as e:
                    self._made[name] = e
                if isinstance(self._made[name], Unavailable):
                    log.warning("a codec does not work here", codec=name, reason=str(self._made[name]))
            return self._made[name]


def count_unreadable(objects: int = 1) -> None:
    """Objects of a codec that does not work here: each is a miss, and stays for processes that can read it."""
    count("objects_of_unknown_codecs", objects)
