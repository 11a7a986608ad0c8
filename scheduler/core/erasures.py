"""Which erasures are not confirmed yet, by which nodes.

Every node of the deployment has to confirm one, those that are away included: they are told again when they come back. The
oldest are forgotten when there are too many; the tombstones in the blob tier still tell every store.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from contracts.ids import SessionKey

#: How many erasures are remembered.
_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Word:
    """What one node said. left: chunks by tier that are, or may be, still there."""

    verified: bool
    known: bool
    left: dict[str, int]


@dataclass(slots=True)
class Erasure:
    """One session's. owing: nodes that have not confirmed; words: the last word of each that has answered."""

    owing: set[str]
    words: dict[str, Word] = field(default_factory=dict)

    @property
    def answered(self) -> bool:
        """Every node has said something, good or bad."""
        return not self.owing - set(self.words)


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

    def heard(self, node: str, session: SessionKey, word: Word) -> None:
        """A node's word; a confirmation ends its part."""
        erasure = self._open.get(session)
        if erasure is None:
            return
        erasure.words[node] = word
        if word.verified:
            erasure.owing.discard(node)
        if not erasure.owing:
            del self._open[session]

    def owed_by(self, node: str) -> list[SessionKey]:
        """What a node that comes back has to be told again."""
        return [session for session, erasure in self._open.items() if node in erasure.owing]

    def validate(self) -> None:
        """Raise AssertionError when an erasure that nobody owes is kept."""
        assert all(erasure.owing for erasure in self._open.values())
