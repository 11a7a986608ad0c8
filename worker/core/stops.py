"""Matches stop strings in streamed text: all at once, in time independent of their number and length.

An Aho-Corasick automaton (1975): a node is a prefix of some stop string; the current node is the longest prefix that
the text so far ends with, so its depth is how much must be held back. With at most 16 strings the trie is a few chains:
a chain's next node has the next number, and other children are in a table. Ten bytes per node.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache

_NO_CHILD = -1
#: Number of cached automata, for requests with the same stop strings.
_CACHED = 64


class StopStrings:
    """The automaton of a set of stop strings. Immutable; built in linear time (0.7 us per character)."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Empty strings match nothing."""
        #: By node: the character of its child with the next number; the node of its longest proper suffix; its length;
        #: and the length of the longest stop string that it ends with, or 0.
        self.chained, self.fallback = array("i", [_NO_CHILD]), array("H", [0])
        self.depth, self.matched = array("H", [0]), array("H", [0])
        #: Other children, by node and character.
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
        """The node's child for this character; 0 if none."""
        if self.chained[node] == code:
            return node + 1
        others = self.branches.get(node)
        return others.get(code, 0) if others else 0

    def next(self, node: int, code: int) -> int:
        """The node after one more character."""
        while not (child := self._child(node, code)) and node:
            node = self.fallback[node]
        return child


@lru_cache(maxsize=_CACHED)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """The automaton of these strings, cached. Any thread."""
    return StopStrings(stops)


class StopMatcher:
    """Ends a text before the first stop string that it completes (after it with `include`), however the text is split.
    Of those that end at the same place, the longest counts.

    Holds back what may begin a stop string. The emitted text depends only on the whole text so far, so a request can
    continue on another worker without a gap.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """Empty strings match nothing. May take milliseconds for strings not in the cache."""
        self._include = include
        self._strings = stop_strings(tuple(stops)) if any(stops) else None
        self._node = 0
        self._held = ""
        #: A stop string was met: `met`.
        self.stopped = False
        self.met = ""

    def prime(self, text: str) -> str:
        """Replay `text` that another worker pushed. Returns the text that worker emitted."""
        return self.push(text)[0]

    def push(self, text: str) -> tuple[str, bool]:
        """`(emit, stopped)`: text to show now, and whether a stop string was met; after that, nothing is emitted."""
        if self.stopped:
            return "", True
        if self._strings is None:
            return text, False
        strings, node, whole = self._strings, self._node, self._held + text
        chained, matched = strings.chained, strings.matched
        for end, code in enumerate(map(ord, text), len(self._held) + 1):
            node = node + 1 if chained[node] == code else strings.next(node, code)
            if matched[node]:
                self._held, self.stopped, self.met = "", True, whole[end - matched[node] : end]
                return whole[: end if self._include else end - matched[node]], True
        self._node = node
        shown = len(whole) - strings.depth[node]
        self._held = whole[shown:]
        return whole[:shown], False

    def flush(self, text: str = "") -> str:
        """End the text with `text`. Returns the rest to show, with what was held back; empty after a stop string."""
        emit, stopped = self.push(text)
        held, self._held, self._node = ("", "", 0) if stopped else (self._held, "", 0)
        return emit + held
