"""Judges every transfer: `rates` learns its speed, and `health` is told whether it was good, bad or slow.

Every start and end of a transfer is reported here. Peers have rates but no health.

Slow means many times longer than usual for that source, and longer than a busy machine explains. The usual time follows
measurements, trials included: a disk that stays slow counts as usual after about twenty minutes and is then chosen by
its estimate.

Invariant: `_writes` are the writes that slower tiers have not answered.
"""

from __future__ import annotations

from collections.abc import Collection

from kvstore.core.events import Fault, SourceKind, TierChannel, Wrote
from kvstore.core.health import Health
from kvstore.core.instructions import Instruction
from kvstore.core.rates import BLOB, SSD, Cost, Rates, Source

#: A slow transfer takes at least _FAR times longer than usual, and at least this long.
_FAR = 20.0
_SLOW_S = {
    TierChannel.SSD_READ: 0.5,
    TierChannel.SSD_WRITE: 3.0,
    TierChannel.BLOB_READ: 1.0,
    TierChannel.BLOB_WRITE: 10.0,
}
#: A tier is stalled when writes wait and none has ended for this long.
_STALL_S = {TierChannel.SSD_WRITE: 8.0, TierChannel.BLOB_WRITE: 20.0}
#: A read is given up after _GIVE_UP times its estimate, within these limits.
_GIVE_UP = 20.0
_GIVE_UP_S = {SourceKind.SSD: (2.0, 6.0), SourceKind.PEER: (1.5, 2.5), SourceKind.BLOB: (3.0, 6.0)}
#: Assumed cost of write-back before the first measurement: gathering and syncing a group, then its bytes.
_WRITE_COST = {TierChannel.SSD_WRITE: Cost(0.1, 5e-9), TierChannel.BLOB_WRITE: Cost(0.2, 2e-8)}
_WRITE_USUAL_WEIGHT = 0.02

READ_TIER = {SourceKind.SSD: TierChannel.SSD_READ, SourceKind.BLOB: TierChannel.BLOB_READ}
_SOURCE_OF = {TierChannel.SSD_READ: SSD, TierChannel.BLOB_READ: BLOB}
_AT_ONCE = {
    Wrote.FULL: "no space is left",
    Wrote.RESERVED: "what is left of the disk stays free (kv.disk_reserve)",
    Wrote.READ_ONLY: "it is read-only",
    Wrote.BROKEN: "the device or its directory is broken",
}
_ERRORS = (Fault.UNAVAILABLE, Fault.MEDIUM)


