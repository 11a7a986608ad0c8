"""Which part of a device trains while it serves, step by step (HARLI, sections 5.2.3 and 6.2).

Before each step: the split whose predicted latency is closest below the target, with a margin; that leaves training the
most memory bandwidth. Of those that are as close, the one with most units for training. Where training's speed was
measured for each split, the quickest that is in time. None is: training pauses.

- A split that holds is kept for `HOLD_S`; one that would be late is left at once.
- Training that has no work gives all units back. Serving that has had no step for `IDLE_S` gives all but one.
- Predictions can be wrong for long (another process on the machine). If more than `LATE` of the steps beside training
  are late, more than alone, training gets a unit less, and one more again after a while, which doubles with each
  failure.

Units that run when training pauses end first: up to 10 ms, so nothing is learned from that step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from worker.core.predictor import Predictor

#: Time between two changes of the split, unless the present one would be late (the paper: about 100 ms).
HOLD_S = 0.1
#: Serving is idle after so long without a step.
IDLE_S = 0.05
#: Part of the steps beside training that may be late, over the last `_WINDOW` of them, and at least so many.
LATE, _WINDOW, _LEAST_STEPS = 0.01, 1000, 200
#: Time until training may have a unit more again after steps were late: at first, and at most.
RETRY_S, _MOST_RETRY_S = 10.0, 320.0
#: Time over which `spare` is a mean.
_SPARE_S = 60.0


class Split(NamedTuple):
    """Units of the device for inference and for training; not all need be used."""

    infer: int
    training: int


def choose(
    predictor: Predictor,
    splits: Iterable[Split],
    batch: int,
    tokens: int,
    prefill_tokens: int,
    target_s: float,
    margin: float | None = None,
) -> Split | None:
    """The split for a step; None: training must pause. tokens: context of all sequences. target_s: infinite for none.
    margin: predictions may be so much too short; None: `predictor.margin`."""
    may_err = predictor.margin if margin is None else margin
    rates = {(p.infer, p.training): p.trained_tokens_s for p in predictor.fit.pairs}
    able = dict[Split, float]()
    for split in splits:
        latency_s = (1 + may_err) * predictor.latency_s(*split, batch, tokens, prefill_tokens)
        if latency_s <= target_s:
            able[split] = latency_s
    if not able:
        return None
    if all(rates[split] for split in able):
        return max(able, key=lambda split: (rates[split], able[split], -split.infer))
    # What differs by less than predictions may be off is equal: training gets more. Without a target, all is.
    least_s = max(able.values()) / (1 + may_err) if math.isfinite(target_s) else 0.0
    closest = [split for split, latency_s in able.items() if latency_s >= least_s]
    return max(closest, key=lambda split: (split.training, able[split]))


@dataclass(slots=True)
class Counts:
    """Totals; take a copy. late: steps over their target. unit_s: units times seconds that training had, while serving
    computed and while it was idle. paused_s: no split was quick enough; starved_s: training had no work."""

    steps_alone: int = 0
    steps_beside: int = 0
    late_alone: int = 0
    late_beside: int = 0
    unit_s: float = 0.0
    idle_unit_s: float = 0.0
    paused_s: float = 0.0
    starved_s: float = 0.0
    changes: int = 0
    backoffs: int = 0


class _Step(NamedTuple):
    batch: int
    tokens: int
    prefill_tokens: int
    target_s: float
    split: Split
    #: Units of training still run that no longer should.
    settling: bool


class Harvest:
    """See the module. splits: those that the device can have, all measured; None: the fit's. idle_all: training gets
    every unit of an idle device. Calls come in order of `now`. Raises ValueError for splits without a fit."""

    def __init__(self, predictor: Predictor, splits: Sequence[Split] | None = None, idle_all: bool = False) -> None:
        self.predictor = predictor
        self.shares = predictor.fit.shares
        if splits is None:
            splits = [Split(pair.infer, pair.training) for pair in predictor.fit.pairs]
        self.splits = tuple(splits)
        for split in self.splits:
            predictor.latency_s(*split, 1, 0)
        self.whole = Split(self.shares, 0)
        self._idle = Split(0, self.shares) if idle_all else Split(1, self.shares - 1)
        #: Units as they are now.
        self.split = self.whole
        self.counts = Counts()
        #: Part of the device that training could have had lately, 0 to 1, whether it had work or not.
        self.spare = 0.0
        #: The last split with training, and since when.
        self._beside: Split | None = None
        self._beside_s = -math.inf
        self._why_starved: str | None = None
        self._step: _Step | None = None
        #: When the last step was planned or ended; the last event.
        self._served_s = -math.inf
        self._now: float | None = None
        self._paused = self._resting = False
        #: Units that training could have now, whether it has work or not.
        self._could = 0
        #: Units that training may have beside steps; when that changed; time until it grows again.
        self.limit = self.shares
        self._limited_s, self._retry_s = -math.inf, RETRY_S
        #: Whether the last steps were late although predicted in time: beside training, alone.
        self._late_beside, self._late_alone = _Lately(), _Lately()

    # ---- events ------------------------------------------------------------------------------------------------
    def plan(self, now: float, batch: int, tokens: int, prefill_tokens: int, target_s: float) -> Split:
        """Units for the step that begins now. batch: sequences that get a token, tokens: their context in all.
        target_s: time of an output token; 0: none, training then gets what it can have."""
        self._pass(now)
        target_s = target_s if target_s > 0 else math.inf
        self._raise_limit(now)
        chosen = self._choose(now, batch, tokens, prefill_tokens, target_s)
        self._resting, self._paused = False, chosen is None and self._why_starved is None
        if chosen is not None and chosen != self._beside:
            self._beside, self._beside_s = chosen, now
            self.counts.changes += 1
        new = chosen if chosen is not None and self._why_starved is None else self.whole
        self._step = _Step(batch, tokens, prefill_tokens, target_s, new, new.training < self.split.training)
        self._could = chosen.training if chosen is not None else 0
        self.split, self._served_s = new, now
        return new

    def stepped(self, now: float, seconds: float) -> None:
        """The planned step took so long. No effect without one."""
        self._pass(now)
        step, self._step, self._served_s = self._step, None, now
        if step is None:
            return
        in_time = self.predictor.latency_s(*step.split, step.batch, step.tokens, step.prefill_tokens) <= step.target_s
        if not step.settling:
            self.predictor.stepped(*step.split, step.batch, step.tokens, step.prefill_tokens, seconds)
        late, beside = bool(step.batch) and seconds > step.target_s, step.split.training > 0
        if beside:
            self.counts.steps_beside += 1
            self.counts.late_beside += late
        else:
            self.counts.steps_alone += 1
            self.counts.late_alone += late
        if step.batch and (in_time or beside):
            (self._late_beside if beside else self._late_alone).add(late)
            if beside and self._late_beside.share > LATE + self._late_alone.share:
                self._back_off(now)

    def rest(self, now: float) -> Split:
        """No step is due: units until the next one. Ask again after `IDLE_S`."""
        self._pass(now)
        if self._step is None and now - self._served_s >= IDLE_S:
            self._resting, self._paused = True, False
            self._could = self._idle.training
            self.split = self._idle if self._why_starved is None else self.whole
        return self.split

    def starved(self, now: float, starved: bool, why: str = "it has no work") -> None:
        """Training has no work (no job, no memory, it copies weights), or has some again. From the next step on, or
        the next `rest`."""
        self._pass(now)
        self._why_starved = why if starved else None
        if starved:
            self._paused = False

    # ---- what it decides ---------------------------------------------------------------------------------------
    def _choose(self, now: float, batch: int, tokens: int, prefill_tokens: int, target_s: float) -> Split | None:
        held = self._beside
        if held is not None and held.training <= self.limit and now - self._beside_s < HOLD_S:
            latency_s = self.predictor.latency_s(*held, batch, tokens, prefill_tokens)
            if latency_s * (1 + self.predictor.margin) <= target_s:
                return held
        allowed = [split for split in self.splits if split.training <= self.limit]
        return choose(self.predictor, allowed, batch, tokens, prefill_tokens, target_s)

    def _back_off(self, now: float) -> None:
        """Steps beside training are late more often than they may: a unit less."""
        failed_again = now - self._limited_s < 2 * self._retry_s
        self._retry_s = min(2 * self._retry_s, _MOST_RETRY_S) if failed_again else RETRY_S
        had = self._beside.training if self._beside is not None else 0
        self.limit, self._limited_s = max(min(had, self.limit) - 1, 0), now
        self._late_beside = _Lately()
        self.counts.backoffs += 1

    def _raise_limit(self, now: float) -> None:
        if self.limit < self.shares and now - self._limited_s >= self._retry_s:
            self.limit, self._limited_s = self.limit + 1, now

    # ---- what it says ------------------------------------------------------------------------------------------
    @property
    def waits(self) -> str:
        """Why training has no units just now; empty: it has some."""
        if self._why_starved is not None:
            return self._why_starved
        if self.split.training:
            return ""
        if self.limit == 0 and not self._resting:
            return "tokens were late beside it; it is tried again after a while"
        return "tokens would be late beside it" if self._paused else "the device has no units for it"

    def _pass(self, now: float) -> None:
        """Count the time since the last event."""
        before, self._now = self._now, now
        if before is None:
            return
        took_s, counts = max(now - before, 0.0), self.counts
        self.spare += (self._could / self.shares - self.spare) * (1 - math.exp(-took_s / _SPARE_S))
        had = took_s * self.split.training
        if self._why_starved is not None:
            counts.starved_s += took_s
        elif self._paused:
            counts.paused_s += took_s
        if self._resting:
            counts.idle_unit_s += had
        else:
            counts.unit_s += had

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        assert self.split in {*self.splits, self.whole, self._idle}, "a split that the device cannot have"
        assert self.split.infer + self.split.training <= self.shares
        assert 0 <= self.limit <= self.shares
        assert 0 <= self.spare <= 1
        assert not (self._paused and self.split.training), "paused, and yet it has units"
        for lately in (self._late_beside, self._late_alone):
            assert lately.late == sum(lately.seen)
        self.predictor.validate()


class _Lately:
    """Of the last steps, how many were late."""

    def __init__(self) -> None:
        self.seen: deque[bool] = deque(maxlen=_WINDOW)
        self.late = 0

    def add(self, late: bool) -> None:
        if len(self.seen) == _WINDOW:
            self.late -= self.seen[0]
        self.seen.append(late)
        self.late += late

    @property
    def share(self) -> float:
        """Of the late ones; a single late step among few is not many."""
        return self.late / max(len(self.seen), _LEAST_STEPS)
