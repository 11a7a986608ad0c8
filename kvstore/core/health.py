"""Which tiers are in use: the state machine of one tier. What counts as a failure or as slow is decided in meter.py.

    HEALTHY ──> DEGRADED      failures in a row, one failure that will recur, or slow for a while
    DEGRADED ──> TRIAL        the pause is over: one operation is tried; no request waits for it
    TRIAL ──> HEALTHY         it succeeded
    TRIAL ──> DEGRADED        it failed: the next pause is twice as long

A tier that is not HEALTHY is neither read nor written: loads take other sources, saves go to the next tier or are
skipped. Reading and writing are separate tiers: a full or read-only disk still serves what it has.

Invariant (`validate`): a tier that is not HEALTHY has a reason, and a time at which it is tried or its trial is given
up.
"""

from __future__ import annotations

from kvstore.core.events import TierChannel
from kvstore.core.instructions import Counted, Instruction, TierChanged
from kvstore.core.state import TIER_MOVES, TierState, move

#: A tier degrades after this many failures in a row, or this many slow transfers in a row over this time.
_MOST_FAILURES, _SLOW_SAMPLES, _SLOW_S = 3, 3, 0.5
#: The pause before a trial. It doubles with every failed trial, and is reset after _FORGIVEN_S of health.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _FORGIVEN_S = 1.0, 60.0, 120.0
#: A trial without an outcome for this long has failed.
_TRIAL_S = 45.0


class _Condition:
    __slots__ = ("failures", "healthy_since", "pause_s", "reason", "slow", "slow_since", "state", "until")

    def __init__(self) -> None:
        self.state = TierState.HEALTHY
        self.failures = 0
        self.slow = 0
        self.slow_since = 0.0
        self.reason = ""
        self.pause_s = 0.0
        self.until = 0.0  #: DEGRADED: when to try; TRIAL: when to give the trial up
        self.healthy_since = float("-inf")


class Health:
    """See the module. `began`: when the reported operation began; a trial is judged only by operations begun in it."""

    def __init__(self, out: list[Instruction]) -> None:
        self._out = out
        self._tiers = {tier: _Condition() for tier in TierChannel}
        self._trial_since = dict.fromkeys(TierChannel, 0.0)
        self.fallen: list[TierChannel] = []  #: tiers that became DEGRADED during this event
        self.risen: list[TierChannel] = []  #: tiers that became HEALTHY during this event

    def usable(self, tier: TierChannel) -> bool:
        """Whether the tier is HEALTHY."""
        return self._tiers[tier].state is TierState.HEALTHY

    def state(self, tier: TierChannel) -> TierState:
        """The tier's state."""
        return self._tiers[tier].state

    def trial_since(self, tier: TierChannel) -> float:
        """When the tier's last trial began."""
        return self._trial_since[tier]

    @property
    def all_well(self) -> bool:
        """Whether every tier is HEALTHY."""
        return all(c.state is TierState.HEALTHY for c in self._tiers.values())

    def good(self, tier: TierChannel, began: float, now: float) -> None:
        """An operation succeeded in ordinary time."""
        c = self._tiers[tier]
        if c.state is TierState.HEALTHY:
            c.failures = c.slow = 0
        elif c.state is TierState.TRIAL and began >= self._trial_since[tier]:
            c.state = move(TIER_MOVES, c.state, TierState.HEALTHY)
            c.failures = c.slow = 0
            c.reason, c.healthy_since = "", now
            self.risen.append(tier)
            self._out.append(TierChanged(tier, True, "it works again"))

    def bad(self, tier: TierChannel, reason: str, began: float, now: float, *, at_once: bool = False) -> None:
        """An operation failed. at_once: degrade now, because the next ones will fail too."""
        c = self._tiers[tier]
        if c.state is TierState.HEALTHY:
            c.failures += 1
            if at_once or c.failures >= _MOST_FAILURES:
                self._degrade(tier, c, reason, now)
        elif c.state is TierState.TRIAL and began >= self._trial_since[tier]:
            self._degrade(tier, c, reason, now)

    def slow(self, tier: TierChannel, reason: str, began: float, now: float) -> None:
        """An operation succeeded but took far too long. A single hiccup, which many operations share, is not enough."""
        c = self._tiers[tier]
        if c.state is TierState.HEALTHY:
            c.slow_since = now if not c.slow else c.slow_since
            c.slow += 1
            if c.slow >= _SLOW_SAMPLES and now - c.slow_since >= _SLOW_S:
                self._degrade(tier, c, reason, now)
        else:
            self.bad(tier, reason, began, now)

    def due(self, now: float) -> list[TierChannel]:
        """Move tiers whose pause is over to TRIAL and return them. Fails trials without an outcome."""
        begin = []
        for tier, c in self._tiers.items():
            if c.state is TierState.TRIAL and now >= c.until:
                self._degrade(tier, c, "a trial did not end", now)
            elif c.state is TierState.DEGRADED and now >= c.until:
                c.state = move(TIER_MOVES, c.state, TierState.TRIAL)
                c.until = now + _TRIAL_S
                self._trial_since[tier] = now
                begin.append(tier)
        return begin

    def _degrade(self, tier: TierChannel, c: _Condition, reason: str, now: float) -> None:
        self.fallen.append(tier)
        if c.state is TierState.HEALTHY:
            self._out.append(TierChanged(tier, False, reason))
            self._out.append(Counted("tiers_degraded"))
            if now - c.healthy_since >= _FORGIVEN_S:
                c.pause_s = 0.0
        c.state = move(TIER_MOVES, c.state, TierState.DEGRADED)
        c.pause_s = min(c.pause_s * 2 or _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        c.until, c.reason = now + c.pause_s, reason

    def validate(self) -> None:
        """Raise AssertionError when the invariant does not hold."""
        for c in self._tiers.values():
            assert (c.state is TierState.HEALTHY) == (not c.reason)
            assert c.state is TierState.HEALTHY or c.pause_s > 0
