"""From WAITING to RUNNING: match chunks in HBM, make room, load the rest, start when the first layers are there."""

from __future__ import annotations

import numpy as np

from contracts.kv import leading
from contracts.turn_times import Phase
from storelink.core.load_plan import Missing, Plan, Prefill, Source, layer_load_s, may_start, plan
from worker.core import instructions as do
from worker.core.batching import mixed_tokens
from worker.core.block import Block, SaveState
from worker.core.lacking import lacking
from worker.core.load import Load
from worker.core.pace import Pace
from worker.core.prefetching import Prefetching
from worker.core.sequence import Event, Sequence, State
from worker.core.state import CoreState

#: After this many restarts for lost pieces a sequence recomputes everything.
MAX_LOSSES = 4
#: How long a sequence that runs alone may wait for layers inside its steps, in seconds. Admission of others waits too.
ALONE_S = 0.1
#: A load with no news for this long is given up, in seconds.
SILENCE_S = 10.0


class Admission:
    """Admits sequences; mutates them and the cache."""

    def __init__(self, state: CoreState, prefetching: Prefetching) -> None:
        self.state, self.prefetching = state, prefetching
        self.pace = Pace()
        #: Sequences on the device, as of this turn.
        self.here: list[Sequence] = []
        #: A sequence has returned to WAITING since the last turn began.
        self.restarted = False
        #: The sequence refused last stays out until more than this many pages are obtainable (`HbmCache.obtainable`);
        #: None: no such bound is known.
        self.refused_at: int | None = None
        #: Cached tokens that were loaded, and those that were recomputed because that was faster.
        self.loaded_tokens = self.recomputed_tokens = 0

    # ---- WAITING -> LOADING ------------------------------------------------------------------------------------
    def admit(self, sequence: Sequence, spare: int) -> int:
        """Give the sequence its blocks and open a load for missing pieces, if `spare` pages remain obtainable.

        Returns 0, or the number of missing pages; then nothing has changed except that loads of hints were aborted.
        """
        d, cache, windowed = self.state, self.state.cache, self.state.cache.windowed
        size = d.shape.chunk_tokens
        usable, self.refused_at = 0, None
        if d.policy.cache and sequence.losses < MAX_LOSSES:
            usable = (len(sequence.tokens) - 1) // size  # the last token is always computed: it yields the logits
            if len(sequence.keys) < usable:
                sequence.extend_keys(d.salt_of(sequence.request.tenant), d.shape, usable)
        chunks = len(sequence.tokens) // size + 1
        if spare and not windowed.tokens and (short := lacking(cache, sequence.keys[:usable], chunks) + spare) > 0:
            self.refused_at = cache.obtainable
            return short
        matched = cache.match(sequence.keys[:usable], sequence.request.session)
        usable = self._usable(sequence, matched, usable)
        passed = windowed.passed_after(usable)
        cache.pass_(matched[:passed])
        gaps = windowed.gaps(matched, passed)
        pages = sum(map(len, gaps)) + windowed.pages(len(matched), chunks, passed)
        if spare and (short := pages + spare - cache.obtainable) > 0:
            self._let_go(matched, passed)
            self.refused_at = cache.obtainable
            return short
        if overtaken := self.prefetching.give_way_to(matched):
            gaps = windowed.gaps(matched, passed)
        asked, chosen = usable, self._worth_loading(sequence, usable, gaps)
        if chosen is not None:
            usable = leading(not g for g in gaps) + chosen.chunks
            cache.pass_(matched[windowed.passed_after(usable) : passed], -1)
            passed = windowed.passed_after(usable)
            gaps = windowed.gaps(matched, passed)
        self._let_go(matched[usable:], 0)
        del matched[usable:], gaps[usable:]
        pages = sum(map(len, gaps)) + windowed.pages(len(matched), chunks, passed)
        if short := self._lacking(pages, spare):
            self._let_go(matched, passed)
            self.prefetching.stall(overtaken)
            return short
        cache.standings.weigh(sequence.request.tenant, sequence.request.weight)
        cache.claim(matched)
        for block, missing in zip(matched, gaps, strict=True):
            cache.want(block, sequence.request.session)
            cache.fill(block, missing)
        fresh = [
            cache.new_block(i, sequence.request.session, windowed.of_block(i < passed))
            for i in range(len(matched), chunks)
        ]
        for block in fresh:
            cache.use(block)
        d.back()
        sequence.blocks, sequence.passed = matched + fresh, passed
        cache.pass_(sequence.blocks[len(matched) : passed])
        if windowed.tokens:
            cache.standings.passes(sequence.request.session, passed)
        sequence.matched, sequence.found, sequence.load_id = len(matched), len(matched), 0
        sequence.computed = sequence.came = 0
        sequence.heard_s = d.now
        sequence.on(Event.ADMITTED)
        sequence.times.enter(Phase.OTHERS, d.now)
        if chosen is not None and sequence.worth is None:
            self._note_plan(sequence, chosen, (asked - usable) * size)
        first = leading(not g for g in gaps)
        if d.store_here and first < usable:
            self._open_load(sequence, first, usable, gaps)
        elif first < len(matched):
            # Missing pieces cannot be loaded: use complete leading chunks, recompute the rest.
            self._restart_without(sequence, first)
        return 0

    def _usable(self, sequence: Sequence, matched: list[Block], usable: int) -> int:
        """How many leading chunks may come from the cache, of `usable`. Where layers have windows, fewer chunks need
        other pages than more do: so no more than can be had, which was learned (`Sequence.worth`) or is seen. Releases
        the blocks of others."""
        windowed = self.state.cache.windowed
        if not windowed.tokens:
            return usable
        if sequence.worth is not None:
            usable = min(usable, sequence.worth)
        if not self.state.store_here:
            usable = windowed.most_usable(matched[:usable])
        self._let_go(matched[usable:], 0)
        del matched[usable:]
        return usable

    def _let_go(self, blocks: list[Block], passed: int) -> None:
        for n, block in enumerate(blocks):
            self.state.cache.release(block, n < passed)

    def _worth_loading(self, sequence: Sequence, usable: int, gaps: list[list[int]]) -> Plan | None:
        """Number of incomplete chunks to load, if recomputing the others is faster even than a load from DRAM.

        None: load all, or there is no store.
        """
        first, windowed = leading(not g for g in gaps), self.state.cache.windowed
        if not self.state.store_here or first >= usable or not self.state.policy.load_plan:
            return None
        passed = windowed.passed_after(usable)
        pieces = [len(gaps[i]) if i < len(gaps) else windowed.pages(i, i + 1, passed) for i in range(first, usable)]
        missing = [Missing(count, Source.DRAM) for count in pieces]
        if sequence.worth is not None:
            return Plan(min(max(sequence.worth - first, 0), len(missing)), 0.0, 0.0)
        chosen = self._plan(sequence, missing, usable)
        return chosen if chosen.chunks < len(missing) else None

    def _plan(self, sequence: Sequence, missing: list[Missing], upto: int) -> Plan:
        shape, tokens = self.state.shape, len(sequence.tokens) - upto * self.state.shape.chunk_tokens
        overlap = self.state.policy.layerwise and not any(s.state is State.RUNNING for s in self.here)
        ahead = (s for s in self.here if s is not sequence and s.request.priority <= sequence.request.priority)
        queued_s = sum(self.pace.prefill_s(s, shape.chunk_tokens) for s in ahead)
        layers = self.state.policy.plan_layers or shape.layers
        prefill = Prefill(
            tokens, self.pace.prefill_token_s, shape.chunk_tokens, layers, overlap, queued_s, self._step_tokens()
        )
        return plan(missing, self.state.rates.believed(self.state.now), prefill)

    def _step_tokens(self) -> int:
        """Prompt tokens that the next step can hold beside the current decodes."""
        policy, pace = self.state.policy, self.pace
        decodes = sum(s.state is State.RUNNING and s.pending == 1 for s in self.here)
        mixed = mixed_tokens(policy.mixed_step_s, pace.decode_s(decodes), pace.prefill_token_s)
        return policy.step_tokens if mixed is None else min(policy.step_tokens, mixed)

    def _note_plan(self, sequence: Sequence, chosen: Plan, tokens: int) -> None:
        self.recomputed_tokens += tokens
        fields = {
            "request": sequence.request.request_id,
            "recomputed_tokens": tokens,
            "loaded_chunks": chosen.chunks,
            "estimate_ms": round(chosen.seconds * 1e3, 2),
            "loading_all_ms": round(chosen.all_seconds * 1e3, 2),
        }
        self.state.out.append(do.Note("computing is sooner than loading", fields))

    def _lacking(self, pages: int, spare: int = 0) -> int:
        """Make room for a request. Returns 0, or the number of missing pages.

        Aborts loads of hints one by one before the request waits or another is preempted.
        """
        cache, now = self.state.cache, self.state.now
        if spare and (lacking := pages + spare - cache.obtainable) > 0:
            return lacking
        while not cache.make_room(pages, now):
            if not self.prefetching.give_up_one():
                return max(pages - cache.available(), 1)  # `available` is an estimate
        return 0

    def _open_load(self, sequence: Sequence, first: int, usable: int, gaps: list[list[int]]) -> None:
        windowed = self.state.cache.windowed
        wanted = [
            (i, gaps[i] if i < sequence.matched else windowed.of_block(i < sequence.passed))
            for i in range(first, usable)
        ]
        wanted = [(i, layers) for i, layers in wanted if layers]
        load = self.state.open_load(
            sequence.request.session,
            [sequence.keys[i] for i, _ in wanted],
            [sequence.blocks[i] for i, _ in wanted],
            [layers for _, layers in wanted],
            hint=False,
            priority=sequence.request.priority,
            source_nodes=sequence.request.source_nodes,
            request_id=sequence.request.request_id,
        )
        load.sequence, load.upto = sequence, usable
        sequence.load_id, sequence.found = load.load_id, None
        sequence.times.enter(Phase.LOCATE, self.state.now)

    def _restart_without(self, sequence: Sequence, first: int) -> None:
        self._lose(sequence, first)
        self.restart(sequence, Event.LOST)

    def _lose(self, sequence: Sequence, first: int) -> None:
        """Remove matched blocks from the index that lack pieces which cannot be loaded."""
        for n, block in enumerate(sequence.blocks[first : sequence.matched], first):
            if not self.state.cache.windowed.whole(block, n < sequence.passed):
                self.state.cache.lose(block)

    def _reads_more(self, sequence: Sequence, load: Load, found: int) -> bool:
        """Fewer chunks were found than hoped, so that layers with a window read earlier pages as well: restart with
        those chunks; after a second time, with what HBM has by itself. True if the sequence restarted."""
        windowed = self.state.cache.windowed
        if found >= load.upto or windowed.passed_after(found) == sequence.passed:
            return False
        self._lose(sequence, found)
        here = windowed.most_usable(sequence.blocks[: min(found, sequence.matched)])
        sequence.worth = found if sequence.worth is None else here
        self.restart(sequence, Event.REPLANNED)
        return True

    # ---- what the store said -----------------------------------------------------------------------------------
    def found(
        self, sequence: Sequence, load: Load, chunks: int, sources: list[Source], due_s: tuple[float, ...] = ()
    ) -> None:
        """The store can bring the first `chunks` of the load, from these sources; due_s: see `events.Found`."""
        if (
            sequence.load_id != load.load_id
            or sequence.state is not State.LOADING
            or load.load_id not in self.state.loads
        ):
            return
        sequence.found_s = sequence.heard_s = self.state.now
        load.sources, load.due_s = sources[:chunks], due_s[:chunks]
        found = load.blocks[chunks].index if chunks < len(load.blocks) else load.upto
        if self._replan(sequence, load, found) or self._reads_more(sequence, load, found):
            return
        sequence.found = found
        if load.sources:
            sequence.times.load(max(load.sources), self.state.now)
        else:
            sequence.times.enter(Phase.OTHERS, self.state.now)
        self.loaded_tokens += chunks * self.state.shape.chunk_tokens
        for i in range(sequence.matched, sequence.found):
            self.state.cache.enter(sequence.blocks[i], sequence.keys[i])
            self.state.cache.mark(sequence.blocks[i], SaveState.BELOW)
        if sequence.found < sequence.matched:
            # A layer that was purged from HBM is not in the store either.
            self._restart_without(sequence, sequence.found)

    def _replan(self, sequence: Sequence, load: Load, found: int) -> bool:
        """With the sources known, load fewer chunks if recomputing the rest is clearly faster. True if the sequence
        restarted for that."""
        if sequence.worth is not None or not self.state.policy.load_plan:
            return False
        if not load.sources or len(load.sources) > len(load.blocks):
            return False
        missing = load.missing()
        chosen = self._plan(sequence, missing, found)
        if chosen.chunks >= len(missing):
            return False
        self._note_plan(sequence, chosen, (len(missing) - chosen.chunks) * self.state.shape.chunk_tokens)
        sequence.worth = load.blocks[chosen.chunks].index
        self.restart(sequence, Event.REPLANNED)
        return True

    # ---- LOADING -> RUNNING ------------------------------------------------------------------------------------
    def try_start(self, sequence: Sequence, alone: bool) -> bool:
        """Start the sequence if it is loaded or, if it would run alone, if its first layers are and the others will be
        at most ALONE_S late."""
        found = sequence.found
        if found is None:
            self._give_up_if_silent(sequence)
            return False
        blocks, layers = sequence.blocks[:found], self.state.shape.layers
        unready = self.state.cache.windowed.unready(blocks, sequence.passed) if blocks else np.zeros((0, layers), bool)
        ready = leading(~np.any(unready, axis=0))
        if ready < layers:
            if any(b.lost for b in blocks):
                self.restart(sequence, Event.LOST)
                return False
            came = sum(int(b.ready.sum()) for b in blocks)
            if came != sequence.came:
                sequence.came, sequence.heard_s = came, self.state.now
            elif self._give_up_if_silent(sequence):
                return False
            if not self.state.policy.layerwise or not alone:
                return False  # a step that waits for a layer would keep all of its sequences waiting
            tokens = min(len(sequence.tokens) - found * self.state.shape.chunk_tokens, self._step_tokens())
            compute_s = self.pace.prefill_token_s / layers * tokens
            if not ready or not may_start(ready, layers, self._layer_load_s(sequence, ready), compute_s, ALONE_S):
                return False
        sequence.worth = None
        sequence.computed = found * self.state.shape.chunk_tokens
        if sequence.generated == len(sequence.request.resume_tokens):  # not when coming back from preemption
            sequence.cached = min(sequence.computed, sequence.prompt_tokens)
            here = sequence.matched * self.state.shape.chunk_tokens
            sequence.cached_here = min(here, sequence.cached)
        sequence.on(Event.LAYERS_NEAR)
        sequence.times.enter(Phase.DECODE if sequence.spoken else Phase.OTHERS, self.state.now)
        return True

    def _layer_load_s(self, sequence: Sequence, ready: int) -> float:
        now, load = self.state.now, self.state.loads.get(sequence.load_id)
        missing = load.missing() if load is not None else []
        return layer_load_s(
            missing, self.state.rates.believed(now), self.state.shape.layers, ready, now - sequence.found_s
        )

    def _give_up_if_silent(self, sequence: Sequence) -> bool:
        """Give up a load that has been silent for SILENCE_S; the sequence then recomputes what is missing. True if
        given up."""
        if self.state.now - sequence.heard_s < SILENCE_S:
            return False
        if sequence.found is None:
            self.state.fell_silent()
        sequence.losses = MAX_LOSSES
        self.restart(sequence, Event.LOST)
        return True

    # ---- back to WAITING ---------------------------------------------------------------------------------------
    def restart(self, sequence: Sequence, event: Event) -> None:
        """Take the sequence off the device, back to WAITING. It will match again what is still valid."""
        if event is Event.LOST:
            sequence.losses += 1
            fields = {"request": sequence.request.request_id, "losses": sequence.losses}
            self.state.out.append(do.Note("pieces lost, recomputing", fields, bad=True))
        sequence.on(event)
        sequence.times.enter(Phase.MEMORY if event is Event.PREEMPTED else Phase.QUEUE, self.state.now)
        if event is not Event.REPLANNED:
            sequence.reached, sequence.restarted = max(sequence.reached, sequence.computed), event
        self.release(sequence)
        self.restarted = True

    def distrust(self, sequence: Sequence) -> bool:
        """The logits were not finite: drop all of the sequence's KV from the index. True if some of it had been loaded
        or matched: then the sequence restarts and recomputes everything."""
        for block in sequence.blocks:
            if block.key is not None and self.state.cache.index.get(block.key) is block:
                self.state.cache.erase(block.key)
        if not sequence.found:
            return False
        sequence.losses = MAX_LOSSES
        self.restart(sequence, Event.LOST)
        return True

    def release(self, sequence: Sequence) -> None:
        """Release the sequence's blocks and load. Pages without other users are then free, purgeable or being saved."""
        load = self.state.loads.get(sequence.load_id)
        sequence.load_id = 0
        for n in range(len(sequence.blocks) - 1, -1, -1):
            self.state.cache.release(sequence.blocks[n], n < sequence.passed)
        if load is not None:
            load.sequence = None
            # otherwise other sequences wait for these pieces
            if not any(
                block.users and not block.ready[layers].all()
                for block, layers in zip(load.blocks, load.layers, strict=True)
            ):
                self.state.abort_load(load)
        sequence.blocks = []
        sequence.computed, sequence.found, sequence.matched, sequence.whole, sequence.passed = 0, None, 0, 0, 0

    def pass_(self, sequence: Sequence) -> None:
        """Tokens of the sequence are in its blocks: it may have passed more of them."""
        cache = self.state.cache
        if (passed := cache.windowed.passed(sequence.computed)) > sequence.passed:
            cache.pass_(sequence.blocks[sequence.passed : passed])
            sequence.passed = passed
            cache.standings.passes(sequence.request.session, passed)

    def extend(self, sequence: Sequence, upto_tokens: int) -> int:
        """Add blocks up to `upto_tokens` tokens. Returns 0, or the number of missing pages, with nothing changed."""
        d = self.state
        need = -(-upto_tokens // d.shape.chunk_tokens) - len(sequence.blocks)
        if need <= 0:
            return 0
        if lacking := self._lacking(need * d.shape.layers):
            return lacking
        for _ in range(need):
            block = d.cache.new_block(len(sequence.blocks), sequence.request.session, range(d.shape.layers))
            d.cache.use(block)
            sequence.blocks.append(block)
        d.back()
        return 0
