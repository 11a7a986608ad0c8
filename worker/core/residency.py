"""Which models have their weights on the device (Prism, sections 5.3 and 6.1): activation at need, eviction, and turns
when all are busy.

A model is COLD, LOADING, ACTIVE or DRAINING. A request for a cold model waits for its activation. A hint activates it
in time for its request, unless others wait for memory or requests go elsewhere. Memory for the weights comes from
unused memory, then from caches, then from the weights of idle models, longest idle first. A request takes those of any
idle model; a hint, or another model's KV, only those of models that are idle for `IDLE_S` or not used here, and a hint
none of models that a hint wakes too. If all are busy, one gives way when `worker.core.turns` says so: its sequences are
preempted, their KV is saved, and it waits for its next turn.

A registered model keeps its engine and its address space; only memory comes and goes. Its cached KV stays on the
device, as long as nobody needs the memory.

Invariants (`validate`): a share's weights are counted exactly when the model is not cold, without layers that it
lends (`worker.core.remap`); only active and loading
models compute or admit; where `turns.one_at_a_time`, at most one model is not cold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from contracts.models import ModelState
from contracts.residency import WeightsMove, Why
from storelink.core.load_plan import may_start
from worker.core.balloon import Balloon, Share
from worker.core.remap import Circulate, Remap
from worker.core.resident import Expected, Resident
from worker.core.turns import Slices

#: A model idle for this long is evicted when other models need memory, in seconds (Prism, figure 15a).
IDLE_S = 45.0
#: Time for preempted sequences to be saved before a model is evicted anyway, in seconds.
DRAIN_S = 5.0
#: Requests wait so long for running ones to end, for the weights of a model that moves here, in seconds.
HOLD_S = 10.0
#: Part of a device that must remain for KV beside them.
KV_SHARE = 1 / 16
#: A model that moves here comes before requests of priority 0.
_MOVES = (0.0, -math.inf)
#: Bytes per second of copies of weights, until measured.
_COPY_BYTES_S = 2e9
#: Hinted requests that a model remembers: only the soonest matters.
_MOST_EXPECTED = 16
#: An activation for a hint begins this much before it must, in seconds.
_EARLY_S = 0.25
#: Wait before a failed activation is tried again, in seconds: the first, and the longest.
_RETRY_S, _LONGEST_RETRY_S = 0.5, 60.0
#: Time between two looks for who could come without another giving way, in seconds.
_LOOK_S = 0.1
#: Time between two looks for memory, in seconds.
_POLL_S = 0.05
#: Time that a step may wait for layers, in seconds: other models' steps wait as well.
_LATE_S = 0.01


@dataclass(frozen=True, slots=True)
class Load:
    """Map the model's weights and begin to copy them."""

    name: str


@dataclass(frozen=True, slots=True)
class Unload:
    """Unmap the model's weights, at once; no step uses them."""

    name: str


Instruction = Load | Unload | Circulate


