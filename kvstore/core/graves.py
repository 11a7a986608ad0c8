"""Which sessions were erased, which of their lives that ended, and what may not be served because of it.

No clock takes part. A session has lives, and an erasure ends all before its number. A manifest says in which life it was written
(`Manifest.life`): it is void when that is below the number of its session's erasure. A session that is used again begins a life
that no earlier erasure ends: the highest number that this node has seen of any erasure (`floor`), so that this holds even after the
erasure was forgotten.

An erasure is forgotten when every node has confirmed it: nobody has a manifest, a chunk or a turn of an ended life any more.

A worker that was told of an erasure (TellErase) says when it has heard (EraseHeard). What it saves, and the turns that it ends,
before that belong to an ended life. Both directions of its stream are in order, so whatever comes later is of a new one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from contracts.ids import SessionKey
from kvstore.core.tombstone import OpenErasure, Tombstone

#: How many chunks one erasure names. Others of the session are swept as orphans.
MOST_NAMED = 1 << 16
#: How many forgotten erasures are still heeded by this process: a list or an answer that is late does no harm then.
_PAST = 10_000
#: A closed grave that so many complete lists of tombstones did not show is forgotten.
_MISSED = 2


@dataclass(slots=True)
class Grave:
    """One session's. is_open: some tier of this node may still have something of it. blind: nobody has read what it held."""

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
        self._keys: Counter[bytes] = Counter()  #: how many graves name it
        self._blind: Counter[str] = Counter()  #: by tenant
        self._past: dict[SessionKey, int] = {}
        self._tellings = 0
        self._unheard: dict[str, dict[SessionKey, int]] = {}  #: by worker: the telling that it has not confirmed

    def __len__(self) -> int:
        return len(self._graves)

    def __iter__(self) -> Iterator[SessionKey]:
        return iter(self._graves)

    def get(self, session: SessionKey) -> Grave | None:
        """The session's grave; None: it was not erased, or everybody has confirmed that."""
        return self._graves.get(session)

    # ---- lives

    def number(self, session: SessionKey) -> int:
        """The session's lives before this number are over; 0: none is."""
        grave = self._graves.get(session)
        return grave.number if grave is not None else self._past.get(session, 0)

    def next_life(self, session: SessionKey) -> int:
        """The life of a session that begins now."""
        return max(self.floor, self.number(session))

    def note(self, number: int) -> None:
        """There is an erasure, or a life, of this number."""
        self.floor = max(self.floor, number)

    # ---- graves

    def bury(self, tombstone: Tombstone, *, is_open: bool = False, blind: bool = False) -> bool:
        """Remember the erasure. True when this says more than was known. An open grave stays open."""
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
        """Every tier of this node has let go, and the blob tier has the tombstone."""
        grave = self._graves.get(session)
        if grave is not None:
            self.seen(session)
            grave.is_open = False

    def seen(self, session: SessionKey) -> bool:
        """What the session held in the blob tier is known now. True when it was not."""
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
        """A complete list of the blob tier's tombstones has those of these sessions only: others were confirmed by every node."""
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
        """What this node has to see through."""
        return [OpenErasure(Tombstone(s, g.number, dict(g.chunks)), g.blind) for s, g in self._graves.items() if g.is_open]

    def keys(self, most: int) -> tuple[bytes, ...]:
        """So many of the chunks that erasures name, those of the latest first."""
        return tuple(islice((key for grave in reversed(self._graves.values()) for key in grave.chunks), most))

    def shuts(self, key: bytes, tenant: str, named: bool) -> bool:
        """Whether the chunk must not be served. tenant: of who asks, empty when it is not known. named: a living session names it.

        While it is not known what an erased session held, only what living sessions name is served to its tenant.
        """
        if named or not self._graves:
            return False
        return key in self._keys or bool(self._blind if not tenant else self._blind.get(tenant))

    @property
    def shut_keys(self) -> Mapping[bytes, int]:
        """Chunks that some erasure names."""
        return self._keys

    # ---- what workers have heard

    def attach(self, worker: str, sessions: Iterable[SessionKey]) -> int:
        """A worker is here and is told of these erasures. Returns the telling's number."""
        self._tellings += 1
        self._unheard[worker] = dict.fromkeys(sessions, self._tellings)
        return self._tellings

    def tell(self, sessions: Iterable[SessionKey]) -> int:
        """Every worker is told of these erasures. Returns the telling's number."""
        self._tellings += 1
        for unheard in self._unheard.values():
            unheard.update(dict.fromkeys(sessions, self._tellings))
        return self._tellings

    def heard(self, worker: str, telling: int) -> None:
        """The worker has acted on every telling up to this one."""
        unheard = self._unheard.get(worker, {})
        for session in [s for s, number in unheard.items() if number <= telling]:
            del unheard[session]

    def detach(self, worker: str) -> None:
        """The worker is gone."""
        self._unheard.pop(worker, None)

    def is_late(self, session: SessionKey, worker: str) -> bool:
        """Whether what this worker says of the session may be of an ended life."""
        return session in self._unheard.get(worker, ())

    def unheard(self, session: SessionKey) -> int:
        """How many workers have not said that they heard of the session's erasure."""
        return sum(session in unheard for unheard in self._unheard.values())

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        assert all(grave.number <= self.floor for grave in self._graves.values())
        assert self._keys == Counter(key for grave in self._graves.values() for key in grave.chunks)
        assert self._blind == Counter(s.tenant for s, grave in self._graves.items() if grave.blind)
        assert not self._past.keys() & self._graves.keys()
