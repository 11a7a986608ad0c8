"""Erasures that some node has not confirmed yet.

Every node of the deployment must confirm an erasure; absent ones are told when they return. Beyond a limit the oldest
erasures are forgotten: the stores' journals and the tombstones in the blob tier still carry them out. Stores report
unfinished erasures at every hello, so a restarted scheduler learns them again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from contracts.ids import SessionKey

#: Erasures kept at most.
_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Word:
    """One node's answer to an erasure.

    verified: nothing is left. known: the node had some of the session. left: chunks that are or may be left, by tier.
    number: of the erasure, to name it to other nodes. taken: recorded durably or finished.
    """

    verified: bool
    known: bool
    left: dict[str, int]
    number: int = 0
    taken: bool = True


@dataclass(slots=True)
class Erasure:
    """The erasure of one session. owing: nodes that have not confirmed. words: the last answer of each node."""

    owing: set[str]
    words: dict[str, Word] = field(default_factory=dict)

    @property
    def taken(self) -> bool:
        """Whether some node will carry it out even if this process dies."""
        return any(word.taken for word in self.words.values())

    @property
    def number(self) -> int:
        """The erasure's number, to tell nodes; 0: no node has reported it."""
        return max((word.number for word in self.words.values()), default=0)


class Erasures:
    """See the module. Invariant: every erasure kept is owed by some node."""

    def __init__(self) -> None:
        self._open: dict[SessionKey, Erasure] = {}

    def begin(self, session: SessionKey, nodes: Iterable[str]) -> Erasure:
        """Start an erasure that `nodes` must confirm. It replaces an earlier one of the session."""
        self._open.pop(session, None)
        erasure = self._open[session] = Erasure(set(nodes))
        while len(self._open) > _REMEMBERED:
            del self._open[next(iter(self._open))]
        return erasure

    def get(self, session: SessionKey) -> Erasure | None:
        """The session's unconfirmed erasure, if any."""
        return self._open.get(session)

    def heard(self, node: str, session: SessionKey, word: Word, nodes: Iterable[str] = ()) -> list[str]:
        """Record a node's answer. Returns nodes to tell of the erasure.

        There are some only if this process did not know the erasure, because another scheduler or an earlier process
        started it. Then all of `nodes` owe it.
        """
        erasure, told = self._open.get(session), []
        if erasure is None:
            if word.verified or not word.taken or not word.number:
                return []
            erasure = self.begin(session, {node, *nodes})
            told = sorted(erasure.owing - {node})
        erasure.words[node] = word
        if word.verified:
            erasure.owing.discard(node)
        if not erasure.owing:
            del self._open[session]
        return told

    def owed_by(self, node: str) -> list[tuple[SessionKey, int]]:
        """Sessions that a returning node must erase, with the erasures' numbers (0: not known)."""
        return [(session, erasure.number) for session, erasure in self._open.items() if node in erasure.owing]

    def forget_node(self, node: str) -> None:
        """The node has left for good: it owes nothing."""
        for session, erasure in list(self._open.items()):
            erasure.owing.discard(node)
            if not erasure.owing:
                del self._open[session]

    def give_up(self, session: SessionKey) -> None:
        """Forget an erasure that no node has taken; the caller must ask again."""
        self._open.pop(session, None)

    def validate(self) -> None:
        """Raise AssertionError when the invariant does not hold."""
        assert all(erasure.owing for erasure in self._open.values())