@dataclass(slots=True)
class Residency:
    """See the module. turns: whose turn it is."""

    balloon: Balloon
    turns: Slices = field(default_factory=Slices)
    models: dict[str, Resident] = field(default_factory=dict)
    out: list[Instruction] = field(default_factory=list)
    #: Measured speed of copies of weights from images, of one model at a time.
    copy_bytes_s: float = _COPY_BYTES_S
    _now: float = 0.0
    _looked_s: float = -math.inf
    #: Layers whose memory is lent to KV.
    remap: Remap = field(init=False)

    def __post_init__(self) -> None:
        self.remap = Remap(self.balloon, lambda: self.models.values(), self.out.append)
        self.turns.load_s = self.load_s

    def join(self, resident: Resident, state: ModelState, now: float = 0.0) -> None:
        """Add a model, COLD or ACTIVE."""
        self.models[resident.name], self._now = resident, now
        resident.share.weights = 0
        self._enter(resident, state, Why.START, since_s=0.0)
        self.balloon.unload_idle = self._unload_idle
        self.balloon.idle_weights = self._idle_weights
        self.balloon.lend = self.remap.lend
        resident.core.lending = resident.lending
        pinned = sum(each.granules for each in self.models.values() if each.pinned)
        for each in self.models.values():
            own = each.granules + pinned - (each.granules if each.pinned else 0)
            rest = max(self.balloon.granules - own, 0)
            each.share.pool.reach = min(rest // each.share.slab_granules, each.share.pool.slab_count)

    def take(self) -> list[Instruction]:
        """Instructions to execute now, in this order; clears them."""
        taken = self.out[:]
        self.out.clear()
        return taken

    def activation_s(self, name: str) -> float:
        """Expected time until the model can compute all of a step, with the wait for its turn: 0 when it is active. Any
        thread."""
        resident = self.models[name]
        if resident.state is ModelState.ACTIVE:
            return 0.0
        here = resident.ready / resident.share.pool.layers if resident.state is ModelState.LOADING else 0.0
        turn_s = self.turns.wait_s(resident) if resident.state is ModelState.COLD else 0.0
        return turn_s + (1.0 - here) * self.load_s(resident)

    def load_s(self, resident: Resident) -> float:
        """Expected time in which the model's weights come."""
        return resident.bytes_ / (resident.copy_bytes_s or self.copy_bytes_s)

    # ---- what the scheduler says -------------------------------------------------------------------------------
    def expect(self, name: str, expected: Expected) -> None:
        """A request for the model is expected here, whatever `spare` said before."""
        resident = self.models[name]
        resident.spare_until_s = -math.inf
        resident.expected = sorted([*resident.expected, expected])[:_MOST_EXPECTED]

    def spare(self, name: str, until_s: float) -> None:
        """Until then, requests for the model go elsewhere: idle, its weights go first, at any need."""
        self.models[name].spare_until_s = until_s

    # ---- time --------------------------------------------------------------------------------------------------
    def tick(self, now: float) -> None:
        """Decide what is due. Call before each round of turns."""
        self._now = now
        self.remap.round(now)
        for resident in self.models.values():
            if resident.core.live:
                resident.used_s = now
            resident.core.scheduling.takes = True
            if resident.state is ModelState.DRAINING and (
                not resident.core.saving.busy or now - resident.since_s >= DRAIN_S
            ):
                self._unload(resident, Why.DRAINED)
            elif self.turns.leaves_s(resident) <= now and resident in self._idle(0.0):
                self._unload(resident, Why.UNUSED)
        if now - self._looked_s >= _LOOK_S:
            self._looked_s = now
            found = self.balloon.obtainable + sum(each.weights for each in self._idle(0.0))
            for resident in self.models.values():
                resident.crowded_out = found < resident.granules + resident.least
        owed, waiting, unserved = 0, self._waiting(), False
        self.balloon.held = None
        for resident in sorted(waiting, key=self.turns.urgency):
            if resident.state is ModelState.COLD:
                idle = self._idle(0.0)
                until_s = resident.waits_s + self.turns.slice_s(resident)
                if not self._activate(resident, idle, Why.REQUEST, owed) and self._may_hold(resident, until_s, idle):
                    self.balloon.held = resident.core.scheduling.first_rank(resident.core.live.values())
            if resident.state is not ModelState.LOADING:  # until it computes, later ones take no memory
                if unserved := resident.starved or resident.state is ModelState.COLD:
                    self._make_turn(resident)
                break
            owed += resident.least
        for resident in self.models.values() if self.turns.heeds_hints else ():
            if resident.state is ModelState.COLD and max(self._hint_due_s(resident), resident.retry_s) <= now:
                until_s = min((each.arrival_s + HOLD_S for each in resident.expected if each.moves), default=0.0)
                # It would take what others wait for, or goes at any need: its weights would soon leave again.
                if until_s <= now and (unserved or self._is_spare(resident)):
                    continue
                idle = [each for each in self._idle(IDLE_S) if self._hint_due_s(each) > now]
                if not self._activate(resident, idle, Why.HINT) and self._may_hold(resident, until_s, idle):
                    self.balloon.held = _MOVES

    def _waiting(self) -> list[Resident]:
        """Models whose requests wait for weights, or for any memory, and have not computed since."""
        for resident in self.models.values():
            resident.note_wait(self._now, self.balloon.held is not None)
        return [
            each
            for each in self.models.values()
            if math.isfinite(each.waits_s) and each.state is not ModelState.DRAINING and self._now >= each.retry_s
        ]

    def due_in_s(self, now: float) -> float:
        """Seconds until `tick` may have something to do without an event; infinite if never."""
        due_s = [now + self.remap.due_in_s(now)]
        for resident in self.models.values():
            if resident.state is ModelState.DRAINING:
                due_s.append(resident.since_s + DRAIN_S)
            elif resident.starved or (resident.state is ModelState.COLD and resident.core.live):
                due_s.append(max(resident.retry_s, now + _POLL_S))
            elif resident.state is ModelState.ACTIVE and not resident.core.live:
                leaves_s = self.turns.leaves_s(resident)
                due_s.append(leaves_s if leaves_s > now else now + _POLL_S)
            elif resident.state is ModelState.COLD and self.turns.heeds_hints:
                due_s.append(max(self._hint_due_s(resident), resident.retry_s, now + _POLL_S))
        return max(min(due_s) - now, 0.0)

    # ---- what the shell says -----------------------------------------------------------------------------------
    def landed(self, name: str, ready: int, layer_s: float, now: float) -> None:
        """Weights of the first `ready` layers are here; layer_s: mean time of a layer so far."""
        resident, self._now = self.models[name], now
        if resident.state is not ModelState.LOADING:
            return
        resident.ready = ready
        layers = resident.share.pool.layers
        if ready == layers:
            resident.failures = 0
            resident.activations += 1
            resident.expected = [each._replace(moves=False) for each in resident.expected]  # it has moved
            if (seconds := self._now - resident.since_s) > 0:
                resident.loading_s += seconds
                if not resident.crowded and resident.copy_bytes_s is None:
                    self.copy_bytes_s = resident.bytes_ / seconds
                elif not resident.crowded:
                    resident.copy_bytes_s = resident.bytes_ / seconds
            self._enter(resident, ModelState.ACTIVE, Why.LOADED, seconds=seconds, since_s=resident.since_s)
            return
        core = resident.core
        tokens = min(sum(s.pending for s in core.live.values()), core.state.policy.step_tokens)
        compute_s = core.pace.prefill_token_s * max(tokens, 1) / layers
        core.computes = may_start(ready, layers, layer_s, compute_s, _LATE_S)

    def failed(self, name: str, now: float) -> None:
        """The model's weights could not be loaded. Its requests wait for another try."""
        resident, self._now = self.models[name], now
        if resident.state is ModelState.LOADING:
            resident.failures += 1
            resident.retry_s = self._now + min(_RETRY_S * 2.0 ** (resident.failures - 1), _LONGEST_RETRY_S)
            resident.yielding.halt(self._now)
            self._unload(resident, Why.FAILED)

    # ---- decisions ---------------------------------------------------------------------------------------------
    def _activate(self, resident: Resident, victims: Sequence[Resident], why: Why, owed: int = 0) -> bool:
        """Find memory for the model's weights and load them. False if there is not enough. owed: granules that must
        remain for others."""
        if self.turns.one_at_a_time:
            others = [each for each in self.models.values() if each.state is not ModelState.COLD]
            if any(each not in victims for each in others):
                return False
            for victim in others:
                self._unload(victim, Why.FOR_WEIGHTS, resident)
        need = resident.granules + resident.least + owed
        short = need - self.balloon.obtainable
        leaving: list[Resident] = []
        for victim in victims:
            if short <= 0:
                break
            leaving.append(victim)
            short -= victim.weights
        if short > 0:
            return False
        for victim in leaving:
            self._unload(victim, Why.FOR_WEIGHTS, resident)
        while not self.balloon.collect(need, self._now):
            rest = [each for each in victims if each.state is ModelState.ACTIVE]
            if not rest:
                return False
            self._unload(rest[0], Why.FOR_WEIGHTS, resident)
        self._enter(resident, ModelState.LOADING, why)
        self.out.append(Load(resident.name))
        return True

    def _make_turn(self, resident: Resident) -> None:
        """All others are busy: let one of them give way, whose weights suffice and that has the fewest requests. One
        that finds no memory does at once, others by `turns`."""
        if self.balloon.held is not None or any(each.state is ModelState.DRAINING for each in self.models.values()):
            return
        busy = [each for each in self.models.values() if each.state is ModelState.ACTIVE and not each.pinned]
        able = [
            each
            for each in busy
            if each is not resident and (each.starved or self.turns.gives_way(each, resident, self._now))
        ]
        if able:
            need = resident.granules + resident.least - self.balloon.obtainable

            def rank(each: Resident) -> tuple[float, ...]:
                fewest = each.weights >= need, -len(each.core.live)
                return each.starved, each.share.priority, *fewest, -each.since_s

            giving = max(able, key=rank)
            giving.yielding.halt(self._now)
            self._enter(giving, ModelState.DRAINING, Why.STARVED if giving.starved else self.turns.why, resident)

    def _idle(self, least_s: float) -> list[Resident]:
        """Active models that no request uses: those that are spare, and those idle for at least so long, longest
        first."""
        found = [
            each
            for each in self.models.values()
            if each.state is ModelState.ACTIVE
            and not each.pinned
            and each.core.quiet
            and (self._is_spare(each) or self._now - each.idle_since_s >= least_s)
        ]
        return sorted(found, key=lambda each: (not self._is_spare(each), -each.share.priority, each.idle_since_s))

    def _is_spare(self, resident: Resident) -> bool:
        return self._now < resident.spare_until_s

    def _hint_due_s(self, resident: Resident) -> float:
        """When an activation must begin so that the next hinted request finds the model active."""
        resident.expected = [each for each in resident.expected if each.until_s > self._now]
        soonest_s = resident.expected[0].arrival_s if resident.expected else math.inf
        arrival_s = min(resident.core.prefetching.next_arrival_s(self._now), soonest_s)
        return arrival_s - self.load_s(resident) - _EARLY_S

    def _may_hold(self, resident: Resident, until_s: float, idle: Sequence[Resident]) -> bool:
        """Whether, until then, later requests wait for memory until running ones leave enough for this model's weights:
        if there will be enough, beside KV."""
        weights = sum(each.share.weights for each in self.models.values()) - sum(each.weights for each in idle)
        left = self.balloon.granules - weights - resident.granules
        return (
            not self.turns.one_at_a_time
            and self._now < until_s
            and left >= max(resident.least, KV_SHARE * self.balloon.granules)
        )

    def _spares(self, asker: Share) -> list[Resident]:
        """Idle models whose weights may go for KV of this one: if it can do nothing else, of any idle model."""
        resident = self.models[asker.name]
        stuck = bool(resident.core.live) and not resident.yielding.on_device
        return [each for each in self._idle(0.0 if stuck else IDLE_S) if each.share is not asker]

    def _idle_weights(self, asker: Share) -> int:
        return sum(each.weights for each in self._spares(asker))

    def _unload_idle(self, asker: Share, granules: int) -> None:
        for resident in self._spares(asker):
            if self.balloon.spare >= granules:
                return
            self._unload(resident, Why.FOR_KV, self.models[asker.name])

    # ---- states ------------------------------------------------------------------------------------------------
    def _unload(self, resident: Resident, why: Why, asker: Resident | None = None) -> None:
        was_used = (asker is not None or why is Why.UNUSED) and math.isfinite(resident.used_s)
        idle_s = self._now - resident.used_s if was_used else 0.0
        self._enter(resident, ModelState.COLD, why, asker, idle_s)
        self.out.append(Unload(resident.name))
        resident.evictions += 1

    def _enter(
        self,
        resident: Resident,
        state: ModelState,
        why: Why,
        asker: Resident | None = None,
        seconds: float = 0.0,
        since_s: float | None = None,
    ) -> None:
        """asker: the model that wants the memory or the turn. since_s: when the state began; None: now."""
        if state is ModelState.COLD and resident.lending is not None and resident.lending.lent:
            resident.lending.change(0, 0, self._now)
        other = asker.name if asker is not None else ""
        resident.note(WeightsMove(self._now, state, why, other, seconds, resident.layers_lent))
        resident.state, resident.since_s = state, self._now if since_s is None else since_s
        resident.ready = 0
        if state is ModelState.ACTIVE:
            resident.begin_group()
        if state is ModelState.LOADING:
            coming = [each for each in self.models.values() if each.state is ModelState.LOADING]
            for each in coming:
                each.crowded = len(coming) > 1 or (each.crowded and each is not resident)
        resident.share.weights = resident.weights
        resident.core.admits = state in (ModelState.LOADING, ModelState.ACTIVE)
        resident.core.computes = state is ModelState.ACTIVE
        if not resident.core.admits:
            resident.core.starved = False
            resident.share.waits(None)

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        self.balloon.validate()
        for each in self.models.values():
            assert each.share.weights == each.weights, f"{each.name}: weights counted wrongly"
            if each.lending is not None:
                each.lending.validate()
                assert not each.lending.lent or each.state in (ModelState.ACTIVE, ModelState.DRAINING)
            assert each.core.admits == (each.state in (ModelState.LOADING, ModelState.ACTIVE))
            assert not each.core.computes or each.core.admits
        here = sum(each.state is not ModelState.COLD for each in self.models.values())
        assert not self.turns.one_at_a_time or here <= 1
