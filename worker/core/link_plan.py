"""Which piece of a model's weights comes over which link (Prism, section 5.3).

Link 0 is the device's own to host memory. The others end at other devices: there a piece is first *staged* in a buffer,
then *claimed*, and only then written to this device. Each link has lanes; a lane carries one piece at a time.

A free lane gets the first piece, in layer order, that no other lane is expected to finish sooner. So links end
together, and a slow link brings later pieces rather than delay the next layer. A piece whose staging fails or takes far
too long goes to other lanes. A claimed piece is never given to another one, so no piece is written twice at once.

Times are arguments, in seconds. Not thread-safe.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

#: Pieces that a free lane looks at. A link slower by more than this factor carries nothing.
_AHEAD = 64
#: Staging is overdue after so many times what is expected of it, and not before the first time in seconds; after the
#: second where nothing is known.
_OVERDUE, _OVERDUE_S, _UNKNOWN_S = 4.0, 0.05, 1.0
#: A link's pace is the median of its last pieces, from the third on: one that was held up says little.
_PIECES, _ENOUGH = 5, 3


class LinkPaces:
    """Seconds per byte of a lane of each link, learned from all loads. Loads at one time share it without a lock: an
    estimate may be lost."""

    def __init__(self, links: int = 1) -> None:
        self._known: list[float | None] = [None] * links
        self._last = [list[float]() for _ in range(links)]

    def of(self, link: int) -> float:
        """A link not yet measured is taken for as good as the best; 1 if none is."""
        if (known := self._known[link]) is not None:
            return known
        measured = [pace for pace in self._known if pace is not None]
        return min(measured or itertools.chain(*self._last), default=1.0)

    @property
    def measured(self) -> bool:
        """Whether anything is known."""
        return any(self._last)

    def note(self, link: int, bytes_: int, seconds: float) -> None:
        """A lane took so long for one piece."""
        last = self._last[link] = [*self._last[link][1 - _PIECES :], max(seconds, 1e-9) / max(bytes_, 1)]
        if len(last) >= _ENOUGH:
            self._known[link] = sorted(last)[len(last) // 2]

    def forget(self, links: Sequence[int]) -> None:
        """Measure these links anew."""
        for link in links:
            self._known[link], self._last[link] = None, []


@dataclass(slots=True)
class _Lane:
    link: int
    #: It has asked for a piece, so it will again.
    joined: bool = False
    piece: int | None = None
    began: float = 0.0
    bytes: int = 0
    claimed: bool = False
    #: It was overdue: the piece is another's.
    lost: bool = False


class LinkPlan:
    """One load. carried: bytes that came over each link.

    Invariants (`validate`): each piece waits, is under way on one lane, or is done; waiting pieces are in order.
    """

    def __init__(self, sizes: Sequence[int], lanes: Sequence[int], paces: LinkPaces) -> None:
        """sizes: bytes of each piece, in layer order. lanes: the link of each lane; 0 is among them. paces: learns."""
        self._sizes, self._paces = sizes, paces
        self._lanes = [_Lane(link) for link in lanes]
        self._waiting = list(range(len(sizes)))
        self._done = 0
        self._out: set[int] = set()
        self.carried = [0] * (max(lanes) + 1)

    @property
    def over(self) -> bool:
        """All pieces are done."""
        return self._done == len(self._sizes)

    @property
    def writing(self) -> bool:
        """Whether a lane may be writing to the device."""
        return any(lane.piece is not None and self._writes(lane) for lane in self._lanes)

    def out(self, lane: int) -> bool:
        """Whether the lane's link has failed in this load."""
        return self._lanes[lane].link in self._out

    def take(self, lane: int, now: float) -> int | None:
        """The piece that this free lane is to bring now. None: ask again soon, unless all is `over`, or the link is
        `out`."""
        self._take_back(now)
        mine = self._lanes[lane]
        mine.joined = True
        if self.out(lane):
            return None
        ends = {n: self._free_at(each, now) for n, each in enumerate(self._lanes) if self._counts(each)}
        for at, piece in enumerate(self._waiting[:_AHEAD]):
            size = self._sizes[piece]
            first = min(ends, key=lambda n: (ends[n] + size * self._pace(n), n != lane))
            if first == lane:
                del self._waiting[at]
                mine.piece, mine.began, mine.bytes = piece, now, size
                return piece
            ends[first] += size * self._pace(first)
        return None

    def claim(self, lane: int, now: float) -> bool:
        """The piece is staged. True: deliver it. False: it is another lane's by now, and this one is free."""
        each = self._lanes[lane]
        each.claimed = not each.lost
        if each.lost:
            self._free(each, now)
        return each.claimed

    def done(self, lane: int, now: float) -> int:
        """The lane's piece is on the device; returns it."""
        each, piece = self._lanes[lane], self._lanes[lane].piece
        assert piece is not None and self._writes(each), "only what is delivered is done"
        self.carried[each.link] += each.bytes
        self._done += 1
        self._free(each, now)
        if self.over:
            self._paces.forget([link for link, carried in enumerate(self.carried) if not carried])
        return piece

    def failed(self, lane: int) -> None:
        """The lane's link is out for this load; what it had goes to others. Nothing of it is written any more."""
        each = self._lanes[lane]
        self._out.add(each.link)
        if each.piece is not None:
            bisect.insort(self._waiting, each.piece)
        each.piece, each.claimed, each.lost = None, False, False

    def validate(self) -> None:
        """Raises AssertionError."""
        under_way = [lane.piece for lane in self._lanes if lane.piece is not None]
        assert self._waiting == sorted(self._waiting), "not in order"
        assert len({*self._waiting, *under_way}) == len(self._waiting) + len(under_way), "a piece is in two places"
        assert len(self._waiting) + len(under_way) + self._done == len(self._sizes), "a piece is lost"
        assert not any(lane.claimed and (lane.lost or lane.piece is None) for lane in self._lanes), "a claim of nothing"

    # ---- estimates ---------------------------------------------------------------------------------------------
    def _pace(self, lane: int) -> float:
        return self._paces.of(self._lanes[lane].link)

    def _counts(self, lane: _Lane) -> bool:
        return lane.joined and lane.link not in self._out and not lane.lost

    def _writes(self, lane: _Lane) -> bool:
        return lane.link == 0 or lane.claimed

    def _free_at(self, lane: _Lane, now: float) -> float:
        if lane.piece is None:
            return now
        return max(now, lane.began + lane.bytes * self._paces.of(lane.link))

    def _take_back(self, now: float) -> None:
        """Pieces whose staging is overdue wait again."""
        for lane in self._lanes:
            limit_s = max(_OVERDUE * lane.bytes * self._paces.of(lane.link), _OVERDUE_S)
            limit_s = limit_s if self._paces.measured else _UNKNOWN_S
            if lane.piece is not None and not self._writes(lane) and now - lane.began > limit_s:
                bisect.insort(self._waiting, lane.piece)
                lane.piece, lane.lost = None, True

    def _free(self, lane: _Lane, now: float) -> None:
        self._paces.note(lane.link, lane.bytes, now - lane.began)
        lane.piece, lane.claimed, lane.lost = None, False, False
