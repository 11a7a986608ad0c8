"""The session directory: which nodes hold how much of which session. Soft state, fed by the stores' reports.

Every scheduler has all of it, as each may have to stand in for the others. A report is a node's whole word on one session, so
that one that comes twice changes nothing, and what a node says of a session it has erased takes back what it said before: an
erased session is unknown to every scheduler once the nodes that held it have said so, whoever was asked to erase it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from contracts.ids import SessionKey


@dataclass(slots=True)
class Held:
    """What one node holds of one session in its own tiers (DRAM or SSD). last_use_s: of its manifest there, as the directory notes it."""

    tokens: int
    bytes: int
    tokens_dram: int = 0
    last_use_s: float = 0.0


#: A node's word on a session: key, model, tokens of its manifest, that one's last use, and what the node holds.
Report = tuple[SessionKey, str, int, float, Held]


@dataclass(slots=True)
class Session:
    """One session. `tokens` is the newest manifest's; `holders` name -> Held, never with 0 tokens."""

    key: SessionKey
    model: str = ""
    tokens: int = 0
    last_use_s: float = 0.0
    holders: dict[str, Held] = field(default_factory=dict)

    def sources(self, without: str = "") -> list[str]:
        """Holders, the one with most tokens (then most in DRAM) first."""
        names = [name for name in self.holders if name != without]
        return sorted(names, key=lambda n: (-self.holders[n].tokens, -self.holders[n].tokens_dram, n))


#: How many sessions are kept that no node holds anything of: the blob tier still may.
_UNHELD = 100_000


class Directory:
    """All sessions that some node has reported; of those that nobody holds any more, the latest."""

    def __init__(self) -> None:
        self._sessions: dict[SessionKey, Session] = {}
        self._by_node: dict[str, set[SessionKey]] = {}
        self._unheld: dict[SessionKey, None] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, key: SessionKey) -> Session | None:
        """The session, or None when no node has reported it."""
        return self._sessions.get(key)

    def count(self, node: str) -> int:
        """How many sessions this node holds something of."""
        return len(self._by_node.get(node, ()))

    def report(
        self, node: str, key: SessionKey, model: str, tokens_total: int, last_use_s: float, held: Held, *, joining: bool = False
    ) -> None:
        """A store's word on one session; `held.tokens` 0: it holds nothing of it any more; `tokens_total` 0 as well: it knows of none.

        Which manifest is the newest is told by change, as nodes' clocks differ: one that is new to its node is, and times are
        compared between nodes only where a node that joins tells of the past.
        """
        held.last_use_s = last_use_s
        session = self._sessions.get(key)
        if session is None:
            if not held.tokens:
                return
            session = self._sessions[key] = Session(key, model, tokens_total, last_use_s)
        elif tokens_total and _newer(session, node, last_use_s, joining):
            session.model, session.tokens, session.last_use_s = model, tokens_total, last_use_s
        if held.tokens:
            session.holders[node] = held
            self._by_node.setdefault(node, set()).add(key)
            self._unheld.pop(key, None)
            return
        if session.holders.pop(node, None) is not None:
            self._by_node[node].discard(key)
        if not session.holders:
            self._nobody_holds(key)
            if not tokens_total:
                self._drop(key)

    def forget_node(self, node: str) -> None:
        """The node left: what it held cannot be fetched from it. The sessions stay known (blob has them)."""
        for key in self._by_node.pop(node, set()):
            holders = self._sessions[key].holders
            holders.pop(node, None)
            if not holders:
                self._nobody_holds(key)

    def erase(self, key: SessionKey) -> bool:
        """Forget a session. True when it was known. Its holders' words that are under way may make it known again, until they are told."""
        session = self._sessions.get(key)
        if session is None:
            return False
        for node in session.holders:
            self._by_node[node].discard(key)
        self._drop(key)
        return True

    def _nobody_holds(self, key: SessionKey) -> None:
        self._unheld.pop(key, None)
        self._unheld[key] = None
        while len(self._unheld) > _UNHELD:
            self._drop(next(iter(self._unheld)))

    def _drop(self, key: SessionKey) -> None:
        del self._sessions[key]
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


def _newer(session: Session, node: str, last_use_s: float, joining: bool) -> bool:
    if joining:
        return last_use_s > session.last_use_s
    before = session.holders.get(node)
    if before is not None:
        return last_use_s > before.last_use_s
    return last_use_s != session.last_use_s
