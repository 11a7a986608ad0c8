"""Where stop strings end a text: all of them are matched at once, in a time that does not depend on their number or length.

An Aho-Corasick automaton (1975): a node is a beginning of some stop string, the present node the longest one that the text so far
ends with. So its depth is how much must be held back. With at most 16 strings the tree of beginnings is a few chains: a
chain's next node has the next number, and the few other children lie in a table. It takes ten bytes a node.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

_NO_CHILD = -1
#: Automatons that are kept for requests with the same stop strings.
_KEPT = 64


class StopStrings:
    """The automaton of a set of stop strings. Immutable; made in a time proportional to the length of all of them (0.7 us a character)."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Empty strings match nothing."""
        #: By node: the character of its child with the next number; the longest other node that its text ends with; the length of its
        #: text, and of the longest stop string that its text ends with, or 0.
        self.chained, self.fallback = array("i", [_NO_CHILD]), array("H", [0])
        self.depth, self.matched = array("H", [0]), array("H", [0])
        #: The other children, by node and character.
        self.branches: dict[int, dict[int, int]] = {}
        parents, codes = [0], [0]
        for stop in sorted({stop for stop in stops if stop}):
            self._add(stop, parents, codes)
        for node in sorted(range(1, len(codes)), key=self.depth.__getitem__):
            parent = parents[node]
            self.fallback[node] = 0 if not parent else self.next(self.fallback[parent], codes[node])
            self.matched[node] = self.matched[node] or self.matched[self.fallback[node]]

    def _add(self, stop: str, parents: list[int], codes: list[int]) -> None:
        node = 0
        for code in map(ord, stop):
            child = self._child(node, code)
            if not child:
                child = len(codes)
                if child == node + 1 and self.chained[node] == _NO_CHILD:
                    self.chained[node] = code
                else:
                    self.branches.setdefault(node, {})[code] = child
                parents.append(node)
                codes.append(code)
                self.chained.append(_NO_CHILD)
                self.fallback.append(0)
                self.depth.append(self.depth[node] + 1)
                self.matched.append(0)
            node = child
        self.matched[node] = len(stop)

    def _child(self, node: int, code: int) -> int:
        """0: none."""
        if self.chained[node] == code:
            return node + 1
        others = self.branches.get(node)
        return others.get(code, 0) if others else 0

    def next(self, node: int, code: int) -> int:
        """The node after one more character."""
        while not (child := self._child(node, code)) and node:
            node = self.fallback[node]
        return child


@lru_cache(maxsize=_KEPT)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """The automaton of these strings, made once while requests ask for the same ones. Any thread."""
    return StopStrings(stops)


class StopMatcher:
    """Ends a text before the first stop string that it completes (after it with `include`), wherever the text was cut into pieces. Of those
    that end at the same place, the longest counts.

    What may be the beginning of a stop string is held back. What was given out depends on the whole text so far only,
    never on its pieces, so that a request continues elsewhere without a gap.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """Empty strings match nothing. Takes up to milliseconds for strings that are new."""
        self._include = include
        self._strings = stop_strings(tuple(stops)) if any(stops) else None
        self._node = 0
        self._held = ""
        #: Whether a stop string was met.
        self.stopped = False

    def prime(self, text: str) -> str:
        """Takes `text` as pushed before, elsewhere, where what it gave out was sent. Returns what that was."""
        return self.push(text)[0]

    def push(self, text: str) -> tuple[str, bool]:
        """`(emit, stopped)`: text that can be shown now, and whether a stop string was met; after that, nothing more comes."""
        if self.stopped:
            return "", True
        if self._strings is None:
            return text, False
        strings, node, whole = self._strings, self._node, self._held + text
        chained, matched = strings.chained, strings.matched
        for end, code in enumerate(map(ord, text), len(self._held) + 1):
            node = node + 1 if chained[node] == code else strings.next(node, code)
            if matched[node]:
                self._held, self.stopped = "", True
                return whole[: end if self._include else end - matched[node]], True
        self._node = node
        shown = len(whole) - strings.depth[node]
        self._held = whole[shown:]
        return whole[:shown], False

    def flush(self, text: str = "") -> str:
        """Ends the text with `text`: what was held back can be shown after all. Empty once a stop string was met."""
        emit, stopped = self.push(text)
        held, self._held, self._node = ("", "", 0) if stopped else (self._held, "", 0)
        return emit + held
