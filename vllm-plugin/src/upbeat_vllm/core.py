"""The scheduler side's decisions: what is asked of the store, what a request loads, what is saved, and when blocks are
free. Pure: no vLLM, no socket, no clock of its own.

A request's life: `match` asks the store once, when the arena has room for its chunks, and says None until it has
answered, and for a while until they have come; `allocated` starts the load;
`scheduled` offers the chunks that a step completes; `finished` says whether blocks must wait for copies. Messages to
the store are in `to_store`, orders for the ranks in `take_orders`, both to be taken after each call.

Invariants (`validate`): a request has at most one load; a save's blocks are held by its request, or by vLLM for it
(`ending`), until every rank has copied them or the save is over.
"""

from __future__ import annotations

from collections.abc import Sequence

from contracts.convert import manifest_to_wire, session_from_wire, session_to_wire
from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest, chunk_keys
from contracts.v1 import kvstore_pb2 as pb
from contracts.warm_up import encode_forget, encode_warm_up, note_of
from upbeat_vllm.known_blocks import KnownBlocks
from upbeat_vllm.load_or_compute import LoadOrCompute
from upbeat_vllm.orders import LoadOrder, SaveOrder, StepOrders
from upbeat_vllm.state import Load, Request, Save, Turn

#: How long the store may take to say what it can bring, in seconds; then the request computes.
ANSWER_S = 2.0
#: How long a request waits without blocks for pieces that are on their way, while others compute, in seconds.
COMES_S = 1.0
#: Loads of requests without blocks may fill so much of the arena: a load that is copied needs room, too.
AHEAD = 0.5


