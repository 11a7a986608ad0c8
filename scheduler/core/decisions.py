"""What was decided lately for each session, for whoever asks why: bounded, and small enough to be kept for every turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from contracts.ids import SessionKey
from contracts.turn_times import Phase
from scheduler.core.placement import Choice

#: Decisions that are kept, of all sessions and of one.
KEPT, KEPT_OF_ONE = 20_000, 4


@dataclass(frozen=True, slots=True)
class Decision:
    """One choice of a node, and when. Times are on the scheduler's clock.

    model: for which. what: `turn`, `hint`, or `move` (a hint that left a node). hinted: a turn that a hint had announced. prefetched: the
    node to which the hint had sent the cache, `prefetched_s` before. request_id: of a turn. pin: the caller's. avoided: nodes that had
    just failed it.
    sources: other nodes with its cache. worth: of a hint, what it was worth. taken: the gateway sent it there before it asked.
    until_first_s, after_s: of a turn that has ended, where its time went, in seconds; empty: its gateway has not said.
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
    worth: str = ""
    taken: bool = False
    until_first_s: Mapping[Phase, float] = field(default_factory=dict)
    after_s: Mapping[Phase, float] = field(default_factory=dict)

    @property
    def node(self) -> str:
        """The chosen one."""
        return self.choice.node


class Decisions:
    """The latest ones of the sessions decided for latest. Invariant: at most `kept` in all, at most KEPT_OF_ONE of a session."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept, self._count = kept, 0
        self._by_session: OrderedDict[SessionKey, tuple[Decision, ...]] = OrderedDict()  #: the session decided for longest ago first

    def __len__(self) -> int:
        return self._count

    def note(self, session: SessionKey, decision: Decision) -> None:
        """Keep one more."""
        before = self._by_session.pop(session, ())
        now = self._by_session[session] = (*before[-KEPT_OF_ONE + 1 :], decision)
        self._count += len(now) - len(before)
        while self._count > self._kept:
            _, oldest = self._by_session.popitem(last=False)
            self._count -= len(oldest)

    def timed(self, session: SessionKey, request_id: str, until_first_s: Mapping[Phase, float], after_s: Mapping[Phase, float]) -> bool:
        """Where the time of a turn went, which has this id; whether its decision is remembered. A session stays as old as it was."""
        kept = self._by_session.get(session, ())
        for i, decision in enumerate(kept):
            if decision.what == "turn" and decision.request_id == request_id:
                told = replace(decision, until_first_s=until_first_s, after_s=after_s)
                self._by_session[session] = (*kept[:i], told, *kept[i + 1 :])
                return True
        return False

    def last_model(self, session: SessionKey) -> str:
        """The model of its latest turn that is remembered, or empty."""
        return next((d.model for d in self.of(session) if d.what == "turn"), "")

    def last_turn(self, session: SessionKey) -> str:
        """The request of its latest turn that is remembered, or empty."""
        return next((d.request_id for d in self.of(session) if d.what == "turn"), "")

    def of(self, session: SessionKey) -> tuple[Decision, ...]:
        """A session's, the latest first."""
        return self._by_session.get(session, ())[::-1]

    def forget(self, session: SessionKey) -> None:
        """The session was erased."""
        self._count -= len(self._by_session.pop(session, ()))

    def validate(self) -> None:
        """Raise AssertionError when the bounds do not hold."""
        assert self._count == sum(map(len, self._by_session.values())) <= self._kept
        assert all(0 < len(d) <= KEPT_OF_ONE for d in self._by_session.values())
