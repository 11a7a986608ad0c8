"""Codecs for slow tiers: how a piece is stored in fewer bytes on the SSD or in blob than in the arena.

The implementations are LMCache's (codecs_lmcache.py); they need torch and the extra `[lmcache]`, and are imported only
when the configuration or a header names one. All lose precision (docs/design/0006). A codec sees whole, verified
pieces. Which tier uses which codec is configuration; the byte layout is in format.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from contracts.errors import ConfigError
from kvstore.metrics import count, log
from kvstore.tiers.codec import Codec, Unavailable
from kvstore.tiers.format import RAW


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
    """The codecs of this process, each created at its first use. Thread-safe."""

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
        """The codec that a header names; None where it does not work. The first call may take seconds, because it
        imports torch."""
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
    """Count objects whose codec does not work here. Each is a miss, and is kept for processes that can read it."""
    count("objects_of_unknown_codecs", objects)