class Core:
    """See the module. ranks: that copy each load and save. warms: hinted sessions are brought into vLLM's own cache."""

    def __init__(self, shape: KvShape, model: str, ranks: int, *, warms: bool = False) -> None:
        self.shape, self.model, self.ranks, self._warms = shape, model, ranks, warms
        self.to_store: list[pb.WorkerToStore] = []
        #: Messages to the sidecar: hinted sessions that are in the arena, and erased ones.
        self.to_warm: list[bytes] = []
        self.attached = False
        self.choice = LoadOrCompute(shape)
        self.blocks = KnownBlocks()
        #: Chunks that the arena holds at most.
        self._room = 0
        #: A request of this step may not ask yet: those behind it may not either.
        self._refused = False
        self._requests: dict[str, Request] = {}
        self._loads: dict[int, str] = {}
        self._saves: dict[int, Save] = {}
        self._turns: dict[str, tuple[Manifest, set[int]]] = {}
        self._number = 0
        self._orders = StepOrders()

    # ---- vLLM's scheduler --------------------------------------------------------------------------------------
    def match(self, turn: Turn, tokens: Sequence[int], computed: int, now: float) -> tuple[int | None, bool]:
        """How many tokens beyond the first `computed` the store brings, and whether they come outside of steps. None:
        ask again. May be called again and again until the request is scheduled."""
        size = self.shape.chunk_tokens
        request = self._request(turn, tokens)
        usable, first = (len(tokens) - 1) // size, computed // size
        load = request.load
        if load is not None and load.under_way:
            return 0, False
        if load is not None and load.gone:
            self._give_up(request)
            load = None
        if not self.attached or not turn.cacheable or usable <= first:
            self._give_up(request)
            return 0, False
        if load is None:
            if request.asked:
                return 0, False
            if not self._refused and self._may_ask(usable - first):
                self._ask(request, first, usable, now)
            else:
                self._refused = True
            return None, False
        if load.found is None:
            if now - load.asked_s < ANSWER_S:
                return None, False
            self._give_up(request)
            return 0, False
        if load.first > first:  # vLLM's own blocks were evicted meanwhile
            request.load = None
            self._ask(request, first, usable, now)
            self._cancel(load)  # only now: the store keeps what both want
            return None, False
        load.settle()
        if load.answered is None:
            rest = len(tokens) - (load.first + load.found) * size
            whole = request.turn.warms
            load.answered = load.found if whole else self.choice.chunks(load, rest, self._prompt_tokens(), now)
        count = load.first + load.answered - first
        if count <= 0:
            self._give_up(request)
            return 0, False
        if not load.near and self.busy and now - load.found_s < COMES_S:
            return None, False
        load.begins = first
        return count * size, not load.near

    def _may_ask(self, chunks: int) -> bool:
        """Whether the arena has room for one more load that may wait long for vLLM's blocks."""
        loads = [request.load for request in self._requests.values() if request.load is not None]
        held = sum(load.wanted if load.found is None else load.announced for load in loads if not load.under_way)
        # One that does not fit keeps all others out, until it is copied.
        return held + chunks <= AHEAD * self._room or not (held if chunks <= self._room else loads)

    def waits(self, request_id: str) -> bool:
        """Whether the store was asked for the request and has not answered."""
        request = self._requests.get(request_id)
        load = request.load if request is not None else None
        return load is not None and load.found is None and not load.gone

    @property
    def busy(self) -> bool:
        """Whether a request has blocks and waits for no load, so that a step has work."""
        return any(request.computes for request in self._requests.values())

    def _request(self, turn: Turn, tokens: Sequence[int]) -> Request:
        request = self._requests.setdefault(turn.request_id, Request(turn, length=len(tokens)))
        if turn.cacheable:
            request.keys = chunk_keys(turn.salt, self.shape, tokens, request.keys, turn.extras)
        return request

    def _ask(self, request: Request, first: int, usable: int, now: float) -> None:
        self._number += 1
        request.load, request.asked = Load(self._number, first, usable - first, now), True
        self._loads[self._number] = request.turn.request_id
        asked = pb.LoadRequest(
            load_id=self._number,
            load_class=pb.DEMAND,
            session=session_to_wire(request.turn.session),
            fingerprint=self.shape.fingerprint,
            chunks=[pb.ChunkWant(key=key) for key in request.keys[first:usable]],
            source_nodes=request.turn.source_nodes,
            priority=request.turn.priority,
            request_id=request.turn.request_id,
        )
        self.to_store.append(pb.WorkerToStore(load=asked))

    def _prompt_tokens(self) -> int:
        """Tokens that are being computed, or can be: nothing that a load is on its way to."""
        return sum(max(r.length - r.computed, 0) for r in self._requests.values() if r.computes)

    def allocated(self, request_id: str, blocks: Sequence[int], external_tokens: int) -> None:
        """vLLM has given the request `blocks`; external_tokens: of the answer to `match`, 0 where it loads nothing."""
        request = self._requests.get(request_id)
        if request is None:
            return
        request.blocks = list(blocks)
        load = request.load
        if load is None or load.under_way:
            return
        if not external_tokens or load.found is None or load.answered is None:
            self._give_up(request)
            return
        last = load.begins + external_tokens // self.shape.chunk_tokens
        # By chunk of the load; -1: vLLM has it already, or has no room for it.
        chunks = range(load.first, load.first + load.answered)
        target = tuple(blocks[i] if load.begins <= i < last else -1 for i in chunks)
        self._note_blocks(request, last)
        load.under_way = True
        request.saved = max(request.saved, last)
        self._orders.loads.append(LoadOrder(load.load_id, request_id, target, sync=load.near))

    def _give_up(self, request: Request) -> None:
        """Forget a load of which no piece goes anywhere."""
        if (load := request.load) is not None and not load.under_way:
            request.load = None
            self._cancel(load)

    def _cancel(self, load: Load) -> None:
        self._loads.pop(load.load_id, None)
        self.to_store.append(pb.WorkerToStore(cancel=pb.LoadCancel(load_id=load.load_id)))

    def scheduled(
        self, request_id: str, tokens: Sequence[int], blocks: Sequence[int], computed: int, first: int | None = None
    ) -> None:
        """The coming step computes the request's KV from token `first` (None: where it was) up to token `computed`;
        `blocks`: all that it has. Offers the chunks that are complete with it."""
        request = self._requests.get(request_id)
        if request is None or not request.turn.cacheable or request.erased:
            return
        size = self.shape.chunk_tokens
        request.blocks = list(blocks)
        if first is not None:  # less than before: blocks that did not come are computed, perhaps in other blocks
            request.saved, request.noted = min(request.saved, first // size), min(request.noted, first // size)
        request.computed = max(request.computed, min(computed, len(tokens)))
        full = min(request.computed // size, len(blocks))
        known, extras = request.keys, request.turn.extras
        request.keys = chunk_keys(request.turn.salt, self.shape, tokens[: max(full, len(known)) * size], known, extras)
        self._note_blocks(request, full)
        if full <= request.saved or not self.attached or request.turn.warms:
            return
        self._number += 1
        keys = request.keys[request.saved : full]
        offer = pb.SaveRequest(
            save_id=self._number,
            session=session_to_wire(request.turn.session),
            fingerprint=self.shape.fingerprint,
            keys=keys,
            request_id=request_id,
        )
        self.to_store.append(pb.WorkerToStore(save=offer))
        chosen = tuple(blocks[request.saved : full])
        self._saves[self._number] = Save(request_id, len(keys), self.ranks)
        request.saves.add(self._number)
        self._orders.saves.append(SaveOrder(self._number, chosen))
        request.saved = full

    def preempted(self, request_id: str) -> None:
        """vLLM takes the request's blocks away: copies out of them end before the step overwrites any."""
        request = self._requests.get(request_id)
        if request is None:
            return
        self._orders.drain.extend(sorted(request.saves))
        if (load := request.load) is not None:
            self._loads.pop(load.load_id, None)
        # It is matched afresh when it comes back; what was offered stays offered.
        request.load, request.blocks, request.asked = None, [], False
        request.computed = request.noted = 0

    def is_loading(self, request_id: str) -> bool:
        """Its blocks may still be written by a load that no step waits for."""
        request = self._requests.get(request_id)
        load = request.load if request is not None else None
        return load is not None and load.under_way and not load.near

    def finished(self, request_id: str, waits_for_load: bool, now_wall: float, tokens: Sequence[int] = ()) -> bool:
        """The request has ended, with these tokens. True: its blocks are kept until the ranks report it."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._give_up(request)
        if waits_for_load:
            self._orders.aborted.append(request_id)
        full = min(request.computed // self.shape.chunk_tokens, len(request.keys))
        turn = request.turn
        if full and turn.cacheable and not turn.warms and not request.erased:
            manifest = Manifest(turn.session, self.model, self.shape.fingerprint, request.keys[:full], 0, now_wall)
            manifest.tokens = full * self.shape.chunk_tokens
            if self._warms and not turn.extras:
                manifest.note = note_of(turn.cache_salt, tokens[: manifest.tokens])
            self._turns[request_id] = manifest, set(request.saves)
            self._tell_turn(request_id)
        if not request.saves:
            return False
        self._orders.ending.append((request_id, tuple(sorted(request.saves))))
        return True

    def _note_blocks(self, request: Request, upto: int) -> None:
        self.blocks.note(request.keys[request.noted : upto], request.blocks[request.noted : upto])
        request.noted = max(request.noted, upto)

    @property
    def only_loads(self) -> bool:
        """Whether loads are on their way into blocks, and a step would change nothing before one has ended."""
        under_way = any(r.load is not None and r.load.under_way for r in self._requests.values())
        return under_way and not self.busy and self._orders == StepOrders()

    def take_orders(self) -> StepOrders:
        """What the ranks are told with the step."""
        taken, self._orders, self._refused = self._orders, StepOrders(), False
        return taken

    # ---- the store ---------------------------------------------------------------------------------------------
    def here(self, attached: bool, arena_bytes: int = 0) -> None:
        """The store is attached, or gone: then nothing that was asked of it comes."""
        self.attached, self._room = attached, arena_bytes // self.shape.chunk_bytes
        if attached:
            return
        for request in self._requests.values():
            if request.load is not None:
                # Kept until vLLM asks again: it may just have been told of these chunks, and the ranks say what fails.
                request.load.gone = True
        for save_id in [n for n, save in self._saves.items() if not save.granted]:
            self._save_over(save_id)

    def hear(self, message: pb.StoreToWorker, now: float) -> None:
        """LoadFound, LoadEnd, SaveGrant, PrefetchOffer, Erase; the ranks have pieces, ends and grants, too."""
        kind = message.WhichOneof("kind")
        if kind == "found":
            self._found(message.found, now)
        elif kind == "end":
            self._all_came(message.end, now)
        elif kind == "grant":
            self._granted(message.grant)
        elif kind == "erase":
            self._erase(message.erase)
        elif kind == "offer":
            self._offered(message.offer)

    def _offered(self, offer: pb.PrefetchOffer) -> None:
        if offer.note and self._warms and offer.fingerprint == self.shape.fingerprint:
            tokens = len(offer.keys) * self.shape.chunk_tokens
            session = session_from_wire(offer.session)
            self.to_warm.append(encode_warm_up(session, offer.note, tokens, offer.expires_s))

    def _found(self, found: pb.LoadFound, now: float) -> None:
        request = self._requests.get(self._loads.get(found.load_id, ""))
        load = request.load if request is not None else None
        if load is None or load.load_id != found.load_id or load.found is not None:
            return
        load.found = load.announced = min(found.chunks, load.wanted)
        load.near, load.found_s = found.near, now
        load.sources = tuple(s for s in found.sources if s in (0, 1, 2, 3))
        load.due_s = tuple(found.due_s)

    def _all_came(self, end: pb.LoadEnd, now: float) -> None:
        """All that comes of a load is in the arena. If its request has no blocks yet, it will wait for nothing: vLLM
        hears of that when it asks again, for it may just have been told of another number."""
        request = self._requests.get(self._loads.get(end.load_id, ""))
        load = request.load if request is not None else None
        if request is None or load is None or load.under_way or load.found is None or load.usable is not None:
            return
        load.usable = end.usable
        if end.usable >= load.found and not load.near:
            self.choice.observed(load, 0.0, (now - load.found_s) / max(load.found * self.shape.layers, 1), now)
        elif not end.usable and load.answered is None:
            self._give_up(request)

    def _granted(self, grant: pb.SaveGrant) -> None:
        save = self._saves.get(grant.save_id)
        if save is None:  # given up: the store need not keep room for it
            if grant.indices:
                done = pb.SaveDone(save_id=grant.save_id, aborted=grant.indices)
                self.to_store.append(pb.WorkerToStore(saved=done))
            return
        save.granted = True
        if not grant.indices:
            self._save_over(grant.save_id)

    def copied(self, save_id: int, ok: Sequence[int]) -> None:
        """A rank has copied these chunks of a save, and copies no more of it."""
        save = self._saves.get(save_id)
        if save is None:
            return
        save.ok = set(ok) if save.ok is None else save.ok & set(ok)
        save.waits -= 1
        if save.waits <= 0:
            done = pb.SaveDone(
                save_id=save_id, ok=sorted(save.ok), aborted=[i for i in range(save.count) if i not in save.ok]
            )
            self.to_store.append(pb.WorkerToStore(saved=done))
            self._save_over(save_id)

    def _save_over(self, save_id: int) -> None:
        save = self._saves.pop(save_id, None)
        if save is None:
            return
        if (request := self._requests.get(save.request_id)) is not None:
            request.saves.discard(save_id)
        if (turn := self._turns.get(save.request_id)) is not None:
            turn[1].discard(save_id)
            self._tell_turn(save.request_id)

    def _tell_turn(self, request_id: str) -> None:
        manifest, waits = self._turns[request_id]
        if not waits:
            del self._turns[request_id]
            self.to_store.append(pb.WorkerToStore(turn=pb.Turn(manifest=manifest_to_wire(manifest))))

    def loaded(self, load_id: int, came: int, waited_s: float, seconds: float, now: float) -> None:
        """All ranks are done with a load of which so many pieces came, the first after waited_s and the others within
        `seconds`."""
        request = self._requests.get(self._loads.pop(load_id, ""))
        if request is None or request.load is None or request.load.load_id != load_id:
            return
        load, request.load = request.load, None
        self.choice.observed(load, waited_s, seconds / max(came, 1), now)

    def _erase(self, erase: pb.Erase) -> None:
        sessions = {SessionKey(s.tenant, s.session_id) for s in erase.sessions}
        self.blocks.erase(erase.keys)
        for request in self._requests.values():
            request.erased = request.erased or request.turn.session in sessions
        for request_id in [r for r, (manifest, _) in self._turns.items() if manifest.session in sessions]:
            del self._turns[request_id]
        if self._warms:
            self.to_warm.extend(encode_forget(session) for session in sessions)

    def validate(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        for load_id, request_id in self._loads.items():
            request = self._requests.get(request_id)
            assert request is None or request.load is None or request.load.load_id == load_id
        for save_id, save in self._saves.items():
            request = self._requests.get(save.request_id)
            assert request is None or save_id in request.saves
            assert 0 < save.waits <= self.ranks
