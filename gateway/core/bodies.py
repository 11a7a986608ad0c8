"""How large a body may be, what it will take in memory, how long it may take to arrive, and who makes way when there is no room.

Decides by what has come so far; reads nothing itself. Figures of memory are measured with both parsers (CPython 3.12, pydantic-core 2): the
worst is an array of empty objects, 72 bytes of memory for 3 of JSON.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from contracts.context import ContextBound

#: What a decoded value takes: a place in a list or a number, an object or a list, an object's entry.
_COMMA_BYTES, _OPEN_BYTES, _COLON_BYTES = 40, 64, 60
#: A body is read where it arrives up to a size, or a larger one up to another size when few values are in it: either takes below 20 ms.
LIGHT_BYTES, LIGHT_TEXT_BYTES, LIGHT_VALUES = 32 << 10, 192 << 10, 4096
#: Of bodies that are no request for text: a batch of 256 hints has 2,048.
SMALL_VALUES = 16 << 10
#: What a body makes of memory, at most, in lengths of the longest body. Text with a comma in every fourth character stays below.
MOST_DECODED = 12

#: No body may take longer, in seconds; nor rest for so long; and it has so long to begin, and then this many bytes a second to keep up.
WHOLE_S, REST_S, BEGIN_S, LEAST_BYTES_PER_S = 60.0, 10.0, 10.0, 64 << 10
#: One of which nothing has come for so long makes way when there is no room, in seconds.
_RESTED_S = 1.0

#: JSON may spell a byte with six (`\\u0041`), and a token id with a line of its own; what an assistant thought may come again beside what
#: it said; and tools, schemas and many small messages need room.
_SPELLED, _ID_BYTES, _BESIDE, _ROOM_BYTES = 6, 16, 2, 4 << 20


class Tally:
    """What a body holds, counted as it comes. values: at least as many as there are; text counts too where it looks like them."""

    __slots__ = ("decoded", "length", "values")

    def __init__(self) -> None:
        self.length = self.values = 0
        #: Bytes that its values take once decoded, its text not included.
        self.decoded = 0

    def add(self, piece: bytes) -> None:
        """A further piece has come."""
        commas, opens = piece.count(b","), piece.count(b"{") + piece.count(b"[")
        self.length += len(piece)
        self.values += commas + opens
        self.decoded += commas * _COMMA_BYTES + opens * _OPEN_BYTES + piece.count(b":") * _COLON_BYTES

    @property
    def light(self) -> bool:
        """It can be decoded, validated and hashed on an event loop that others share."""
        return self.length <= LIGHT_BYTES or (self.length <= LIGHT_TEXT_BYTES and self.values <= LIGHT_VALUES)


def most_useful_bytes(bounds: Collection[ContextBound], prompts: int) -> int | None:
    """The longest body of so many prompts that some model could read, however it is written; None: not known."""
    if not bounds or not all(bound.max_tokens and bound.longest_token_bytes and bound.message_token_bytes for bound in bounds):
        return None
    longest = max(bound.max_tokens * max(bound.longest_token_bytes * _SPELLED, _ID_BYTES) for bound in bounds)
    return longest * _BESIDE * prompts + _ROOM_BYTES


@dataclass(eq=False, slots=True)
class Arrival:
    """A body that is arriving. held: bytes that it holds of its owner's share; given_up: somebody else has got them."""

    owner: str
    began_s: float
    last_s: float
    held: int = 0
    given_up: bool = False

    def due_s(self) -> float:
        """When it is too late, if nothing more comes until then."""
        return min(self.began_s + WHOLE_S, self.last_s + REST_S, self.began_s + BEGIN_S + self.held / LEAST_BYTES_PER_S)

    def bytes_per_s(self, now_s: float) -> float:
        """Its pace so far."""
        return self.held / max(now_s - self.began_s, 1e-3)


class Arrivals:
    """All bodies that are arriving."""

    def __init__(self) -> None:
        self._all: set[Arrival] = set()

    def __len__(self) -> int:
        return len(self._all)

    def begin(self, owner: str, now_s: float) -> Arrival:
        """A body begins."""
        arrival = Arrival(owner, now_s, now_s)
        self._all.add(arrival)
        return arrival

    def end(self, arrival: Arrival) -> None:
        """It is there, or will never be. Safe to call twice."""
        self._all.discard(arrival)

    def slowest(self, owner: str, now_s: float) -> Arrival | None:
        """Of the owner's bodies that hold something and have rested for a while, the one with the least pace."""
        slow = [a for a in self._all if a.owner == owner and a.held and now_s - a.last_s >= _RESTED_S]
        return min(slow, key=lambda a: (a.bytes_per_s(now_s), a.began_s), default=None)
