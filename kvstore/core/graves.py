"""Which sessions were erased, which of their lives that ended, and which chunks may not be served because of it.

No clocks are used. A session has lives; an erasure ends all lives before its number. A manifest records the life it was
written in (`Manifest.life`) and is void if that is below the number of its session's erasure. A session that is used
again begins a life at the highest number this node has seen of any erasure (`floor`): no earlier erasure ends it, even
one that was forgotten.

An erasure is forgotten when every node has confirmed it: no node has anything of an ended life any more.

A worker confirms each notice of an erasure (TellErase, EraseHeard). What it saves, and the turns that it ends, before
that belong to an ended life. Its stream is ordered, so later ones belong to a new life.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from contracts.ids import SessionKey
from kvstore.core.tombstone import OpenErasure, Tombstone

#: Most chunks that one erasure names. Others are deleted as orphans.
MOST_NAMED = 1 << 16
#: Forgotten erasures whose numbers are kept, so that a late listing or answer does no harm.
_PAST = 10_000
#: A closed grave is forgotten when this many complete listings of tombstones lack it.
_MISSED = 2


@dataclass(slots=True)
class Grave:
    """One session's erasure. is_open: a tier of this node may still hold something of it. blind: its manifest could not
    be read, so its chunks are unknown. missed: complete listings without its tombstone."""

    number: int
    chunks: dict[bytes, bytes] = field(default_factory=dict)  #: key -> fingerprint
    is_open: bool = False
    blind: bool = False
    missed: int = 0


class Graves:
    """See the module."""

    def __init__(self) -> None:
        self.floor = 0
        self._graves: dict[SessionKey, Grave] = {}
        self._keys: Counter[bytes] = Counter()  #: number of graves that name each chunk
        self._blind: Counter[str] = Counter()  #: blind graves by tenant
        self._past: dict[SessionKey, int] = {}
        self._notices = 0
        #: by worker, the notice of each session that it has not confirmed
        self._unheard: dict[str, dict[SessionKey, int]] = {}

    def __len__(self) -> int:
        return len(self._graves)

    def __iter__(self) -> Iterator[SessionKey]:
        return iter(self._graves)

    def get(self, session: SessionKey) -> Grave | None:
        """The session's grave; None when it was not erased, or the erasure was forgotten."""
        return self._graves.get(session)

    # ---- lives

    def number(self, session: SessionKey) -> int:
        """The session's lives before this number have ended; 0: none has."""
        grave = self._graves.get(session)
        return grave.number if grave is not None else self._past.get(session, 0)

    def next_life(self, session: SessionKey) -> int:
        """The number of a life that begins now."""
        return max(self.floor, self.number(session))

    def note(self, number: int) -> None:
        """An erasure or a life of this number exists."""
        self.floor = max(self.floor, number)

    # ---- graves

    def bury(self, tombstone: Tombstone, *, is_open: bool = False, blind: bool = False) -> bool:
        """Record the erasure. True when it adds to what was known. An open grave stays open."""
        grave = self._graves.get(tombstone.session)
        new = grave is None
        if grave is None:
            grave = self._graves[tombstone.session] = Grave(0)
            self._past.pop(tombstone.session, None)
        new = new or tombstone.number > grave.number
        grave.number = max(grave.number, tombstone.number)
        self.note(tombstone.number)
        fresh = [key for key in tombstone.chunks if key not in grave.chunks]
        for key in fresh[: MOST_NAMED - len(grave.chunks)]:
            grave.chunks[key] = tombstone.chunks[key]
            self._keys[key] += 1
            new = True
        grave.is_open = grave.is_open or is_open
        grave.missed = 0
        if blind:
            self._set_blind(tombstone.session, grave, blind=True)
        return new

    def close(self, session: SessionKey) -> None:
        """No tier of this node holds anything of the session any more, and blob has the tombstone."""
        grave = self._graves.get(session)
        if grave is not None:
            self.seen(session)
            grave.is_open = False

    def seen(self, session: SessionKey) -> bool:
        """The session's manifest in blob was read: the grave is no longer blind. True when it was."""
        grave = self._graves.get(session)
        if grave is None or not grave.blind:
            return False
        self._set_blind(session, grave, blind=False)
        return True

    def _set_blind(self, session: SessionKey, grave: Grave, *, blind: bool) -> None:
        self._blind[session.tenant] += blind - grave.blind
        if not self._blind[session.tenant]:
            del self._blind[session.tenant]
        grave.blind = blind

    def listed(self, sessions: set[SessionKey]) -> None:
        """A complete listing has tombstones of these sessions only; others were confirmed by every node."""
        for session, grave in list(self._graves.items()):
            grave.missed = 0 if session in sessions or grave.is_open else grave.missed + 1
            if grave.missed >= _MISSED:
                self._forget(session, grave)

    def _forget(self, session: SessionKey, grave: Grave) -> None:
        del self._graves[session]
        self._keys.subtract(grave.chunks.keys())
        for key in grave.chunks:
            if not self._keys[key]:
                del self._keys[key]
        self._past.pop(session, None)
        self._past[session] = grave.number
        if len(self._past) > _PAST:
            del self._past[next(iter(self._past))]

    def open(self) -> list[OpenErasure]:
        """Erasures that this node has not completed."""
        return [
            OpenErasure(Tombstone(s, g.number, dict(g.chunks)), g.blind) for s, g in self._graves.items() if g.is_open
        ]

    def keys(self, most: int) -> tuple[bytes, ...]:
        """Up to `most` of the chunks that erasures name, latest erasure first."""
        return tuple(islice((key for grave in reversed(self._graves.values()) for key in grave.chunks), most))

    def shuts(self, key: bytes, tenant: str, named: bool) -> bool:
        """Whether the chunk must not be served. tenant: of the reader; empty when unknown. named: a session names it.

        While a grave of the tenant is blind, only named chunks are served to it.
        """
        if named or not self._graves:
            return False
        return key in self._keys or bool(self._blind if not tenant else self._blind.get(tenant))

    @property
    def shut_keys(self) -> Mapping[bytes, int]:
        """Chunks that an erasure names."""
        return self._keys

    # ---- what workers have heard

    def attach(self, worker: str, sessions: Iterable[SessionKey]) -> int:
        """A worker attached and is told of these erasures. Returns the notice's number."""
        self._notices += 1
        self._unheard[worker] = dict.fromkeys(sessions, self._notices)
        return self._notices

    def tell(self, sessions: Iterable[SessionKey]) -> int:
        """All workers are told of these erasures. Returns the notice's number."""
        self._notices += 1
        for unheard in self._unheard.values():
            unheard.update(dict.fromkeys(sessions, self._notices))
        return self._notices

    def heard(self, worker: str, notice: int) -> None:
        """The worker has acted on all notices up to this one."""
        unheard = self._unheard.get(worker, {})
        for session in [s for s, number in unheard.items() if number <= notice]:
            del unheard[session]

    def detach(self, worker: str) -> None:
        """The worker is gone."""
        self._unheard.pop(worker, None)

    def is_late(self, session: SessionKey, worker: str) -> bool:
        """Whether this worker's messages about the session may belong to an ended life."""
        return session in self._unheard.get(worker, ())

    def unheard(self, session: SessionKey) -> int:
        """Number of workers that have not confirmed the session's erasure."""
        return sum(session in unheard for unheard in self._unheard.values())

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        assert all(grave.number <= self.floor for grave in self._graves.values())
        assert self._keys == Counter(key for grave in self._graves.values() for key in grave.chunks)
        assert self._blind == Counter(s.tenant for s, grave in self._graves.items() if grave.blind)
        assert not self._past.keys() & self._graves.keys()
