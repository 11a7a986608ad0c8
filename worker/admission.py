"""From WAITING to RUNNING: match what HBM has, make room, ask the store for the rest, start when the first layers are near."""

from __future__ import annotations

import numpy as np

from contracts.kv import chunk_keys, leading
from contracts.v1 import kvstore_pb2
from runtime import telemetry
from worker.core.hbm import NO_PAGE, Block, Save
from worker.core.load_plan import may_start
from worker.core.pace import Pace
from worker.core.sequence import Event, Sequence, State
from worker.device import Device
from worker.prefetching import Prefetching

log = telemetry.logger("worker.admission")
#: After this many restarts for lost pieces a sequence computes everything itself.
MAX_LOSSES = 4


class Admission:
    """Admits sequences; mutates them and the device's cache. Engine thread only."""

    def __init__(self, device: Device, prefetching: Prefetching) -> None:
        self.device, self.prefetching = device, prefetching
        self.pace = Pace()
        #: A sequence was sent back to wait; whoever has looked clears it.
        self.restarted = False

    # ---- WAITING -> LOADING ------------------------------------------------------------------------------------
    def admit(self, sequence: Sequence, spare: int) -> int:
        """Give the sequence its blocks and ask for what is missing, if that leaves `spare` pages that are free or will be by themselves.

        Returns 0, or how many pages are lacking, with nothing changed.
        """
        d, cache = self.device, self.device.cache
        size, layers = d.shape.chunk_tokens, d.shape.layers
        usable = 0
        if d.settings.cache and sequence.losses < MAX_LOSSES:
            usable = (len(sequence.tokens) - 1) // size  # the last token is always computed: it yields the logits
            session = sequence.request.session
            sequence.keys = chunk_keys(d.salt_of(session.tenant), d.shape, sequence.tokens[: usable * size], sequence.keys[:usable])
        matched: list[Block] = []
        for key in sequence.keys[:usable]:
            block = cache.index.get(key)
            if block is None or block.lost:
                break
            matched.append(block)
            cache.use(block)
        self.prefetching.give_way_to(matched)
        chunks = len(sequence.tokens) // size + 1
        gaps = [[int(i) for i in np.flatnonzero(b.pages == NO_PAGE)] for b in matched]
        pages = sum(map(len, gaps)) + (chunks - len(matched)) * layers
        lacking = self._lacking(pages, spare)
        if lacking:
            for block in matched:
                cache.release(block)
            return lacking
        for block, missing in zip(matched, gaps, strict=True):
            cache.claim(block)
            cache.want(block, sequence.request.session)
            cache.fill(block, missing)
        fresh = [cache.new_block(i, sequence.request.session, range(layers)) for i in range(len(matched), chunks)]
        for block in fresh:
            cache.use(block)
        d.back()
        sequence.blocks = matched + fresh
        sequence.matched, sequence.found, sequence.load_id = len(matched), len(matched), 0
        sequence.computed = 0
        sequence.on(Event.ADMITTED)
        first = leading(not g for g in gaps)
        if d.store_here and first < usable:
            self._ask(sequence, first, usable, gaps)
        elif first < len(matched):
            # Pieces are missing and nobody can bring them: what is whole is used, the rest is computed.
            self._restart_without(sequence, first)
        return 0

    def _lacking(self, pages: int, spare: int = 0) -> int:
        """Make room for a request: 0, or how many pages are lacking.

        Loads of hints give way to it, one by one, before it has to wait or somebody is preempted.
        """
        cache, now = self.device.cache, self.device.clock.now()
        if spare and (lacking := pages + spare - cache.available() - cache.coming()) > 0:
            return lacking
        while not cache.make_room(pages, now):
            if not self.prefetching.give_up_one():
                return pages - cache.available()
        return 0

    def _ask(self, sequence: Sequence, first: int, usable: int, gaps: list[list[int]]) -> None:
        every = list(range(self.device.shape.layers))
        wanted = [(i, gaps[i] if i < sequence.matched else every) for i in range(first, usable)]
        wanted = [(i, layers) for i, layers in wanted if layers]
        load = self.device.open_load(
            sequence.request.session,
            [sequence.keys[i] for i, _ in wanted],
            [sequence.blocks[i] for i, _ in wanted],
            [layers for _, layers in wanted],
            kvstore_pb2.DEMAND,
            sequence.request.priority,
            sequence.request.source_nodes,
        )
        load.sequence = sequence
        sequence.load_id, sequence.found = load.load_id, None
        sequence.started_load_s = self.device.clock.now()

    def _restart_without(self, sequence: Sequence, first: int) -> None:
        for block in sequence.blocks[first : sequence.matched]:
            if not block.complete:
                self.device.cache.lose(block)
        self.restart(sequence, Event.LOST)

    # ---- what the store said -----------------------------------------------------------------------------------
    def found(self, sequence: Sequence, load_id: int, chunks: int) -> None:
        """The store can bring the first `chunks` of what was asked for."""
        if sequence.load_id != load_id or sequence.state is not State.LOADING:
            return
        load = self.device.table.open.get(load_id)
        if load is None:
            return
        sequence.found = load.blocks[chunks].index if chunks < len(load.blocks) else len(sequence.keys)
        for i in range(sequence.matched, sequence.found):
            self.device.cache.enter(sequence.blocks[i], sequence.keys[i])
            sequence.blocks[i].save = Save.BELOW
        if sequence.found < sequence.matched:
            # A layer that had been purged from HBM is nowhere below either.
            self._restart_without(sequence, sequence.found)

    # ---- LOADING -> RUNNING ------------------------------------------------------------------------------------
    def try_start(self, sequence: Sequence) -> bool:
        """Start the sequence if its first layers are here and the others will be in time."""
        found = sequence.found
        if found is None:
            return False
        blocks, layers = sequence.blocks[:found], self.device.shape.layers
        ready = leading(np.all([b.ready for b in blocks], axis=0)) if blocks else layers
        if ready < layers:
            if any(b.lost for b in blocks):
                self.restart(sequence, Event.LOST)
                return False
            if not self.device.settings.layerwise:
                return False
            elapsed = self.device.clock.now() - sequence.started_load_s
            tokens = len(sequence.tokens) - found * self.device.shape.chunk_tokens
            if not may_start(ready, layers, elapsed / max(ready, 1), self.pace.prefill_token_s / layers * tokens):
                return False
        sequence.computed = found * self.device.shape.chunk_tokens
        if sequence.generated == len(sequence.request.resume_tokens):  # not when coming back from preemption
            sequence.cached = min(sequence.computed, sequence.prompt_tokens)
        sequence.on(Event.LAYERS_NEAR)
        return True

    # ---- back to WAITING ---------------------------------------------------------------------------------------
    def restart(self, sequence: Sequence, event: Event) -> None:
        """Take the sequence off the device; it is admitted afresh, and finds what is still good."""
        if event is Event.LOST:
            sequence.losses += 1
            log.warning("pieces lost, recomputing", request=sequence.request.request_id, losses=sequence.losses)
        sequence.on(event)
        sequence.reached, sequence.restarted = max(sequence.reached, sequence.computed), event
        self.vacate(sequence)
        self.restarted = True

    def vacate(self, sequence: Sequence) -> None:
        """Let go of blocks and load. Pages that nobody else needs are free, or to be purged, or being saved when this returns."""
        load = self.device.table.open.get(sequence.load_id)
        sequence.load_id = 0
        for block in reversed(sequence.blocks):
            self.device.cache.release(block)
        if load is not None:
            load.sequence = None
            if not any(block.users and not block.complete for block in load.blocks):  # else others wait for what it brings
                self.device.abort_load(load)
        sequence.blocks = []
        sequence.computed, sequence.found, sequence.matched = 0, None, 0

    def extend(self, sequence: Sequence, upto_tokens: int) -> int:
        """Make sure there are blocks for `upto_tokens` tokens. Returns 0, or how many pages are lacking, with nothing changed."""
        d = self.device
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
