"""The session directory: which nodes hold how much of which session. Soft state from the stores' reports.

Every scheduler has the whole directory, so that it can stand in for the others. A report describes all that a node
holds of one session, so a repeated report changes nothing, and a report after an erasure replaces the earlier one. Thus
every scheduler forgets an erased session once its holders have reported, whichever scheduler was asked to erase it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from contracts.ids import SessionKey
from scheduler.core.listing import Listing
from scheduler.core.resumable import Resumable


@dataclass(slots=True)
class Held:
    """What one node holds of one session in DRAM and on SSD. last_use_s: of its manifest, set by the directory."""

    tokens: int
    bytes: int
    tokens_dram: int = 0
    last_use_s: float = 0.0


#: A node's report on a session: key, model, tokens and last use of its manifest, and what the node holds.
Report = tuple[SessionKey, str, int, float, Held]


@dataclass(slots=True)
class Session:
    """One session. model, tokens, last_use_s: of the newest manifest. holders: by node, never with 0 tokens. bytes: of
    its whole cache, by what its last holder said."""

    key: SessionKey
    model: str = ""
    tokens: int = 0
    last_use_s: float = 0.0
    bytes: int = 0
    holders: dict[str, Held] = field(default_factory=dict)

    def sources(self, without: str = "") -> list[str]:
        """The holders, most tokens first, then most in DRAM."""
        names = [name for name in self.holders if name != without]
        return sorted(names, key=lambda n: (-self.holders[n].tokens, -self.holders[n].tokens_dram, n))


#: Sessions kept although no node holds any of them, as the blob tier may.
_UNHELD = 100_000


class Directory:
    """All sessions that some node holds, and the latest `_UNHELD` that none holds any more."""

    def __init__(self) -> None:
        self._sessions: dict[SessionKey, Session] = {}
        self._by_node: dict[str, set[SessionKey]] = {}
        self._unheld: OrderedDict[SessionKey, None] = OrderedDict()  #: the oldest is found at once
        self._listing = Listing()
        #: KV of sessions that may come back.
        self.resumable = Resumable()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, key: SessionKey) -> Session | None:
        """The session; None: not known."""
        return self._sessions.get(key)

    def count(self, node: str) -> int:
        """Number of sessions of which this node holds something."""
        return len(self._by_node.get(node, ()))

    def report(
        self,
        node: str,
        key: SessionKey,
        model: str,
        tokens_total: int,
        last_use_s: float,
        held: Held,
        *,
        joining: bool = False,
    ) -> None:
        """Take a store's report on one session. Mutates `held.last_use_s`.

        held.tokens 0: the node holds nothing of it any more; tokens_total 0 as well: it does not know the session.
        joining: part of what a node reports when it joins.

        The newest manifest is the one that is new to its node, as nodes' clocks differ. Times are compared between
        nodes only for joining reports, which describe the past.
        """
        held.last_use_s = last_use_s
        session = self._sessions.get(key)
        if session is None:
            if not held.tokens:
                return
            session = self._sessions[key] = Session(key, model, tokens_total, last_use_s)
            self._listing.add(key, last_use_s)
        elif tokens_total and _newer(session, node, last_use_s, joining):
            self._listing.used(key, session.last_use_s, last_use_s)
            self._resize(session, last_use_s, session.bytes)
            session.model, session.tokens, session.last_use_s = model, tokens_total, last_use_s
        if held.tokens:
            self._resize(session, session.last_use_s, held.bytes * max(session.tokens, held.tokens) // held.tokens)
            session.holders[node] = held
            self._by_node.setdefault(node, set()).add(key)
            self._unheld.pop(key, None)
            return
        if session.holders.pop(node, None) is not None:
            self._by_node[node].discard(key)
        if not session.holders:
            self._note_unheld(key)
            if not tokens_total:
                self._drop(key)

    def forget_node(self, node: str) -> None:
        """The node is no source any more. Its sessions stay known, as the blob tier may have them."""
        for key in self._by_node.pop(node, set()):
            holders = self._sessions[key].holders
            holders.pop(node, None)
            if not holders:
                self._note_unheld(key)

    def erase(self, key: SessionKey) -> bool:
        """Forget a session. True if it was known. Reports on their way may bring it back until its holders erase it."""
        session = self._sessions.get(key)
        if session is None:
            return False
        for node in session.holders:
            self._by_node[node].discard(key)
        self._drop(key)
        return True

    def _note_unheld(self, key: SessionKey) -> None:
        self._unheld.pop(key, None)
        self._unheld[key] = None
        while len(self._unheld) > _UNHELD:
            self._drop(next(iter(self._unheld)))

    def page(self, tenant: str, limit: int, after: str, *, by_id: bool) -> list[Session] | None:
        """A page of a tenant's sessions, or of all; None if it is to begin after an unknown session (never by id)."""
        place = None
        if after and by_id:
            place = 0.0, after
        elif after:
            known = self._sessions.get(SessionKey(tenant, after))
            if known is None:
                return None
            place = -known.last_use_s, after
        return [self._sessions[key] for key in self._listing.page(tenant, limit, place, by_id=by_id)]

    def _resize(self, session: Session, last_use_s: float, size: int) -> None:
        """The session has `size` bytes, and was last used then; the caller sets `last_use_s`."""
        self.resumable.add(session.last_use_s, -session.bytes)
        session.bytes = size
        self.resumable.add(last_use_s, size)

    def _drop(self, key: SessionKey) -> None:
        session = self._sessions.pop(key)
        self._listing.remove(key, session.last_use_s)
        self.resumable.add(session.last_use_s, -session.bytes)
        self._unheld.pop(key, None)

    def validate(self) -> None:
        """Raise AssertionError when the tables disagree."""
        for key, session in self._sessions.items():
            assert bool(session.holders) != (key in self._unheld), key
            for node, held in session.holders.items():
                assert held.tokens > 0 and key in self._by_node[node]
        for node, keys in self._by_node.items():
            for key in keys:
                assert node in self._sessions[key].holders
        assert self._unheld.keys() <= self._sessions.keys()
        self._listing.validate({key: session.last_use_s for key, session in self._sessions.items()})
        self.resumable.validate((session.last_use_s, session.bytes) for session in self._sessions.values())


def _newer(session: Session, node: str, last_use_s: float, joining: bool) -> bool:
    if joining:
        return last_use_s > session.last_use_s
    before = session.holders.get(node)
    if before is not None:
        return last_use_s > before.last_use_s
    return last_use_s != session.last_use_s
