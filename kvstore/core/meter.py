"""What every transfer tells about its source: `rates` learns from it, and `health` is told whether that was well, bad or slow.

Everyone who starts or ends a transfer says so here. Peers have rates but no health: a peer that fails is another's tier.

Slow is: many times longer than usual for that source, and longer than a busy machine explains. Usual drifts with what is
measured, trials included; so a disk that stays slow is the usual one after some twenty minutes, and is then chosen by its estimate.

Invariant (`validate`): `_writes` are the writes that slower tiers have not answered.
"""

from __future__ import annotations

from collections.abc import Collection

from kvstore.core.events import Fault, SourceKind, Tier, Wrote
from kvstore.core.health import Health
from kvstore.core.instructions import Instruction
from kvstore.core.rates import BLOB, SSD, Cost, Rates, Source

#: How many times longer than usual, and how long at least, a transfer takes that counts as slow.
_FAR = 20.0
_SLOW_S = {Tier.SSD_READ: 0.5, Tier.SSD_WRITE: 3.0, Tier.BLOB_READ: 1.0, Tier.BLOB_WRITE: 10.0}
#: Nothing was written for so long though something waits: the tier is stalled.
_STALL_S = {Tier.SSD_WRITE: 8.0, Tier.BLOB_WRITE: 20.0}
#: A read is given up after so many times its estimate, within these limits.
_GIVE_UP = 20.0
_GIVE_UP_S = {SourceKind.SSD: (2.0, 6.0), SourceKind.PEER: (1.5, 2.5), SourceKind.BLOB: (3.0, 6.0)}
#: A disk's write-back as one believes it before the first: the gathering and syncing of a group, then its bytes.
_WRITE_COST = {Tier.SSD_WRITE: Cost(0.1, 5e-9), Tier.BLOB_WRITE: Cost(0.2, 2e-8)}
_WRITE_USUAL_WEIGHT = 0.02

READ_TIER = {SourceKind.SSD: Tier.SSD_READ, SourceKind.BLOB: Tier.BLOB_READ}
_SOURCE_OF = {Tier.SSD_READ: SSD, Tier.BLOB_READ: BLOB}
_AT_ONCE = {
    Wrote.FULL: "no space is left",
    Wrote.RESERVED: "what is left of the disk stays free (kv.disk_reserve)",
    Wrote.READ_ONLY: "it is read-only",
    Wrote.BROKEN: "the device or its directory is broken",
}
_ERRORS = (Fault.UNAVAILABLE, Fault.MEDIUM)


class Meter:
    """See the module. `now`: the time of the event that is being handled, monotonic seconds."""

    def __init__(self, out: list[Instruction]) -> None:
        self.rates = Rates()
        self.health = Health(out)
        self.now = 0.0
        self._writes: dict[Tier, dict[bytes, tuple[float, int]]] = {Tier.SSD_WRITE: {}, Tier.BLOB_WRITE: {}}
        self._written: dict[Tier, int] = dict.fromkeys(self._writes, 0)
        self._progress: dict[Tier, float] = dict.fromkeys(self._writes, 0.0)
        self._usual = dict(_WRITE_COST)

    def admits(self, tier: Tier) -> bool:
        """Whether the tier is used at the moment."""
        return self.health.usable(tier)

    def reads(self, kind: SourceKind) -> bool:
        """Whether this kind of source is read at the moment."""
        return kind is SourceKind.PEER or self.health.usable(READ_TIER[kind])

    # ---- reads

    def give_up_s(self, source: Source, size: int) -> float:
        """After which time a read of `size` bytes that begins now is looked for elsewhere."""
        least, most = _GIVE_UP_S[source.kind]
        return min(max(_GIVE_UP * self.rates.estimate_s(source, size, self.now), least), most)

    def fetched(self, source: Source, size: int, began: float, moved_before: int, faults: Collection[Fault]) -> None:
        """A read ended. Corrupt and missing pieces are answers; what counts against a tier is that it gave none."""
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
        """A read has not ended in its time."""
        self.rates.failed(source, size, self.now - began, self.now)
        tier = READ_TIER.get(source.kind)
        if tier is not None:
            self.health.bad(tier, "reads do not end", began, self.now)

    def probed(self, answered: int, failed: int) -> None:
        """The blob tier was asked for chunks: how many questions it answered, and how many not."""
        if answered:
            self.health.good(Tier.BLOB_READ, self.now, self.now)
        else:
            for _ in range(failed):
                self.health.bad(Tier.BLOB_READ, "it does not answer", self.now, self.now)

    # ---- writes

    def write_began(self, tier: Tier, key: bytes) -> None:
        """A chunk was handed to a slower tier."""
        self._writes[tier][key] = (self.now, self._written[tier])

    def written(self, tier: Tier, key: bytes, size: int, outcome: Wrote) -> None:
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

    def _judge(self, tier: Tier, moved: int, began: float) -> None:
        took_s = self.now - began
        slowness = took_s / self._usual[tier].of(moved)
        self._usual[tier] = self._usual[tier].corrected(moved, took_s, _WRITE_USUAL_WEIGHT)
        if slowness > _FAR and took_s > _SLOW_S[tier]:
            self.health.slow(tier, f"writes take {slowness:.0f} times longer than usual", began, self.now)
        else:
            self.health.good(tier, began, self.now)

    # ---- trials and time

    def tried(self, tier: Tier, outcome: Wrote, size: int) -> None:
        """A trial of the shell ended (TryTier); `size`: bytes that it moved."""
        began = self.health.trial_since(tier)
        if outcome is not Wrote.OK:
            self.health.bad(tier, _AT_ONCE.get(outcome, "it does not answer"), began, self.now)
        elif tier in self._writes:
            self._judge(tier, size, began)
        elif self.now - began > max(_SLOW_S[tier], _FAR * self.rates.usual_s(_SOURCE_OF[tier], size)):
            self.health.slow(tier, "a trial took too long", began, self.now)
        else:
            self.health.good(tier, began, self.now)

    def tick(self) -> list[Tier]:
        """Time passed: stalled writes are noticed. Returns the tiers that are to be tried now."""
        for tier, writes in self._writes.items():
            oldest = min((began for began, _ in writes.values()), default=self.now)
            if self.now - max(oldest, self._progress[tier]) > _STALL_S[tier]:
                self.health.bad(tier, "writes do not end", self.now, self.now, at_once=True)
        return self.health.due(self.now)

    @property
    def idle(self) -> bool:
        """Nothing is waited for and every tier is well: time alone changes nothing."""
        return self.health.all_well and not any(self._writes.values())

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        self.rates.validate()
        self.health.validate()