class Meter:
    """See the module. `now`: time of the current event, monotonic seconds."""

    def __init__(self, out: list[Instruction]) -> None:
        self.rates = Rates()
        self.health = Health(out)
        self.now = 0.0
        self._writes: dict[TierChannel, dict[bytes, tuple[float, int]]] = {
            TierChannel.SSD_WRITE: {},
            TierChannel.BLOB_WRITE: {},
        }
        self._written: dict[TierChannel, int] = dict.fromkeys(self._writes, 0)
        self._progress: dict[TierChannel, float] = dict.fromkeys(self._writes, 0.0)
        self._usual = dict(_WRITE_COST)

    def admits(self, tier: TierChannel) -> bool:
        """Whether the tier is in use."""
        return self.health.usable(tier)

    def reads(self, kind: SourceKind) -> bool:
        """Whether this kind of source is in use."""
        return kind is SourceKind.PEER or self.health.usable(READ_TIER[kind])

    # ---- reads

    def give_up_s(self, source: Source, size: int) -> float:
        """Seconds after which a read of `size` bytes that begins now is given up."""
        least, most = _GIVE_UP_S[source.kind]
        return min(max(_GIVE_UP * self.rates.estimate_s(source, size, self.now), least), most)

    def fetched(self, source: Source, size: int, began: float, moved_before: int, faults: Collection[Fault]) -> None:
        """A read ended. Corrupt and missing pieces are answers; only unanswered reads count against the tier."""
        tier, took_s = READ_TIER.get(source.kind), self.now - began
        if any(fault in _ERRORS for fault in faults):
            self.rates.failed(source, size, took_s, self.now)
            if tier is not None:
                self.health.bad(tier, "reads fail", began, self.now)
            return
        slowness = 0.0 if faults else self.rates.observe(source, size, moved_before, took_s, self.now)
        if tier is None:
            return
        if slowness > _FAR and took_s > _SLOW_S[tier]:
            self.health.slow(tier, f"reads take {slowness:.0f} times longer than usual", began, self.now)
        else:
            self.health.good(tier, began, self.now)

    def stalled(self, source: Source, size: int, began: float) -> None:
        """A read did not end in time."""
        self.rates.failed(source, size, self.now - began, self.now)
        tier = READ_TIER.get(source.kind)
        if tier is not None:
            self.health.bad(tier, "reads do not end", began, self.now)

    def probed(self, answered: int, failed: int) -> None:
        """The blob tier was probed: numbers of questions it answered, and did not."""
        if answered:
            self.health.good(TierChannel.BLOB_READ, self.now, self.now)
        else:
            for _ in range(failed):
                self.health.bad(TierChannel.BLOB_READ, "it does not answer", self.now, self.now)

    # ---- writes

    def write_began(self, tier: TierChannel, key: bytes) -> None:
        """A chunk was handed to a slower tier."""
        self._writes[tier][key] = (self.now, self._written[tier])

    def written(self, tier: TierChannel, key: bytes, size: int, outcome: Wrote) -> None:
        """The slower tier answered."""
        began, before = self._writes[tier].pop(key, (self.now, self._written[tier]))
        self._progress[tier] = self.now
        if outcome is Wrote.OK:
            self._written[tier] += size
            self._judge(tier, self._written[tier] - before, began)
        elif outcome in _AT_ONCE:
            self.health.bad(tier, _AT_ONCE[outcome], began, self.now, at_once=True)
        elif outcome is Wrote.FAILED:
            self.health.bad(tier, "writes fail", began, self.now)

    def _judge(self, tier: TierChannel, moved: int, began: float) -> None:
        took_s = self.now - began
        slowness = took_s / self._usual[tier].of(moved)
        self._usual[tier] = self._usual[tier].corrected(moved, took_s, _WRITE_USUAL_WEIGHT)
        if slowness > _FAR and took_s > _SLOW_S[tier]:
            self.health.slow(tier, f"writes take {slowness:.0f} times longer than usual", began, self.now)
        else:
            self.health.good(tier, began, self.now)

    # ---- trials and time

    def tried(self, tier: TierChannel, outcome: Wrote, size: int) -> None:
        """A trial by the shell (TryTier) ended. size: bytes moved."""
        began = self.health.trial_since(tier)
        if outcome is not Wrote.OK:
            self.health.bad(tier, _AT_ONCE.get(outcome, "it does not answer"), began, self.now)
        elif tier in self._writes:
            self._judge(tier, size, began)
        elif self.now - began > max(_SLOW_S[tier], _FAR * self.rates.usual_s(_SOURCE_OF[tier], size)):
            self.health.slow(tier, "a trial took too long", began, self.now)
        else:
            self.health.good(tier, began, self.now)

    def tick(self) -> list[TierChannel]:
        """Time passed: detect stalled writes. Returns the tiers to try now."""
        for tier, writes in self._writes.items():
            oldest = min((began for began, _ in writes.values()), default=self.now)
            if self.now - max(oldest, self._progress[tier]) > _STALL_S[tier]:
                self.health.bad(tier, "writes do not end", self.now, self.now, at_once=True)
        return self.health.due(self.now)

    @property
    def idle(self) -> bool:
        """Whether no write is pending and every tier is HEALTHY, so that ticks change nothing."""
        return self.health.all_well and not any(self._writes.values())

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        self.rates.validate()
        self.health.validate()
