"""Which tiers are used at the moment. The state machine of one tier; what counts as a failure or as slow is judged in meter.py.

    HEALTHY ──> DEGRADED      failures in a row, one that says by itself that more will follow, or slow for a while
    DEGRADED ──> TRIAL        the pause is over: one operation is tried, on which nobody waits
    TRIAL ──> HEALTHY         it went well
    TRIAL ──> DEGRADED        it did not: the next pause is twice as long

A tier that is not HEALTHY is neither read nor written: loads take other sources, saves go to the next tier or are skipped.
Reading and writing are judged apart: a full or read-only disk still serves what it has.

Invariant (`validate`): a tier that is not HEALTHY has a reason, and a time at which it is tried or its trial is given up.
"""

from __future__ import annotations

from kvstore.core.events import Tier
from kvstore.core.instructions import Counted, Instruction, TierChanged
from kvstore.core.state import TIER_MOVES, TierState, move

#: Failures in a row, and slow transfers over how long a time, until a tier is left alone.
_PATIENCE, _SLOW_SAMPLES, _SLOW_S = 3, 3, 0.5
#: The pause before a trial. It doubles with every failed one, and is short again after so long a time of health.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _FORGIVEN_S = 1.0, 60.0, 120.0
#: A trial that has said nothing for so long has failed.
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
    """See the module. `began`: when the operation whose outcome is told was begun."""

    def __init__(self, out: list[Instruction]) -> None:
        self._out = out
        self._tiers = {tier: _Condition() for tier in Tier}
        self._trial_since = dict.fromkeys(Tier, 0.0)
        self.fallen: list[Tier] = []  #: became DEGRADED, perhaps again, while this event was handled
        self.risen: list[Tier] = []  #: became HEALTHY while this event was handled

    def usable(self, tier: Tier) -> bool:
        """Whether the tier is used for ordinary work."""
        return self._tiers[tier].state is TierState.HEALTHY

    def state(self, tier: Tier) -> TierState:
        """Where the tier stands."""
        return self._tiers[tier].state

    def trial_since(self, tier: Tier) -> float:
        """When the tier's last trial began."""
        return self._trial_since[tier]

    @property
    def all_well(self) -> bool:
        """Every tier is HEALTHY."""
        return all(c.state is TierState.HEALTHY for c in self._tiers.values())

    def good(self, tier: Tier, began: float, now: float) -> None:
        """An operation went well, in ordinary time."""
        c = self._tiers[tier]
        if c.state is TierState.HEALTHY:
            c.failures = c.slow = 0
        elif c.state is TierState.TRIAL and began >= self._trial_since[tier]:
            c.state = move(TIER_MOVES, c.state, TierState.HEALTHY)
            c.failures = c.slow = 0
            c.reason, c.healthy_since = "", now
            self.risen.append(tier)
            self._out.append(TierChanged(tier, True, "it works again"))

    def bad(self, tier: Tier, reason: str, began: float, now: float, *, at_once: bool = False) -> None:
        """An operation failed. `at_once`: in a way that the next ones will too."""
        c = self._tiers[tier]
        if c.state is TierState.HEALTHY:
            c.failures += 1
            if at_once or c.failures >= _PATIENCE:
                self._degrade(tier, c, reason, now)
        elif c.state is TierState.TRIAL and began >= self._trial_since[tier]:
            self._degrade(tier, c, reason, now)

    def slow(self, tier: Tier, reason: str, began: float, now: float) -> None:
        """An operation went well but took far too long. One hiccup of the machine makes many that end together."""
        c = self._tiers[tier]
        if c.state is TierState.HEALTHY:
            c.slow_since = now if not c.slow else c.slow_since
            c.slow += 1
            if c.slow >= _SLOW_SAMPLES and now - c.slow_since >= _SLOW_S:
                self._degrade(tier, c, reason, now)
        else:
            self.bad(tier, reason, began, now)

    def due(self, now: float) -> list[Tier]:
        """Tiers whose trial is to begin now: they are in TRIAL from here on. Trials without an outcome are given up."""
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

    def _degrade(self, tier: Tier, c: _Condition, reason: str, now: float) -> None:
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
