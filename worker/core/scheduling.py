"""Admission, preemption and batches over real pages: applies the decisions of `core.batching`, `core.fairness` and
`core.preemption`.

Invariants: at most `max_batch` sequences are RUNNING or LOADING. No sequence is admitted before a more urgent one that
waits, or that is on the device and lacks pages. Sequences on the device have a total order (`_rank`: priority, within
or beyond the tenant's share, arrival), and the first may take the pages of all others, so one always progresses.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

from contracts.request import GenerateRequest
from contracts.turn_times import Phase
from worker.core.admission import Admission
from worker.core.batching import Budget, choose, mixed_tokens
from worker.core.fairness import Company, Group, Service, Shares, group_of, in_turns
from worker.core.preemption import holding, spare_pages, together, victim
from worker.core.queue import Queue
from worker.core.saving import Saving
from worker.core.sequence import Event, Sequence, State
from worker.core.shared_prompt import awaits_prompt
from worker.core.shared_step import Room, room_of, share
from worker.core.supply import Lent
from worker.core.trials import Trials

#: Bound once: every turn asks for the states of all sequences.
_WAITING, _LOADING, _RUNNING = State.WAITING, State.LOADING, State.RUNNING
#: No order is known.
_NO_ORDER: tuple[list[Sequence], int, int, list[Sequence]] = ([], 0, 0, [])


class Scheduling:
    """Admits waiting sequences and composes batches; mutates sequences and the cache."""

    def __init__(self, admission: Admission, saving: Saving) -> None:
        self.admission, self.saving = admission, saving
        self.state = admission.state
        #: Number of preemptions, and of preempted tokens whose KV was neither saved nor being saved.
        self.preemptions = self.dropped_tokens = 0
        #: Recomputed tokens, by the event that took their sequence off the device.
        self.recomputed_tokens: Counter[Event] = Counter()
        self.trials = Trials()
        #: Whether waiting sequences are admitted. Off while the model ends what it has, for another one's turn.
        self.takes = True
        #: Whether a waiting sequence may preempt others. Off while nothing computes: they would only change places.
        self.preempts = True
        #: Service of each group; groups here lately; shares (None: out of date); weights by group.
        self.service, self.company = Service(), Company()
        self._shares: Shares | None = None
        self._groups: dict[Group, float] = {}
        #: Waiting requests; None: out of date.
        self._queue: Queue[Sequence] | None = None
        #: Cache of `_in_order`: waiting sequences, number on the device, and their order.
        self._ordered = _NO_ORDER
        #: No waiting sequence is admitted before more than this many pages are obtainable, or a sequence comes or goes;
        #: None: one may be admitted.
        self._closed_at: float | None = math.inf
        self._lacking: list[Sequence] = []
        self._choices = 0
        #: Whether the next step may hold prompts, or those of another model go first; whether the last step held some,
        #: and whether some had to wait.
        self.prefills, self.prefilled, self.denied = True, False, False
        #: Weights have lent memory in this turn.
        self._lent = False
        #: Service charged for one token in HBM during one step, in seconds of the device.
        self._hbm_token_s = 0.0

    # ---- admission ---------------------------------------------------------------------------------------------
    def make_way(
        self, count: int, sequences: Callable[[], Iterable[Sequence]], newcomer: GenerateRequest
    ) -> Sequence | bool:
        """Whether the newcomer may wait: True, False, or the sequence to refuse instead.

        At most `max_waiting` wait per priority, counting more urgent ones, and twice as many in all. count: number of
        `sequences`, which is called only when there are many.
        """
        if self._queue is None:
            if count < self.state.policy.max_waiting:
                return True
            waiting = (s for s in sequences() if s.state is State.WAITING)
            self._queue = Queue(waiting, _is_new, self.state.policy.max_waiting)
        return self._queue.way(newcomer)

    def joined(self, s: Sequence) -> None:
        """A request was added to the queue."""
        if self._queue is not None:
            self._queue.joined(s)

    def left(self, s: Sequence) -> None:
        """A request has ended."""
        if self._queue is not None:
            self._queue.left(s)

    def admit(self, sequences: Iterable[Sequence], enough: Callable[[], bool]) -> None:
        """Admit waiting sequences while there is room, and start those whose first layers are ready.

        In order of priority, tenant (`core.fairness`) and due time (`Pace.device_s`). No sequence passes one that does
        not fit, so a large one gets its pages. Preempts less urgent sequences, and those of a tenant beyond its share
        for a tenant that holds little.

        enough: see `EngineCore.turn`.
        """
        self._queue, self.prefilled, self.denied, self._lent = None, False, False, False
        self.state.order.look(self.state.now)
        live = list(sequences)
        here = self.admission.here = _on_device(live)
        self._update_groups(live, here)
        waiting = [s for s in live if s.state is _WAITING]
        running = any(s.state is _RUNNING for s in here)
        self._closed_at = None if self._contended else math.inf
        for s in self._in_order(waiting, len(here)) if self._may_admit(waiting, here) else ():
            if self.state.policy.cache and awaits_prompt(s, live, self.state.shape.chunk_tokens):
                continue
            first = self.state.cache.supply.comes_first(self._memory_rank(s))
            if first or self._must_wait_for_pages(s, here):
                s.times.enter(Phase.MEMORY, self.state.now)
                self._closed_at = None
                break
            if not self._admit(s, here) and (here or not self.state.cache.free_held() or not self._admit(s, here)):
                self._closed_at = None if self._closed_at is None else self._bound_when_refused(s, here)
                break
            here += [s] if s.state is State.LOADING else []
            self._shares, self._closed_at, self._ordered = None, None, _NO_ORDER
            if running and enough():
                break  # admit the others after a step
        for s in live:
            if s.state is _LOADING:
                self.admission.try_start(s, alone=not any(other.state is _RUNNING for other in live))

    @property
    def closed(self) -> bool:
        """Whether the next turn admits no sequence, if none comes or goes and all on the device keep decoding."""
        return self._closed_at is not None and self.state.cache.obtainable <= self._closed_at

    def hints_load(self) -> None:
        """A hint's load has begun, which a refused sequence that needs the same chunks may abort."""
        if self._closed_at != math.inf:
            self._closed_at = None

    def _bound_when_refused(self, s: Sequence, here: list[Sequence]) -> int | None:
        """The refused sequence is admitted only when more than this many pages are obtainable; None: no such bound."""
        if self._lent or any(other.request.priority > s.request.priority for other in here):
            return None  # layers are lent for it, or it may preempt one of these, whose pages change
        return self.admission.refused_at

    @property
    def _contended(self) -> bool:
        """Whether several tenants share a priority, so that service decides the order."""
        return len(self._groups) > len({priority for priority, _ in self._groups})

    def all_fit(self, decodes: int) -> bool:
        """Whether all of `decodes` fit into every next step; where tenants share steps, with room for twice as many."""
        if decodes > self.state.policy.step_tokens:
            return False
        if not any(self.company.has(group) for group in self._groups):
            return True
        room = self._room()
        return decodes <= room.tokens and 2 * decodes * room.decode_s <= room.seconds

    def _room(self) -> Room:
        pace, settings = self.admission.pace, self.state.policy
        return room_of(
            settings.step_tokens, settings.shared_step_s, pace.decode_s(1), pace.marginal_token_s, pace.prefill_token_s
        )

    def _may_admit(self, waiting: list[Sequence], here: list[Sequence]) -> bool:
        """Whether a waiting sequence could be admitted, as a place is free or preemptible. Avoids sorting the queue."""
        if not waiting or not self.takes:
            return False
        if len(here) < self.state.policy.max_batch:
            return True
        if min(s.request.priority for s in waiting) < max(s.request.priority for s in here):
            return True
        if len(self._groups) == 1 or not self._current_shares(here).beyond:
            return False
        return any(self._current_shares(here).may_claim(group) for group in {group_of(s) for s in waiting})

    def _in_order(self, waiting: list[Sequence], running: int) -> list[Sequence]:
        """By priority, tenant and due time. Recomputed when a sequence comes or goes, not when the pace changes."""
        version = self.state.order.version
        if self._contended or self._ordered[:3] != (waiting, running, version):
            self._ordered = (waiting, running, version, self._order(waiting, running))
        return self._ordered[3]

    def _order(self, waiting: list[Sequence], running: int) -> list[Sequence]:
        pace, pool, shape = self.admission.pace, self.state.cache.pool, self.state.shape
        hbm_tokens, step_s = pool.total * shape.chunk_tokens / shape.layers, pace.decode_s(max(running, 1))
        cost_s = {s.arrival: pace.device_s(s, s.uncached, hbm_tokens, step_s) for s in waiting}
        rank = self.state.order.rank
        due = sorted(waiting, key=lambda s: (s.request.priority, rank(s, cost_s[s.arrival]), s.arrival))
        return in_turns(due, self.service.of, lambda s: cost_s[s.arrival])

    def _update_groups(self, live: list[Sequence], here: list[Sequence]) -> None:
        """Update groups, service and company from the live sequences."""
        self._groups = {group_of(s): s.request.weight for s in live}
        self._shares = None
        pool, shape = self.state.cache.pool, self.state.shape
        self._hbm_token_s = (
            self.admission.pace.decode_s(max(len(here), 1)) * shape.layers / (pool.total * shape.chunk_tokens)
        )
        self.service.seen(self._groups, {group_of(s) for s in live if s.pending > 1 or s.state is not _RUNNING})
        self.company.seen(self._groups, self.state.now)

    def _current_shares(self, here: list[Sequence]) -> Shares:
        if self._shares is None:
            pages, layers = self.state.cache.pool.total, self.state.shape.layers
            self._shares = Shares(
                here, self._groups, self.state.policy.max_batch, pages, lambda s: len(s.blocks) * layers
            )
        return self._shares

    def _rank(self, s: Sequence, here: list[Sequence]) -> tuple[int, bool, int]:
        """A smaller rank may take pages of a larger one."""
        return (s.request.priority, len(self._groups) > 1 and s in self._current_shares(here).beyond, s.arrival)

    def _must_wait_for_pages(self, s: Sequence, here: list[Sequence]) -> bool:
        """Whether a sequence on the device that lacks pages precedes this waiting one."""
        for other in self._lacking:
            same = other.request.tenant == s.request.tenant
            before = other.state is State.RUNNING and other.priority < s.priority
            if before and (same or self._rank(other, here) < (s.request.priority, False, s.arrival)):
                return True
        return False

    def _admit(self, s: Sequence, here: list[Sequence]) -> bool:
        d, priority = self.state, s.request.priority
        spare = spare_pages(
            sum(other.request.priority <= priority for other in here), d.shape.layers, d.cache.pool.total
        )
        lends = True
        while True:
            lacking = 0
            if len(here) < self.state.policy.max_batch and not (lacking := self.admission.admit(s, spare)):
                d.token_rate.add(0 if s.reached else len(s.tokens), d.now)
                return True
            lent = d.cache.supply.lend(lacking, d.now) if lends and lacking else Lent.NEVER
            self._lent |= lent is not Lent.NEVER
            if lends := lent is Lent.NOW:  # not after a preemption: the other would take his place back
                continue
            giving = [other for other in here if other.request.priority > priority]
            if len(self._groups) > 1:
                share, pages = self._current_shares(here), (len(s.tokens) // d.shape.chunk_tokens + 1) * d.shape.layers
                if share.claims(s, pages):
                    served = self.service.of(group_of(s))
                    giving += [
                        other
                        for other in here
                        if other.request.priority == priority
                        and other in share.beyond
                        and self.service.of(group_of(other)) > served
                    ]
            if (
                lent is Lent.NEXT
                or not self.preempts
                or not (self._preempt(giving, here, lacking) or self._displace(s, math.inf, lacking, giving))
            ):
                s.times.enter(Phase.MEMORY if lacking else Phase.QUEUE, d.now)
                if lacking:
                    d.cache.supply.waits(self._memory_rank(s))
                return False

    def first_rank(self, live: Iterable[Sequence]) -> tuple[float, ...]:
        """The least rank, among all of the device, of those that do not decode; infinite: there is none."""
        return min(
            (self._memory_rank(s) for s in live if s.pending > 1 or s.state is not _RUNNING), default=(math.inf,)
        )

    def first_deadline(self, live: Iterable[Sequence]) -> tuple[float, ...]:
        """The least priority, and its earliest deadline (`arbitration.Order.deadline`); infinite: there is none."""
        token_s = self.admission.pace.prefill_token_s
        return min((self.state.order.deadline(s, s.to_compute * token_s) for s in live), default=(math.inf,))

    def _memory_rank(self, s: Sequence) -> tuple[float, ...]:
        return self.state.order.memory_rank(s, s.to_compute * self.admission.pace.prefill_token_s)

    # ---- batches -----------------------------------------------------------------------------------------------
    def batch(self, sequences: Iterable[Sequence]) -> list[tuple[Sequence, int]]:
        """(sequence, tokens) of the next step, with their blocks allocated.

        The most urgent take pages first. A sequence that lacks pages preempts a lower-ranked one or skips this step.
        """
        here = _on_device(sequences)
        running = [s for s in here if s.state is _RUNNING]
        able, lacking = self.trials.turn(running, self.state.now), []
        prompts = [] if self.prefills else [s for s in able if s.pending > 1]
        self.denied = bool(prompts)
        able = [s for s in able if s not in prompts] if prompts else able
        while True:
            chosen = self._choose(able)
            ranked = sorted(chosen, key=lambda c: self._rank(c[0], here))
            found_none = [s for s, count in ranked if not self._extend(s, s.computed + count, here)]
            if not found_none:
                break
            if len(found_none) == len(here) and self.state.cache.free_held():
                continue  # no sequence can progress, and none would free pages by ending
            lacking += found_none
            able = [s for s in able if s.state is State.RUNNING and s not in found_none]
        self._lacking = lacking
        chosen = [(s, count) for s, count in chosen if s.state is _RUNNING]
        self.prefilled = any(s.pending > 1 for s, _ in chosen)
        for s, _ in chosen:
            self._choices += 1
            s.last_chosen = self._choices
        return chosen

    def _choose(self, running: list[Sequence]) -> list[tuple[Sequence, int]]:
        if any(self.company.has(group) for group in {group_of(s) for s in running}):
            return share(running, self._room(), self.service.of, self.state.order.rank)
        return choose(running, self._budget(running), self.state.order.rank)

    def _budget(self, running: list[Sequence]) -> Budget:
        pace, settings = self.admission.pace, self.state.policy
        decodes = sum(s.pending == 1 for s in running)
        decode_s = pace.decode_s(decodes)
        mixed = mixed_tokens(settings.mixed_step_s, decode_s, pace.prefill_token_s)
        return Budget(settings.step_tokens, settings.step_tokens if mixed is None else mixed, pace.prefill_token_s)

    def _extend(self, s: Sequence, upto_tokens: int, here: list[Sequence]) -> bool:
        """False if there is no room now. Sequences preempted meanwhile need no pages."""
        lends = True
        while s.state is _RUNNING and (lacking := self.admission.extend(s, upto_tokens)):
            lent = self.state.cache.supply.lend(lacking, self.state.now) if lends else Lent.NEVER
            if lent is Lent.NEXT:
                return False
            if lends := lent is Lent.NOW:
                continue
            rank = self._rank(s, here)
            giving = [other for other in here if self._rank(other, here) > rank]
            if not self._preempt(giving, here, lacking) and not self._displace(s, s.arrival_s, lacking, giving):
                return False
        return True

    def computed(self, s: Sequence, count: int, steps: int = 1) -> None:
        """A step computed the next `count` tokens of the sequence (or `steps` steps did, one token each, already in
        `tokens`)."""
        if s.restarted is not None and s.computed < s.reached:
            self.recomputed_tokens[s.restarted] += min(s.computed + count * steps, s.reached) - s.computed
        self._charge(s, s.computed + count * steps - max(s.computed, s.reached), steps, decodes=s.pending == steps)
        if s.spoken:
            self.state.token_rate.add(steps, self.state.now)
        s.computed += count * steps
        self.saving.keep_full_chunks(s, s.computed - count * steps)
        self.admission.pass_(s)

    def went_on(self, step_s: float) -> None:
        """Several steps ran in one turn: groups were here until the last one, of `step_s`, began."""
        self.company.seen(self._groups, self.state.now - step_s)

    def _charge(self, s: Sequence, tokens: int, steps: int, decodes: bool) -> None:
        """Charge the tenant for newly computed tokens, and for HBM during these steps."""
        pace = self.admission.pace
        computing_s = max(tokens, 0) * (pace.marginal_token_s if decodes else pace.prefill_token_s)
        held = steps * len(s.tokens) - steps * (steps - 1) / 2
        self.service.charge(group_of(s), computing_s + held * self._hbm_token_s, s.request.weight)

    # ---- preemption --------------------------------------------------------------------------------------------
    def _preempt(self, candidates: list[Sequence], here: list[Sequence], lacking: int) -> bool:
        """Preempt one of the candidates. False if it is better to wait."""
        holdings = [holding(s) for s in candidates]
        beyond = self._current_shares(here).beyond if len(self._groups) > 1 else frozenset()
        s = victim(holdings, lacking, self.state.cache.coming() if lacking else 0, beyond)
        if s is None:
            return False
        self._take_off(s)
        here.remove(s)
        return True

    def _take_off(self, s: Sequence) -> None:
        self.preemptions += 1
        self.dropped_tokens += max(s.computed - self.saving.keep(s), 0)
        self.admission.restart(s, Event.PREEMPTED)
        self._shares = None

    def _displace(self, s: Sequence, arrival_s: float, lacking: int, giving: list[Sequence]) -> bool:
        """Preempt a sequence of another model for one of this one, whose candidates `giving` hold too few pages."""
        pages = lacking - together(giving) - self.state.cache.coming() if lacking else 0
        return pages > 0 and self.state.cache.supply.displace(self.state.now, s.request.priority, arrival_s, pages)

    def give_way(self, candidates: list[Sequence], sequences: Iterable[Sequence], pages: int) -> bool:
        """Preempt one of the candidates for another model that lacks `pages` pages, or what they hold if it is less.
        False if it is better to wait."""
        coming = self.state.cache.coming()
        return self._preempt(candidates, _on_device(sequences), min(pages, together(candidates) + coming))

    def halt(self, here: Iterable[Sequence]) -> None:
        """Preempt all of these."""
        for s in here:
            self._take_off(s)


def _is_new(s: Sequence) -> bool:
    """Whether it has no output and has never run on a device, so that it can be refused."""
    return not s.reached and s.generated == len(s.request.resume_tokens)


def _on_device(sequences: Iterable[Sequence]) -> list[Sequence]:
    return [s for s in sequences if s.state is _RUNNING or s.state is _LOADING]
