"""Decides how large a body may be, how much memory it needs, how long it may take to arrive, and which body is dropped
for room.

Reads nothing itself. The memory figures are measured with both parsers (CPython 3.12, pydantic-core 2); the worst case
is an array of empty objects, with 72 bytes of memory for 3 of JSON.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from contracts.context import ContextBound

#: Memory of a decoded list item or number, of an object or list, and of an object's entry.
_COMMA_BYTES, _OPEN_BYTES, _COLON_BYTES = 40, 64, 60
#: A body is decoded on the event loop up to LIGHT_BYTES, or up to LIGHT_TEXT_BYTES with at most LIGHT_VALUES values.
#: Either takes less than 20 ms.
LIGHT_BYTES, LIGHT_TEXT_BYTES, LIGHT_VALUES = 32 << 10, 192 << 10, 4096
#: Values in a body that is no request for text, at most. A batch of 256 hints has 2,048.
SMALL_VALUES = 16 << 10
#: Decoded size of a body at most, as a multiple of the longest body's length. Text with a comma in every fourth
#: character stays below.
MOST_DECODED = 12

#: Seconds for a whole body, between two pieces, and to begin; and the bytes a second that it must then deliver.
WHOLE_S, REST_S, BEGIN_S, LEAST_BYTES_PER_S = 60.0, 10.0, 10.0, 64 << 10
#: A body may be dropped for room when nothing of it has come for this long, in seconds.
_RESTED_S = 1.0

#: How long JSON may be: six bytes for one (`\\u0041`), a line per token id, twice the text (thoughts beside answers),
#: and room for tools, schemas and many small messages.
_SPELLED, _ID_BYTES, _BESIDE, _ROOM_BYTES = 6, 16, 2, 4 << 20


class Tally:
    """Counts a body's bytes and values as they arrive. values: an upper bound, because text that looks like values
    counts too."""

    __slots__ = ("decoded", "length", "values")

    def __init__(self) -> None:
        self.length = self.values = 0
        #: Memory of its decoded values in bytes, without the text.
        self.decoded = 0

    def add(self, piece: bytes) -> None:
        """Count another piece."""
        commas, opens = piece.count(b","), piece.count(b"{") + piece.count(b"[")
        self.length += len(piece)
        self.values += commas + opens
        self.decoded += commas * _COMMA_BYTES + opens * _OPEN_BYTES + piece.count(b":") * _COLON_BYTES

    @property
    def light(self) -> bool:
        """Whether it can be decoded, validated and hashed on the event loop."""
        return self.length <= LIGHT_BYTES or (self.length <= LIGHT_TEXT_BYTES and self.values <= LIGHT_VALUES)


def most_useful_bytes(bounds: Collection[ContextBound], prompts: int) -> int | None:
    """Length of the longest body with this many prompts that some model could read, in any spelling; None: unknown."""
    if not bounds or not all(
        bound.max_tokens and bound.longest_token_bytes and bound.message_token_bytes for bound in bounds
    ):
        return None
    longest = max(bound.max_tokens * max(bound.longest_token_bytes * _SPELLED, _ID_BYTES) for bound in bounds)
    return longest * _BESIDE * prompts + _ROOM_BYTES


@dataclass(eq=False, slots=True)
class Arrival:
    """A body that is arriving. held: bytes of its owner's share that it holds. given_up: it was dropped for room."""

    owner: str
    began_s: float
    last_s: float
    held: int = 0
    given_up: bool = False

    def due_s(self) -> float:
        """The deadline, if nothing more arrives before."""
        return min(self.began_s + WHOLE_S, self.last_s + REST_S, self.began_s + BEGIN_S + self.held / LEAST_BYTES_PER_S)

    def bytes_per_s(self, now_s: float) -> float:
        """Its rate so far."""
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
        """The body is complete or has failed. Safe to call twice."""
        self._all.discard(arrival)

    def slowest(self, owner: str, now_s: float) -> Arrival | None:
        """The slowest of the owner's stalled bodies that hold bytes, or None. One that was dropped holds none any more,
        though its request has not ended yet."""
        stalled = (a for a in self._all if a.owner == owner and not a.given_up)
        slow = [a for a in stalled if a.held and now_s - a.last_s >= _RESTED_S]
        return min(slow, key=lambda a: (a.bytes_per_s(now_s), a.began_s), default=None)
