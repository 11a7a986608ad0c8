"""The session directory: which nodes hold how much of which session. Soft state, fed by the stores' reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from contracts.ids import SessionKey


@dataclass(frozen=True, slots=True)
class Held:
    """What one node holds of one session in its own tiers (DRAM or SSD)."""

    tokens: int
    bytes: int
    tokens_dram: int = 0


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


#: How many erased sessions are remembered.
_GRAVES = 10_000


class Directory:
    """All sessions that some node has reported.

    An erased session stays unknown until it is used again: reports of it that were under way change nothing.
    """

    def __init__(self) -> None:
        self._sessions: dict[SessionKey, Session] = {}
        self._by_node: dict[str, set[SessionKey]] = {}
        self._graves: dict[SessionKey, float] = {}  #: erased session -> its last use

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

    def report(self, node: str, key: SessionKey, model: str, tokens_total: int, last_use_s: float, held: Held) -> None:
        """A store's word on one session; `held.tokens` 0 means that it holds nothing of it any more."""
        known = key in self._sessions
        if not known and (not held.tokens or last_use_s <= self._graves.get(key, float("-inf"))):
            return
        self._graves.pop(key, None)
        session = self._sessions.setdefault(key, Session(key))
        if last_use_s >= session.last_use_s:
            session.model, session.tokens, session.last_use_s = model, tokens_total, last_use_s
        if held.tokens:
            session.holders[node] = held
            self._by_node.setdefault(node, set()).add(key)
        else:
            session.holders.pop(node, None)
            self._by_node.get(node, set()).discard(key)

    def forget_node(self, node: str) -> None:
        """The node left: what it held cannot be fetched from it. The sessions stay known (blob has them)."""
        for key in self._by_node.pop(node, set()):
            self._sessions[key].holders.pop(node, None)

    def erase(self, key: SessionKey) -> bool:
        """Forget a session. True when it was known."""
        session = self._sessions.pop(key, None)
        if session is None:
            return False
        for node in session.holders:
            self._by_node[node].discard(key)
        self._graves[key] = session.last_use_s
        while len(self._graves) > _GRAVES:
            del self._graves[next(iter(self._graves))]
        return True

    def validate(self) -> None:
        """Raise AssertionError when the two tables disagree."""
        for key, session in self._sessions.items():
            for node, held in session.holders.items():
                assert held.tokens > 0 and key in self._by_node[node]
        for node, keys in self._by_node.items():
            for key in keys:
                assert node in self._sessions[key].holders
