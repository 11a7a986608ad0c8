"""Which erasures are not confirmed yet, by which nodes.

Every node of the deployment has to confirm one, those that are away included: they are told again when they come back. The
oldest are forgotten when there are too many; the stores' journals and the tombstones in the blob tier still tell every store. Stores say
at every hello which erasures they have not finished, so that a scheduler that was restarted knows them again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from contracts.ids import SessionKey

#: How many erasures are remembered.
_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Word:
    """What one node said. left: chunks by tier that are, or may be, still there. number: the erasure's, for nodes that have to be told.
    taken: the node has noted it durably, or is done."""

    verified: bool
    known: bool
    left: dict[str, int]
    number: int = 0
    taken: bool = True


@dataclass(slots=True)
class Erasure:
    """One session's. owing: nodes that have not confirmed; words: the last word of each that has answered."""

    owing: set[str]
    words: dict[str, Word] = field(default_factory=dict)

    @property
    def taken(self) -> bool:
        """It goes on whatever happens to this process."""
        return any(word.taken for word in self.words.values())

    @property
    def number(self) -> int:
        """What nodes have to be told; 0: none that is here has said it."""
        return max((word.number for word in self.words.values()), default=0)


class Erasures:
    """See the module."""

    def __init__(self) -> None:
        self._open: dict[SessionKey, Erasure] = {}

    def begin(self, session: SessionKey, nodes: Iterable[str]) -> Erasure:
        """These nodes have to confirm; an earlier erasure of the session counts no more."""
        self._open.pop(session, None)
        erasure = self._open[session] = Erasure(set(nodes))
        while len(self._open) > _REMEMBERED:
            del self._open[next(iter(self._open))]
        return erasure

    def get(self, session: SessionKey) -> Erasure | None:
        """The session's erasure that is not confirmed by every node; None: there is none."""
        return self._open.get(session)

    def heard(self, node: str, session: SessionKey, word: Word, nodes: Iterable[str] = ()) -> list[str]:
        """A node's word; a confirmation ends its part. Returns the nodes that have to be told: one that is going on with an erasure which
        this process knows nothing of, as another one ordered it or an earlier life did, makes it known, and all of `nodes` owe it."""
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
        """What a node that comes back has to be told again, with the erasures' numbers; 0: not known."""
        return [(session, erasure.number) for session, erasure in self._open.items() if node in erasure.owing]

    def give_up(self, session: SessionKey) -> None:
        """No node has taken it: whoever wants it has to ask again."""
        self._open.pop(session, None)

    def validate(self) -> None:
        """Raise AssertionError when an erasure that nobody owes is kept."""
        assert all(erasure.owing for erasure in self._open.values())
