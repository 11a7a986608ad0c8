"""The latest placement decisions of each session, to explain them. Bounded, and cheap enough to keep for every
turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from contracts.ids import SessionKey
from contracts.turn_times import Phase
from scheduler.core.placement import Choice

#: Decisions kept, of all sessions and of one.
KEPT, KEPT_OF_ONE = 20_000, 4


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice of a device. Times are on the scheduler's clock.

    what: `turn`, `hint`, or `move` (a hint that changed its device). request_id: of a turn. hinted: the turn had a
    hint. prefetched: the device to which the hint had sent the cache, `prefetched_s` before. moves: of the hint so far.
    pin: the caller's. avoided: number of devices that had just failed the turn. sources: other nodes with its cache.
    known_s: last use of the session's newest manifest, as known then. worth: `trust.Worth` of a hint. taken: the
    gateway chose by a route hint. until_first_s, after_s: where an ended turn's time went, before and after its first
    token, in seconds; empty: the gateway has not reported it.
    """

    what: str
    at_s: float
    choice: Choice
    model: str = ""
    request_id: str = ""
    hinted: bool = False
    prefetched: str = ""
    prefetched_s: float = 0.0
    moves: int = 0
    pin: str = ""
    avoided: int = 0
    sources: tuple[str, ...] = ()
    known_s: float = 0.0
    worth: str = ""
    taken: bool = False
    until_first_s: Mapping[Phase, float] = field(default_factory=dict)
    after_s: Mapping[Phase, float] = field(default_factory=dict)

    @property
    def node(self) -> str:
        """The chosen device."""
        return self.choice.node


class Decisions:
    """See the module. Invariant: at most `kept` decisions in all, and at most KEPT_OF_ONE of a session. Sessions whose
    last decision is oldest are dropped first."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept, self._count = kept, 0
        #: oldest last decision first
        self._by_session: OrderedDict[SessionKey, tuple[Decision, ...]] = OrderedDict()

    def __len__(self) -> int:
        return self._count

    def note(self, session: SessionKey, decision: Decision) -> None:
        """Record a decision."""
        before = self._by_session.pop(session, ())
        now = self._by_session[session] = (*before[-KEPT_OF_ONE + 1 :], decision)
        self._count += len(now) - len(before)
        while self._count > self._kept:
            _, oldest = self._by_session.popitem(last=False)
            self._count -= len(oldest)

    def timed(
        self, session: SessionKey, request_id: str, until_first_s: Mapping[Phase, float], after_s: Mapping[Phase, float]
    ) -> bool:
        """Record where a turn's time went. False if its decision is no longer kept. Does not renew the session."""
        kept = self._by_session.get(session, ())
        for i, decision in enumerate(kept):
            if decision.what == "turn" and decision.request_id == request_id:
                told = replace(decision, until_first_s=until_first_s, after_s=after_s)
                self._by_session[session] = (*kept[:i], told, *kept[i + 1 :])
                return True
        return False

    def last_model(self, session: SessionKey) -> str:
        """The model of the session's latest turn; empty: not known."""
        turn = self.last_turn(session)
        return turn.model if turn is not None else ""

    def last_turn(self, session: SessionKey) -> Decision | None:
        """The session's latest turn; None: not known."""
        return next((d for d in self.of(session) if d.what == "turn"), None)

    def of(self, session: SessionKey) -> tuple[Decision, ...]:
        """The session's decisions, latest first."""
        return self._by_session.get(session, ())[::-1]

    def forget(self, session: SessionKey) -> None:
        """The session was erased."""
        self._count -= len(self._by_session.pop(session, ()))

    def validate(self) -> None:
        """Raise AssertionError when the bounds do not hold."""
        assert self._count == sum(map(len, self._by_session.values())) <= self._kept
        assert all(0 < len(d) <= KEPT_OF_ONE for d in self._by_session.values())
