"""The core under arbitrary orders of events: whatever workers, peers, tiers and time do, no slot is given out twice,
and every load is told exactly once how it begins and how it ends."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.chunk import UNREAD, stored_bytes
from kvstore.core.store import Store
from kvstore.core.tombstone import Tombstone

SHAPES = [KvShape.of_heads(bytes([i]) * 32, layers, 1, 8 << i, 16, "float32") for i, layers in enumerate((3, 4))]
SESSIONS = [SessionKey("t", name) for name in "abc"]
#: Each session has its chain; the first two keys of sessions a and b are shared, as a common system prompt is.
CHAINS = {
    s: [bytes([99, i]) * 16 if i < 2 and s.session_id != "c" else bytes([ord(s.session_id), i]) * 16 for i in range(6)]
    for s in SESSIONS
}
WORKERS = ["worker-1", "worker-2"]
#: Room for seven chunks of the first model.
SSD_BYTES = 7 * stored_bytes(SHAPES[0])


def shape_of(session: SessionKey) -> KvShape:
    return SHAPES[session.session_id == "c"]


def sums(key: bytes, shape: KvShape) -> tuple[int, ...]:
    return tuple(range(key[0], key[0] + shape.layers))


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        # The tenant may hold eight chunks of the first model; three sessions want more.
        quotas = {"t": 8 * SHAPES[0].chunk_bytes}
        self.store = Store(
            "node-0", 40 * 4096, write_back_limit_bytes=1 << 16, granule_bytes=2 * 4096, quota_bytes=quotas
        )
        self.store.loads.pieces_at_once = 5
        self.now = 0.0
        self.numbers = 0
        self.outstanding: list[do.Instruction] = []  # what the shell is still doing
        self.grants: dict[ev.SaveId, dict[int, tuple[int, ...]]] = {}
        self.leased: dict[ev.LoadId, dict[tuple[int, int], int]] = {}
        self.wanted: dict[ev.LoadId, ev.LoadWanted] = {}
        self.found: dict[ev.LoadId, int] = {}
        self.ended: dict[ev.LoadId, int] = {}
        self.delivered: dict[ev.LoadId, set[tuple[int, int]]] = {}
        self.cancelled: set[ev.LoadId] = set()
        self.taken_back: set[int] = set()
        self.reading: dict[tuple[bytes, int], int] = {}  # piece -> the fetch that reads it, unless it stalled

    # ---- the world

    def busy_slots(self) -> set[int]:
        """Slots that somebody reads or writes at this moment."""
        busy = [o for pieces in self.leased.values() for o in pieces.values()]
        busy += [o for grant in self.grants.values() for offsets in grant.values() for o in offsets]
        for i in self.outstanding:
            if isinstance(i, do.Fetch):
                busy += [p.offset for p in i.pieces]
            elif isinstance(i, do.Sum | do.WriteSsd | do.WriteBlob):
                busy += i.offsets
        return set(busy)

    def send(self, event: ev.Event) -> None:
        for i in self.store.handle(event):
            self.obey(i)

    def obey(self, i: do.Instruction) -> None:
        match i:
            case do.Found():
                assert i.load not in self.found
                self.found[i.load] = i.chunks
            case do.Pieces():
                assert i.load in self.found and i.load not in self.ended
                for chunk, layer, offset, _ in i.pieces:
                    assert (chunk, layer) not in self.delivered.setdefault(i.load, set()), "delivered twice"
                    self.delivered[i.load].add((chunk, layer))
                    self.leased.setdefault(i.load, {})[chunk, layer] = offset
            case do.End():
                assert i.load in self.found and i.load not in self.ended
                assert i.usable <= self.found[i.load]
                self.ended[i.load] = i.usable
                self.check_whole(i)
            case do.Grant():
                event = self.save_event
                assert sorted([*i.indices, *i.held, *i.refused]) == list(range(len(event.keys)))
                assert not self.busy_slots() & set(i.offsets), "granted a slot in use"
                layers = len(i.offsets) // len(i.indices) if i.indices else 0
                cut = {index: i.offsets[n * layers : (n + 1) * layers] for n, index in enumerate(i.indices)}
                if cut:
                    self.grants[i.save] = cut
            case do.Fetch():
                offsets = [p.offset for p in i.pieces]
                assert len(offsets) == len(set(offsets)) and not self.busy_slots() & set(offsets), (
                    "fetched into a slot in use"
                )
                self.outstanding.append(i)
                for p in i.pieces:
                    assert (p.key, p.layer) not in self.reading, "two reads of one piece"
                    self.reading[p.key, p.layer] = i.fetch
            case do.CancelFetch():
                assert any(isinstance(x, do.Fetch) and x.fetch == i.fetch for x in self.outstanding), (
                    "taken back, but not running"
                )
                assert i.fetch not in self.taken_back
                self.taken_back.add(i.fetch)
            case do.Probe() | do.AskPeer() | do.Sum() | do.WriteSsd() | do.WriteBlob() | do.FetchManifest():
                self.outstanding.append(i)
            case _:
                pass

    def check_whole(self, end: do.End) -> None:
        """All wanted pieces of the usable chunks were delivered."""
        event = self.wanted.get(end.load)
        if event is None or event.kind in (ev.LoadKind.PEER, ev.LoadKind.ADVISED):
            return
        every = tuple(range(self.shape(event).layers))
        for index in range(end.usable):
            layers = event.wants[index][1] or every
            assert {(index, layer) for layer in layers} <= self.delivered.get(end.load, set())

    def shape(self, event: ev.LoadWanted) -> KvShape:
        return next(s for s in SHAPES if s.fingerprint == event.fingerprint)

    def later(self, seconds: float) -> float:
        self.now += seconds
        return self.now

    # ---- what happens

    @initialize(read=st.integers(0, 3), listed=st.integers(0, 3))
    def begin(self, read: int, listed: int) -> None:
        if read + listed:
            shape, chain = shape_of(SESSIONS[0]), CHAINS[SESSIONS[0]]
            copies = [ev.FoundCopy(k, shape, sums(k, shape)) for k in chain[:read]]
            self.send(ev.Recovered(copies, [(shape, chain[read : read + listed])]))
        self.send(ev.TierSized("ssd", SSD_BYTES, self.later(0.01)))
        for worker in WORKERS:
            self.send(ev.ShapesDeclared(worker, SHAPES, self.later(0.01)))

    @rule(
        session=st.sampled_from(SESSIONS),
        kind=st.sampled_from([ev.LoadKind.DEMAND, ev.LoadKind.PREFETCH, ev.LoadKind.PEER]),
        owner=st.sampled_from(WORKERS),
        span=st.tuples(st.integers(0, 3), st.integers(1, 6)),
        layers=st.sampled_from([(), (0,), (1, 2)]),
        sources=st.sampled_from([(), ("node-1",), ("node-1", "node-2")]),
        priority=st.integers(-2, 2),
    )
    def load(self, session, kind, owner, span, layers, sources, priority) -> None:  # type: ignore[no-untyped-def]
        self.numbers += 1
        ident = (owner, str(self.numbers))
        wants = [(key, layers) for key in CHAINS[session][span[0] : span[0] + span[1]]]
        sources = () if kind is ev.LoadKind.PEER else sources
        event = ev.LoadWanted(
            ident, kind, session, shape_of(session).fingerprint, wants, sources, priority, self.later(0.01)
        )
        self.wanted[ident] = event
        self.send(event)

    @rule(
        session=st.sampled_from(SESSIONS),
        owner=st.sampled_from(WORKERS),
        span=st.tuples(st.integers(0, 4), st.integers(1, 4)),
        data=st.data(),
    )
    def save(self, session, owner, span, data) -> None:  # type: ignore[no-untyped-def]
        self.numbers += 1
        keys = CHAINS[session][span[0] : span[0] + span[1]]
        self.save_event = ev.SaveWanted(
            (owner, self.numbers), session, shape_of(session).fingerprint, keys, self.later(0.01)
        )
        self.send(self.save_event)

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), ok=st.booleans())
    def finish_save(self, data: st.DataObject, ok: bool) -> None:
        save = data.draw(st.sampled_from(sorted(self.grants)))
        index = data.draw(st.sampled_from(sorted(self.grants[save])))
        del self.grants[save][index]
        if not self.grants[save]:
            del self.grants[save]
        self.send(ev.SaveEnded(save, [index] if ok else [], [] if ok else [index], self.later(0.01)))

    @precondition(lambda self: self.store.unplanned)
    @rule()
    def plan_more(self) -> None:
        self.send(ev.PlanMore(self.later(0.01)))

    @precondition(lambda self: self.outstanding)
    @rule(data=st.data())
    def the_shell_finishes_something(self, data: st.DataObject) -> None:
        i = self.outstanding.pop(data.draw(st.integers(0, len(self.outstanding) - 1)))
        self.finish(i, data)

    def finish(self, i: do.Instruction, data: st.DataObject) -> None:
        now = self.later(0.01)
        match i:
            case do.Fetch() if i.fetch in self.taken_back and data.draw(st.booleans()):
                self.forget(i.fetch)
                came = data.draw(st.integers(0, len(i.pieces)))
                read = {n: 7 for n in range(came) if i.pieces[n].checksum == UNREAD}
                self.send(
                    ev.FetchDone(i.fetch, dict.fromkeys(range(came, len(i.pieces)), ev.Fault.CANCELLED), now, read)
                )
            case do.Fetch():
                self.forget(i.fetch)
                bad = (
                    data.draw(st.lists(st.integers(0, len(i.pieces) - 1), max_size=2))
                    if data.draw(st.integers(0, 3)) == 0
                    else []
                )
                read = {n: 7 for n, p in enumerate(i.pieces) if p.checksum == UNREAD and n not in bad}
                self.send(
                    ev.FetchDone(i.fetch, {b: data.draw(st.sampled_from(list(ev.Fault))) for b in bad}, now, read)
                )
            case do.Probe():
                event = self.wanted.get(i.load)
                shape = self.shape(event) if event else SHAPES[0]
                there = [k for k in i.keys if data.draw(st.booleans())]
                self.send(ev.Probed(i.load, i.keys, [ev.FoundCopy(k, shape, sums(k, shape)) for k in there], now))
            case do.AskPeer():
                self.peer_answers(i, data)
            case do.Sum():
                self.send(ev.Summed(i.key, sums(i.key, i.shape), now))
            case do.WriteSsd():
                outcome, encoded = data.draw(st.sampled_from(list(ev.Wrote))), data.draw(st.sampled_from([0, 4096]))
                self.send(ev.SsdWritten(i.key, outcome, now, (), encoded if outcome is ev.Wrote.OK else 0))
            case do.WriteBlob():
                read = i.checksums or sums(i.key, i.shape)
                self.send(ev.BlobWritten(i.key, data.draw(st.sampled_from(list(ev.Wrote))), now, read))
            case do.FetchManifest():
                manifest = self.manifest(i.session, 6) if data.draw(st.booleans()) else None
                self.send(ev.ManifestFetched(i.session, manifest, now))

    def forget(self, fetch: int) -> None:
        self.reading = {piece: by for piece, by in self.reading.items() if by != fetch}

    def peer_answers(self, ask: do.AskPeer, data: st.DataObject) -> None:
        held = [i for i in range(len(ask.wants)) if data.draw(st.booleans())]
        if data.draw(st.booleans()):
            self.send(ev.PeerHolds(ask.lease, held, self.later(0.01)))
            ready = [
                (i, layer, 4096 * (10 * i + layer), 7)
                for i in held
                for layer in ask.wants[i][1]
                if data.draw(st.integers(0, 4))
            ]
            self.send(ev.PeerReady(ask.lease, ready, self.later(0.01)))
        self.send(ev.PeerEnded(ask.lease, data.draw(st.booleans()), self.later(0.01)))

    @precondition(lambda self: any(isinstance(i, do.Fetch) for i in self.outstanding))
    @rule(data=st.data())
    def a_fetch_stalls(self, data: st.DataObject) -> None:
        fetch = data.draw(st.sampled_from([i.fetch for i in self.outstanding if isinstance(i, do.Fetch)]))
        self.forget(fetch)
        self.send(ev.FetchStalled(fetch, self.later(5)))

    @precondition(lambda self: any(self.leased.values()))
    @rule(data=st.data())
    def pieces_are_taken(self, data: st.DataObject) -> None:
        load = data.draw(st.sampled_from(sorted(ident for ident, pieces in self.leased.items() if pieces)))
        pieces = data.draw(st.lists(st.sampled_from(sorted(self.leased[load])), min_size=1, unique=True))
        for piece in pieces:
            del self.leased[load][piece]
        self.send(ev.PiecesTaken(load, pieces, self.later(0.01)))

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def a_load_is_cancelled(self, data: st.DataObject) -> None:
        load = data.draw(st.sampled_from(sorted(self.wanted)))
        self.cancelled.add(load)
        self.leased.pop(load, None)
        self.send(ev.LoadCancelled(load, self.later(0.01)))

    @rule(worker=st.sampled_from(WORKERS))
    def a_worker_goes(self, worker: str) -> None:
        for load in [ident for ident in self.wanted if ident[0] == worker]:
            self.cancelled.add(load)
            self.leased.pop(load, None)
        for save in [s for s in self.grants if s[0] == worker]:
            del self.grants[save]
        self.send(ev.WorkerGone(worker, self.later(0.01)))

    def manifest(self, session: SessionKey, length: int) -> Manifest:
        return Manifest(session, "m", shape_of(session).fingerprint, CHAINS[session][:length], 16 * length, self.now)

    @rule(session=st.sampled_from(SESSIONS), length=st.integers(0, 6))
    def a_turn_ends(self, session: SessionKey, length: int) -> None:
        self.send(ev.TurnEnded(self.manifest(session, length), self.later(0.01)))

    @rule(
        session=st.sampled_from(SESSIONS),
        sources=st.sampled_from([(), ("node-1",)]),
        arrival=st.sampled_from([0.0, 30.0]),
    )
    def a_hint_comes(self, session: SessionKey, sources: tuple[str, ...], arrival: float) -> None:
        self.send(ev.Advised(session, 0, arrival, arrival + 60, sources, self.later(0.01)))

    @rule(session=st.sampled_from(SESSIONS))
    def a_hint_is_taken_back(self, session: SessionKey) -> None:
        self.send(ev.Invalidated(session, self.later(0.01)))

    @rule(session=st.sampled_from(SESSIONS), blind=st.booleans())
    def a_session_is_erased(self, session: SessionKey, blind: bool) -> None:
        self.send(ev.SessionErased(session, self.later(0.01), blind=blind))

    @rule(sessions=st.sets(st.sampled_from(SESSIONS)), complete=st.booleans())
    def sessions_are_listed(self, sessions: set[SessionKey], complete: bool) -> None:
        found = [self.manifest(s, 6) for s in SESSIONS if s in sessions]
        self.send(ev.ManifestsListed(found, self.later(0.01), complete, self.now))

    @rule(session=st.sampled_from(SESSIONS), there=st.sets(st.integers(0, 5)))
    def chunks_are_listed(self, session: SessionKey, there: set[int]) -> None:
        listed = {CHAINS[session][i] for i in there}
        self.send(ev.BlobListed(shape_of(session).fingerprint, listed, self.later(0.01)))

    @rule(
        session=st.sampled_from(SESSIONS),
        there=st.sets(st.integers(0, 5)),
        number=st.integers(0, 4),
        complete=st.booleans(),
    )
    def a_tombstone_is_read(self, session: SessionKey, there: set[int], number: int, complete: bool) -> None:
        chunks = {CHAINS[session][i]: shape_of(session).fingerprint for i in sorted(there)}
        self.send(ev.TombstonesListed([Tombstone(session, number, chunks)], self.later(0.01), complete))

    @rule(session=st.sampled_from(SESSIONS))
    def an_erasure_ends(self, session: SessionKey) -> None:
        self.send(ev.ErasureSeen(session, self.later(0.01)))
        self.send(ev.ErasureEnded(session, self.later(0.01)))

    @rule(session=st.sampled_from(SESSIONS), number=st.integers(1, 4))
    def an_erasure_is_told_again(self, session: SessionKey, number: int) -> None:
        self.send(ev.SessionErased(session, self.later(0.01), number))

    @rule(worker=st.sampled_from(WORKERS), notice=st.integers(0, 40))
    def a_worker_has_heard(self, worker: str, notice: int) -> None:
        self.send(ev.EraseHeard(worker, notice, self.later(0.01)))

    @rule(session=st.sampled_from(SESSIONS), there=st.sets(st.integers(0, 5)))
    def orphans_are_sought(self, session: SessionKey, there: set[int]) -> None:
        self.send(ev.OrphansSought(self.later(0.01)))
        old = [CHAINS[session][i] for i in sorted(there)]
        self.send(ev.OldChunksListed(shape_of(session).fingerprint[:8], old, self.later(0.01)))

    @rule(seconds=st.sampled_from([0.25, 3.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.send(ev.Tick(self.later(seconds)))

    # ---- what always holds

    @invariant()
    def parts_agree(self) -> None:
        self.store.validate()

    @invariant()
    def the_ssd_stays_within_its_size(self) -> None:
        assert self.store.index.ssd_stored_bytes <= SSD_BYTES

    @invariant()
    def slots_in_use_stay_in_use(self) -> None:
        for pieces in self.leased.values():
            for offset in pieces.values():
                assert self.store.ledger.held(offset) and self.store.ledger.pinned(offset)

    def teardown(self) -> None:
        """When sources stay silent and time passes, every load ends; when owners leave, nothing is left pinned or
        reserved."""
        while self.store.unplanned:
            self.send(ev.PlanMore(self.later(0.01)))
        self.send(ev.Tick(self.later(100)))
        self.send(ev.Tick(self.later(100)))
        for load in set(self.wanted) - self.cancelled:
            assert load in self.ended, (load, self.wanted[load])
        self.leased.clear()
        for save in list(self.grants):
            self.send(ev.SaveEnded(save, [], list(self.grants.pop(save)), self.now))
        for worker in WORKERS:
            self.send(ev.WorkerGone(worker, self.now))
        while self.outstanding:
            for i in [self.outstanding.pop() for _ in range(len(self.outstanding))]:
                match i:
                    case do.Fetch():
                        self.forget(i.fetch)
                        self.send(ev.FetchDone(i.fetch, {}, self.now, dict.fromkeys(range(len(i.pieces)), 7)))
                    case do.Sum():
                        self.send(ev.Summed(i.key, sums(i.key, i.shape), self.now))
                    case do.WriteSsd():
                        self.send(ev.SsdWritten(i.key, ev.Wrote.OK, self.now))
                    case do.WriteBlob():
                        self.send(ev.BlobWritten(i.key, ev.Wrote.OK, self.now, i.checksums or sums(i.key, i.shape)))
        self.store.validate()
        assert not self.store.saves.waiting_bytes
        assert self.store.ledger.idle
        for session in SESSIONS:
            self.send(ev.SessionErased(session, self.now))
        self.store.validate()
        for _ in range(2):
            self.send(ev.OrphansSought(self.now))
        self.store.validate()
        assert not self.store.index.ssd_stored_bytes, "nothing that nobody names stays on the SSD"


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
