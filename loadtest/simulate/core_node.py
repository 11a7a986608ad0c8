"""A node with every core in full: the production store below HBM (`core_store`), and the worker's own HBM ledger, victims, standings, load
plan and order of prefetch in it. What the aggregated node (`node`) reckons a session at a time is decided here piece by piece.

So that it stays affordable, a piece is larger than on real nodes (`core_turns.coarse`): the resolution of evictions, loads and prefix
matches is that much lower.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from blake3 import blake3

from contracts.ids import SessionKey
from contracts.kv import Manifest
from kvstore.core import events as ev
from kvstore.core import instructions as do
from loadtest.simulate.core_hints import HintedLoads
from loadtest.simulate.core_store import Blob, CoreStore, Ways
from loadtest.simulate.core_turns import HintedBand, TurnKv
from loadtest.simulate.costs import NodeKind
from loadtest.simulate.events import Events
from loadtest.simulate.mechanisms import ALL, Mechanisms
from loadtest.simulate.node import Node
from loadtest.simulate.sequences import Request, Running
from scheduler.core.directory import Held
from worker.core.hbm import Block, HbmCache, Save
from worker.core.load_plan import LoadRate, Missing, Prefill, Source, layer_load_s, may_start, plan
from worker.core.pages import PagePool

_BUS_DEMAND, _BUS_HINT = (0, 0), (1, 0)
#: Counting what could be purged looks at every block.
_COUNT_EVERY_S = 1.0


class CoreNode(Node):
    """See the module. Invariants: those of its cores (`validate`)."""

    def __init__(
        self,
        name: str,
        kind: NodeKind,
        events: Events,
        peers: dict[str, Node],
        *,
        ended: Callable[[Request], None],
        has: Mechanisms = ALL,
        blob_tier: Blob,
        stores: dict[str, CoreStore],
    ) -> None:
        super().__init__(name, kind, events, peers, ended=ended, has=has)
        self.shape = kind.shape
        self.store = stores[name] = CoreStore(name, kind, self.shape, events, Ways(self.disk, self.link, self.blob), blob_tier, stores, has)
        self.store.owners["worker"] = self
        pages = int(kind.hbm_bytes // self.shape.piece_bytes)
        per_slab = max(self.shape.layers, 4)
        self.pool = PagePool(pages // per_slab, per_slab, self.shape.layers)
        self.cache = HbmCache(self.pool, layer_priority=has.layer_priority, hold_hinted=not has.cooperative)
        self._turns: dict[str, TurnKv] = {}
        self.loads: dict[ev.LoadId, TurnKv | HintedBand] = {}
        self._saves: dict[ev.SaveId, list[Block]] = {}
        self._numbers = 0
        self._counted_s, self._available = float("-inf"), 0
        self.hinted = HintedLoads(self, events)
        piece = self.shape.piece_bytes
        rates = {Source.SSD: kind.ssd_bytes_per_s, Source.PEER: kind.link_bytes_per_s, Source.BLOB: kind.blob_bytes_per_s}
        self._rates = {source: LoadRate(0.005, piece / rate) for source, rate in rates.items()}
        self._rates[Source.DRAM] = LoadRate(0.0, piece / kind.dram_bytes_per_s)

    # ---- what it holds -----------------------------------------------------------------------------------------
    def tokens_here(self, session: SessionKey) -> int:
        """In DRAM or on the SSD."""
        return self._residency(session)[0]

    def _residency(self, session: SessionKey) -> tuple[int, int]:
        index = self.store.core.index
        manifest = index.manifests.get(session)
        if manifest is None:
            return 0, 0
        dram, ssd = index.residency(manifest.keys, "dram").tokens, index.residency(manifest.keys, "ssd").tokens
        return max(dram, ssd), dram

    def held(self) -> list[tuple[SessionKey, Held]]:
        """What the store reports: its own list of sessions whose residency has changed."""
        index = self.store.core.index
        changed, index.dirty = index.dirty, set()
        found = []
        for session in sorted(changed, key=lambda s: s.session_id):
            tokens, dram = self._residency(session)
            found.append((session, Held(tokens, tokens * self.token_bytes, dram)))
        return found

    def key(self, session: SessionKey, chunk: int) -> bytes:
        """Of a session's chunk: its history only ever grows."""
        return blake3(f"{session} {chunk}".encode()).digest()

    # ---- turns -------------------------------------------------------------------------------------------------
    def _gather(self, sequence: Running, wanted: int, sources: tuple[str, ...]) -> None:
        session, chunks = sequence.request.session, wanted // self.shape.chunk_tokens
        self.cache.standings.came(session, self._events.now)
        self.hinted.forget(session)
        keys = [self.key(session, n) for n in range(chunks)]
        self._turns[sequence.request.request_id] = TurnKv(sequence, keys, sources)

    def _admit(self) -> None:
        while self._waiting and self._running < self.kind.max_batch:
            sequence = self._waiting[0][1]
            turn = self._turns[sequence.request.request_id]
            if not self._take_blocks(turn):
                return
            heapq.heappop(self._waiting)
            self._running += 1
            sequence.admitted = True
            self._ask(turn)

    def _take_blocks(self, turn: TurnKv) -> bool:
        """Pages for all of its chunks: those that are here, with what is missing of them, and new ones. False: there is no room."""
        request, cache, layers = turn.sequence.request, self.cache, range(self.shape.layers)
        self.hinted.give_way(request.session)
        here: list[Block] = []
        for key in turn.keys:
            block = cache.index.get(key)
            if block is None or block.lost or block.moving:
                break
            here.append(block)
        for block in here:
            cache.use(block)
        gaps = cache.gaps(here)
        total = -(-(request.prompt_tokens + request.answer_tokens) // self.shape.chunk_tokens)
        need = sum(map(len, gaps)) + (total - len(here)) * len(layers)
        # Where nothing runs, what hints hold is all that keeps everybody waiting.
        held, cache.hold_hinted = cache.hold_hinted, cache.hold_hinted and self._running > 0
        able, cache.hold_hinted = cache.make_room(need, self._events.now), held
        if not able:
            for block in here:
                cache.release(block)
            return False
        cache.claim(here)
        for block, missing in zip(here, gaps, strict=True):
            cache.fill(block, missing)
            cache.want(block, request.session)
        new = [cache.new_block(n, request.session, layers) for n in range(len(here), total)]
        for block in new:
            cache.use(block)
        turn.blocks = [*here, *new]
        lacking = (tuple(int(layer) for layer in layers if not block.ready[layer]) for block in turn.blocks[: len(turn.keys)])
        turn.wants = [(n, missing) for n, missing in enumerate(lacking) if missing]
        return True

    def _ask(self, turn: TurnKv) -> None:
        request = turn.sequence.request
        if not turn.wants:
            self._begin(turn, len(turn.keys))
            return
        turn.load, turn.asked_s, turn.came = self.new_load(), self._events.now, [0] * self.shape.layers
        self.loads[turn.load] = turn
        wants = [(turn.keys[n], layers) for n, layers in turn.wants]
        args = (request.session, self.shape.fingerprint, wants, turn.sources, request.priority, self._events.now)
        self.store.handle(ev.LoadWanted(turn.load, ev.LoadKind.DEMAND, *args))

    def new_load(self) -> ev.LoadId:
        """A name for a load of this node's."""
        self._numbers += 1
        return "worker", str(self._numbers)

    def answer(self, instruction: do.Instruction) -> None:
        """What the store says."""
        match instruction:
            case do.Found():
                turn = self.loads.get(instruction.load)
                if isinstance(turn, TurnKv):
                    self._found(turn, instruction)
            case do.Pieces():
                self._pieces(instruction)
            case do.End():
                self._load_ended(instruction)
            case do.Grant():
                self._granted(instruction)
            case do.Offer():
                self.hinted.offered(instruction)
            case _:
                pass

    def _found(self, turn: TurnKv, found: do.Found) -> None:
        """The store has so many: load these, or fewer where computing them again is sooner (`worker.core.load_plan`)."""
        count = found.chunks
        if not turn.planned:
            turn.planned = True
            sources = [Source.DRAM if s is None else Source(s + 1) for s in found.sources[:count]]
            missing = [Missing(len(layers), source) for (_, layers), source in zip(turn.wants, sources, strict=False)]
            count = plan(missing, self._rates, self._prefill(turn, len(turn.keys))).chunks
            if count < found.chunks:
                self._cancel(turn)
                turn.wants = turn.wants[:count]
                self._events.at(self._events.now, lambda: self._ask(turn) if turn.wants else self._begin(turn, self._present(turn, 0)))
                return
        turn.expected = count
        if not count:
            self._cancel(turn)
            self._begin(turn, self._present(turn, 0))

    def _present(self, turn: TurnKv, loaded: int) -> int:
        """Leading chunks that are there once the first `loaded` of those wanted have come."""
        return turn.wants[loaded][0] if loaded < len(turn.wants) else (turn.wants[-1][0] + 1 if turn.wants else self._first_gap(turn))

    def _first_gap(self, turn: TurnKv) -> int:
        return next((n for n, b in enumerate(turn.blocks[: len(turn.keys)]) if not b.complete), len(turn.keys))

    def _prefill(self, turn: TurnKv, chunks: int) -> Prefill:
        rest = turn.sequence.request.prompt_tokens - chunks * self.shape.chunk_tokens
        token_s = self.engine.pace.prefill_token_s
        return Prefill(rest, token_s, self.shape.chunk_tokens, self.kind.layers_modelled or self.shape.layers, self.has.layerwise)

    def _cancel(self, turn: TurnKv) -> None:
        if turn.load is not None:
            self.loads.pop(turn.load, None)
            self.store.handle(ev.LoadCancelled(turn.load, self._events.now))
            turn.load = None

    def _pieces(self, given: do.Pieces) -> None:
        """They are in the arena: copy them into HBM, layer by layer, and say so."""
        load = self.loads.get(given.load)
        if load is None:
            return
        key = _BUS_DEMAND if isinstance(load, TurnKv) else _BUS_HINT
        by_layer: dict[int, list[int]] = {}
        for index, layer, _, _ in given.pieces:
            by_layer.setdefault(layer, []).append(index)
        for layer, indices in sorted(by_layer.items()):
            load.on_bus += 1
            bytes_ = float(len(indices) * self.shape.piece_bytes)
            self.bus.send(bytes_, key, lambda layer=layer, indices=indices: self._copied(given.load, load, layer, indices))  # type: ignore[misc]

    def _copied(self, ident: ev.LoadId, load: TurnKv | HintedBand, layer: int, indices: list[int]) -> None:
        load.on_bus -= 1
        if ident not in self.loads:
            return
        for index in indices:
            block = load.blocks[load.wants[index][0]] if isinstance(load, TurnKv) else load.blocks[index]
            if block.pages[layer] >= 0:
                block.ready[layer] = True
        self.store.handle(ev.PiecesTaken(ident, [(index, layer) for index in indices], self._events.now))
        if isinstance(load, TurnKv):
            load.came[layer] += len(indices)
            self._perhaps_start(load)
        self._perhaps_close(ident, load)

    def _perhaps_start(self, turn: TurnKv) -> None:
        """Begin to compute when no layer will have to be waited for (`worker.core.load_plan.may_start`)."""
        if turn.started or turn.expected is None or not self.has.layerwise:
            return
        wanted = turn.wants[: turn.expected]
        needed = [sum(layer in layers for _, layers in wanted) for layer in range(self.shape.layers)]
        ready = next((n for n, (came, need) in enumerate(zip(turn.came, needed, strict=True)) if came < need), self.shape.layers)
        if not ready:
            return
        missing = [Missing(len(layers), Source.DRAM) for _, layers in wanted]
        each_s = layer_load_s(missing, self._rates, self.shape.layers, ready, self._events.now - turn.asked_s)
        chunks = self._present(turn, turn.expected)
        compute_s = self._prefill(turn, chunks).tokens * self.engine.pace.prefill_token_s / self.shape.layers
        if may_start(ready, self.shape.layers, each_s, compute_s):
            self._begin(turn, chunks)

    def _load_ended(self, end: do.End) -> None:
        load = self.loads.get(end.load)
        if load is None:
            return
        load.ended = True
        if isinstance(load, TurnKv) and not load.started and load.expected is not None:
            load.expected = min(load.expected, end.usable)
        self._perhaps_close(end.load, load)

    def _perhaps_close(self, ident: ev.LoadId, load: TurnKv | HintedBand) -> None:
        if not load.ended or load.on_bus:
            return
        self.loads.pop(ident, None)
        if isinstance(load, TurnKv):
            if not load.started and load.expected is not None:
                self._begin(load, self._present(load, load.expected))
            return
        for block in load.blocks:
            block.moving -= 1
            self.cache.settle(block)
        self.hinted.pump()

    def _begin(self, turn: TurnKv, chunks: int) -> None:
        """All that will be found is known: the rest is computed."""
        turn.started = True
        sequence = turn.sequence
        sequence.found, sequence.load_tokens = chunks, chunks * self.shape.chunk_tokens
        self.recomputed_tokens += max(len(turn.keys) - chunks, 0) * self.shape.chunk_tokens
        self._start(sequence)

    # ---- a turn's end ------------------------------------------------------------------------------------------
    def _free(self, sequence: Running) -> None:
        """Its chunks stay in HBM as cached once a lower tier has them."""
        request, now, cache = sequence.request, self._events.now, self.cache
        turn = self._turns.pop(request.request_id)
        self._cancel(turn)
        full = (request.prompt_tokens + request.answer_tokens) // self.shape.chunk_tokens
        keys = [self.key(request.session, n) for n in range(full)]
        saving: list[Block] = []
        for block, key in zip(turn.blocks, keys, strict=False):
            block.ready[:] = True
            if block.key is None and cache.enter(block, key):
                block.save = Save.WAITING
                saving.append(block)
        if saving:
            self._numbers += 1
            save = ("worker", self._numbers)
            self._saves[save] = saving
            wanted = [b.key for b in saving if b.key is not None]
            self.store.handle(ev.SaveWanted(save, request.session, self.shape.fingerprint, wanted, now))
        for block in turn.blocks:
            cache.release(block)
        cache.standings.ended(request.session, now)
        tokens = full * self.shape.chunk_tokens
        self.store.handle(ev.TurnEnded(Manifest(request.session, self.kind.model, self.shape.fingerprint, keys, tokens, now), now))
        self.hinted.turn_ended()

    def _granted(self, grant: do.Grant) -> None:
        blocks = self._saves.pop(grant.save)
        for indices, outcome in ((grant.held, Save.BELOW), (grant.refused, Save.REFUSED)):
            for n in indices:
                blocks[n].save = outcome
                self.cache.settle(blocks[n])

        def written() -> None:
            self.store.handle(ev.SaveEnded(grant.save, list(grant.indices), [], self._events.now))
            for n in grant.indices:
                blocks[n].save = Save.BELOW
                self.cache.settle(blocks[n])
            self._admit()

        if grant.indices:
            # The bus carries this the other way, beside what is loaded.
            self._events.at(self._events.now + len(grant.indices) * self.shape.chunk_bytes / self.kind.dram_bytes_per_s, written)

    # ---- hints -------------------------------------------------------------------------------------------------
    def prefetch(
        self,
        session: SessionKey,
        priority: int,
        expires_s: float,
        tokens: int,
        sources: tuple[str, ...],
        arrival_s: float | None = None,
    ) -> None:
        """The scheduler's command for a hint."""
        now = self._events.now
        lead_s = 0.0 if arrival_s is None else max(arrival_s - now, 0.0)
        self.cache.standings.advise(session, priority, expires_s, now)
        self._events.at(expires_s, self._admit)  # what it holds may then be had
        self.store.handle(ev.Advised(session, priority, lead_s, expires_s - now, sources, now))

    def withdraw(self, session: SessionKey) -> None:
        """The hint is void, or went to another node."""
        self.hinted.forget(session)
        self.cache.standings.withdraw(session)
        self.store.handle(ev.Invalidated(session, self._events.now))
        self._admit()

    # ---- reports -----------------------------------------------------------------------------------------------
    @property
    def pages(self) -> tuple[int, int]:
        """In all, and those that are free or could be made so at once; counted once a second, as the scheduler only shows it."""
        if self._events.now >= self._counted_s + _COUNT_EVERY_S:
            self._counted_s, self._available = self._events.now, self.cache.available()
        return self.pool.total, self._available

    def validate(self) -> None:
        """Raise AssertionError when a core's invariant does not hold."""
        self.engine.validate()
        self.store.core.validate()
        self.cache.validate(b for turn in self._turns.values() for b in turn.blocks)
        assert self._running + len(self._waiting) == len(self.outstanding)
