"""The arena's slots: slabs of granules by model and band, what makes room, and that a reservation without room changes
nothing."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contracts.errors import IllegalTransition
from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from contracts.memory.layer_bands import band_of
from contracts.memory.victim_order import Rank
from kvstore.core.eviction import kind_of, under
from kvstore.core.index import Chunk, Index
from kvstore.core.instructions import Counted, Instruction
from kvstore.core.ledger import GRANULE_BYTES, Ledger, SlotKind, slot_bytes, suitable_granule
from kvstore.core.room import Room
from kvstore.core.sessions import Advice, Sessions
from kvstore.core.state import PieceState
from kvstore.core.usefulness import Usefulness

SLOT = 4096
A, B = SlotKind(b"a", 0, SLOT), SlotKind(b"b", 0, SLOT)


def begin(ledger: Ledger, kinds: list[SlotKind]) -> list[int] | None:
    return ledger.begin(kinds, ["somebody"] * len(kinds), ledger.slab_granules(kinds[0].size)[0])


# ---- the ledger


@pytest.mark.parametrize(
    ("size", "granules"),
    [(5 << 18, 5), (2 << 20, 1), (3 << 20, 3), (16 << 10, 1), (3 << 19, 3), (1 << 20, 1), (7 << 18, 7)],
)
def test_a_slab_is_the_smallest_number_of_granules_that_waste_at_most_a_twentieth(size, granules):
    ledger = Ledger(64 << 30)
    assert ledger.granule_bytes == GRANULE_BYTES
    assert ledger.slab_granules(size)[0] == granules
    assert granules * GRANULE_BYTES % size <= granules * GRANULE_BYTES / 20
    assert all(n * GRANULE_BYTES % size > n * GRANULE_BYTES / 20 for n in range(-(-size // GRANULE_BYTES), granules))


def test_small_arenas_have_small_granules_and_none_is_smaller_than_a_page():
    assert suitable_granule(64 << 30) == suitable_granule(512 << 20) == 2 << 20
    assert suitable_granule(64 << 20) == 256 << 10
    assert suitable_granule(16 * SLOT) == SLOT
    assert not Ledger(SLOT).fits(2 * SLOT) and Ledger(SLOT).fits(SLOT)
    assert not Ledger(100).fits(SLOT)


def test_slots_of_two_models_or_bands_never_share_a_slab():
    ledger = Ledger(8 * SLOT, granule_bytes=2 * SLOT)
    kinds = [A, B, A._replace(band=1), A]
    offsets = begin(ledger, kinds)
    assert offsets is not None
    slabs = [offset // (2 * SLOT) for offset in offsets]
    assert len(set(slabs)) == 3 and slabs[0] == slabs[3]
    ledger.validate()


def test_the_fullest_slab_is_filled_first_so_that_others_empty():
    ledger = Ledger(8 * SLOT, granule_bytes=4 * SLOT)
    offsets = begin(ledger, [A] * 8)
    for offset in offsets:
        ledger.finish(offset)
    first, second = offsets[:4], offsets[4:]
    for offset in [*first[:3], second[0]]:
        ledger.free(offset)
    (again,) = begin(ledger, [A])
    assert again == second[0], "the other slab has three free slots"
    ledger.free(first[3])
    assert ledger.granules.free == 1
    ledger.validate()


def test_a_reservation_over_several_bands_is_all_or_nothing():
    ledger = Ledger(8 * SLOT, granule_bytes=4 * SLOT)
    assert begin(ledger, [A, B, A._replace(band=1)]) is None
    assert begin(ledger, [A] * 9) is None
    assert ledger.used_bytes == 0 and ledger.granules.free == 2
    assert begin(ledger, [A] * 4 + [B] * 4) is not None
    ledger.validate()


def test_an_empty_slabs_granules_go_to_whoever_needs_them_joined_with_their_neighbours():
    ledger = Ledger(6 * SLOT, granule_bytes=SLOT)
    large = SlotKind(b"l", 0, 3 * SLOT)
    small = begin(ledger, [A] * 6)
    assert begin(ledger, [large]) is None
    for offset in sorted(small)[1:4]:
        ledger.abort(offset)
    assert begin(ledger, [large]) == [SLOT]
    ledger.validate()


def test_pinned_and_reserved_slots_cannot_be_freed():
    ledger = Ledger(4 * SLOT)
    (offset,) = begin(ledger, [A])
    with pytest.raises(IllegalTransition):
        ledger.free(offset)
    with pytest.raises(IllegalTransition):
        ledger.pin(offset)
    ledger.finish(offset)
    ledger.pin(offset)
    with pytest.raises(IllegalTransition):
        ledger.free(offset)
    assert ledger.unpin(offset)
    ledger.free(offset)
    with pytest.raises(IllegalTransition):
        ledger.free(offset)
    with pytest.raises(IllegalTransition):
        ledger.finish(1 << 40)


# ---- making room


class Desk:
    """A room with everything that it needs, and chunks put into it by hand."""

    def __init__(self, granules: int, granule_bytes: int = SLOT, *, layer_priority: bool = True) -> None:
        self.index, self.sessions = Index(), Sessions()
        self.ledger = Ledger(granules * granule_bytes, granule_bytes)
        self.out: list[Instruction] = []
        usefulness = Usefulness(self.ledger.arena_bytes)
        self.room = Room(self.index, self.ledger, self.sessions, usefulness, self.out, layer_priority=layer_priority)
        self.now = 100.0
        self.uses = 0

    def session(self, name: str, shape: KvShape, count: int) -> list[Chunk]:
        """A session of `count` chunks, used after all earlier ones."""
        self.uses += 1
        session = SessionKey("t", name)
        keys = [f"{name}{i}".encode().ljust(32) for i in range(count)]
        self.index.set_manifest(Manifest(session, "m", shape.fingerprint, keys, 0, 0.0))
        self.sessions.used(session, float(self.uses))
        chunks = []
        for position, key in enumerate(keys):
            chunk = self.index.chunk(key, shape)
            assert chunk is not None
            chunk.position = position
            chunks.append(chunk)
        return chunks

    def fill(self, chunks: list[Chunk], layers: list[int] | None = None, below: Rank | None = None) -> bool:
        """Bring the chunks' layers; false when there is no room for all of them."""
        for chunk in chunks:
            todo = [layer for layer in layers or range(chunk.shape.layers) if chunk.state(layer) is PieceState.ABSENT]
            if not todo:
                continue
            offsets = self.room.reserve(
                [(chunk, layer) for layer in todo], self.now, below=under(below) if below is not None else None
            )
            if offsets is None:
                return False
            for layer, offset in zip(todo, offsets, strict=True):
                for state in (PieceState.QUEUED, PieceState.LOADING, PieceState.READY):
                    self.index.set_piece(chunk, layer, state, offset)
                self.ledger.finish(offset)
        return True

    def here(self) -> Counter[str]:
        """READY pieces, as "name/layer"."""
        return Counter(
            f"{chunk.key.decode().strip()}/{layer}"
            for chunk in self.index.resident.values()
            for layer, state in enumerate(chunk.states)
            if state is PieceState.READY
        )

    def advise(self, name: str, priority: int = 0) -> None:
        self.sessions.advise(SessionKey("t", name), Advice(priority, self.now, self.now + 60))


def shape(name: bytes, layers: int, pages: int = 1) -> KvShape:
    return KvShape.of_heads(name * 32, layers, 1, 8 * pages, 64, "float32")


def test_the_test_shapes_take_whole_pages():
    assert slot_bytes(shape(b"a", 4).piece_bytes) == SLOT and slot_bytes(shape(b"l", 4, 3).piece_bytes) == 3 * SLOT


def test_a_first_layer_takes_the_place_of_somebodys_last_layers():
    desk = Desk(16, 2 * SLOT)
    old = shape(b"a", 8)  # bands of two layers: a slab holds one band of one chunk
    assert desk.fill(desk.session("a", old, 4))
    assert desk.fill(desk.session("b", old, 1), [0])
    gone = Counter(f"a{i}/{layer}" for i in range(4) for layer in range(8)) - desk.here()
    assert gone == Counter(["a3/7", "a3/6"]), (
        "the last band of the latest chunk, whole, and nothing of the other layers"
    )


def test_purging_last_layers_frees_whole_slabs_that_another_model_takes():
    desk = Desk(16, 2 * SLOT)
    assert desk.fill(desk.session("a", shape(b"a", 8), 4))
    assert desk.fill(desk.session("b", shape(b"b", 4, 2), 1), [0, 1])
    gone = Counter(f"a{i}/{layer}" for i in range(4) for layer in range(8)) - desk.here()
    assert gone == Counter(["a3/7", "a3/6", "a2/7", "a2/6"])
    desk.ledger.validate()


def test_a_slab_of_several_granules_is_made_of_neighbours_that_cost_least():
    desk = Desk(12)
    small = shape(b"a", 4)
    assert desk.fill(desk.session("a", small, 3))
    assert desk.fill(desk.session("l", shape(b"l", 4, 3), 1), [0])
    assert sum(desk.here().values()) == 10
    desk.ledger.validate()


def test_when_no_whole_slab_can_be_had_a_shorter_one_that_wastes_more_is_taken():
    desk = Desk(7, 2 * SLOT)
    # 3 slots' worth fill 3 pages: 3 granules hold two without waste, 2 granules one with a quarter wasted
    uneven = shape(b"u", 4, 3)
    (one,) = desk.session("u", uneven, 1)
    assert desk.ledger.slab_granules(3 * SLOT) == (3, 2)
    assert desk.fill([one], [0]) and desk.fill([one], [1])
    assert desk.ledger.granules.free == 1
    desk.ledger.validate()
    other = Desk(2, 2 * SLOT)
    assert other.fill(other.session("u", uneven, 1), [0]), "an arena that can never hold a whole one"


def test_a_reservation_that_cannot_succeed_evicts_nothing():
    desk = Desk(8)
    (pinned,) = desk.session("a", shape(b"a", 4), 1)
    assert desk.fill([pinned]) and desk.fill(desk.session("b", shape(b"a", 4), 1))
    for offset in pinned.offsets:
        desk.ledger.pin(offset)
    before = desk.here()
    assert not desk.fill(desk.session("c", shape(b"c", 8), 1)), "eight slots, of which four can be had"
    assert desk.here() == before
    assert desk.fill(desk.session("d", shape(b"a", 4), 1))
    assert Counter(name.split("/")[0] for name in desk.here().elements()) == Counter({"a0": 4, "d0": 4})


def test_what_a_live_advisory_protects_goes_only_for_demand():
    desk = Desk(4)
    assert desk.fill(desk.session("a", shape(b"a", 4), 1))
    desk.advise("a")
    new = desk.session("b", shape(b"a", 4), 1)
    assert not desk.fill(new, [0], below=Rank.ADVISED)
    desk.now += 61
    assert desk.fill(new, [0], below=Rank.ADVISED), "the advisory has expired"
    desk.advise("b")
    assert desk.fill(desk.session("c", shape(b"a", 4), 1))


def test_what_nobody_wants_any_more_goes_by_the_slab_so_that_hints_do_not_strew_their_pieces():
    desk = Desk(16, 2 * SLOT)
    model = shape(b"a", 8)  # a slab holds one band of one chunk: two slots
    assert desk.fill(desk.session("a", model, 4))
    desk.sessions.invalidate(SessionKey("t", "a"))
    desk.advise("b")
    assert desk.fill(desk.session("b", model, 4), [7], below=Rank.ADVISED)
    desk.advise("c")
    chunks = desk.session("c", shape(b"c", 8), 4)
    assert desk.fill(chunks[:3], below=Rank.ADVISED)
    assert desk.fill(chunks[3:], [0, 1, 2, 3], below=Rank.ADVISED), (
        "the four pieces of the other hint lie in two slabs, not in four"
    )
    assert not any(name.startswith("a") for name in desk.here())
    desk.ledger.validate()


def test_the_order_follows_when_sessions_change_their_standing_between_two_evictions():
    desk = Desk(8)
    model = shape(b"a", 1)
    for name in "abcdefgh":
        assert desk.fill(desk.session(name, model, 1))
    desk.sessions.used(SessionKey("t", "a"), 50.0)
    assert desk.fill(desk.session("i", model, 1))
    assert "b0/0" not in desk.here() and "a0/0" in desk.here()
    desk.sessions.invalidate(SessionKey("t", "h"))
    assert desk.fill(desk.session("j", model, 1))
    assert "h0/0" not in desk.here() and "c0/0" in desk.here()
    desk.index.drop_manifest(SessionKey("t", "g"))
    assert desk.fill(desk.session("k", model, 1))
    assert "g0/0" not in desk.here() and "c0/0" in desk.here()


# ---- anything, in any order

SHAPES = [shape(b"a", 8), shape(b"b", 4, 2), shape(b"c", 3, 3)]


class RoomMachine(RuleBasedStateMachine):
    """Slots are reserved, filled, pinned and evicted; every eviction is checked against ranking everything anew."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(24, 2 * SLOT)
        self.chunks = [c for i, s in enumerate(SHAPES) for name in "xy" for c in self.desk.session(f"{name}{i}", s, 4)]
        self.pins: list[int] = []
        self.reserved: list[int] = []

    def readable(self) -> list[int]:
        return [
            o
            for c in self.desk.index.resident.values()
            for s, o in zip(c.states, c.offsets, strict=True)
            if s is PieceState.READY
        ]

    @rule(data=st.data(), below=st.sampled_from([None, Rank.ADVISED, Rank.UNADVISED]))
    def bring(self, data: st.DataObject, below: Rank | None) -> None:
        chunk = data.draw(st.sampled_from(self.chunks))
        layers = data.draw(st.lists(st.integers(0, chunk.shape.layers - 1), min_size=1, unique=True))
        before = self.desk.here()
        self.desk.now += 1.0  # after a search in vain the room rests
        came = self.desk.fill([chunk], sorted(layers), below)
        if not came:
            assert self.desk.here() == before, "a reservation that failed evicted something"
            self.check_refusal([(chunk, layer) for layer in layers if chunk.state(layer) is PieceState.ABSENT], below)

    def check_refusal(self, wanted: list[tuple[Chunk, int]], below: Rank | None) -> None:
        """With everything that may go gone, there is still no room. Slabs of several granules that hold what is wanted
        may stay where they are, for one slot, and cut a run of free granules in two: each may cost one new slab."""
        kinds = [kind_of(c, layer) for c, layer in wanted]
        protected = {
            o
            for c in self.desk.index.resident.values()
            for o in c.offsets
            if o >= 0
            and below is not None
            and any(self.desk.sessions.standing(s, self.desk.now).rank >= below for s in self.desk.index.names[c.key])
        }
        kept = {o for o in self.readable() if self.desk.ledger.pinned(o) or o in protected} | set(self.reserved)
        fewest = self.desk.ledger.slab_granules(kinds[0].size)[1]
        taken = {g for o in kept for g in range(self.slab(o).first, self.slab(o).first + self.slab(o).granules)}
        runs = "".join(" " if g in taken else "x" for g in range(self.desk.ledger.granules.count)).split()
        lack = Counter(kinds)
        for o in kept:
            slab = self.slab(o)
            if slab.kind in lack:
                # Free and evictable slots of a slab that stays, counted once.
                lack[slab.kind] -= slab.total if o == min(x for x in kept if self.slab(x) is slab) else 0
                lack[slab.kind] += 1
        per_slab = fewest * self.desk.ledger.granule_bytes // kinds[0].size
        needed = sum(-(-n // per_slab) for n in lack.values() if n > 0)
        stay = (
            {self.slab(o).first for o in set(self.readable()) - kept if self.slab(o).kind in lack} - taken
            if fewest > 1
            else set()
        )
        assert needed + len(stay) > sum(len(run) // fewest for run in runs)

    def slab(self, offset: int):  # type: ignore[no-untyped-def]
        return self.desk.ledger.slab_at(offset)

    @precondition(lambda self: self.readable())
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(self.readable()))
        self.desk.ledger.pin(offset)
        self.pins.append(offset)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.desk.ledger.unpin(self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))))

    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        chunk = Chunk(b"elsewhere".ljust(32), data.draw(st.sampled_from(SHAPES)))
        got = self.desk.room.reserve([(chunk, layer) for layer in range(2)], self.desk.now, below=None)
        self.reserved += got or []

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.desk.ledger.abort(self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1))))

    @rule(name=st.sampled_from("xy"), model=st.integers(0, 2), what=st.sampled_from(["use", "advise", "invalidate"]))
    def stand(self, name: str, model: int, what: str) -> None:
        session = SessionKey("t", f"{name}{model}")
        self.desk.now += 1
        if what == "use":
            self.desk.sessions.used(session, self.desk.now)
        elif what == "advise":
            self.desk.sessions.advise(session, Advice(0, self.desk.now, self.desk.now + 5))
        else:
            self.desk.sessions.invalidate(session)

    @invariant()
    def whole(self) -> None:
        self.desk.ledger.validate()
        self.desk.index.validate()
        for chunk in self.desk.index.resident.values():
            for layer, offset in enumerate(chunk.offsets):
                if offset >= 0:
                    slab = self.slab(offset)
                    assert slab.kind == kind_of(chunk, layer)
                    assert slab.kind.band == band_of(layer, chunk.shape.layers)
                    assert slab.base <= offset and offset + slab.kind.size <= slab.base + slab.granules * 2 * SLOT


TestRoomMachine = RoomMachine.TestCase
TestRoomMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_a_full_arena_of_what_may_not_leave_is_not_looked_through_for_every_chunk_that_comes():
    """A store spent half of its time on that, and answered nobody meanwhile."""
    desk = Desk(128, 64 * SLOT)
    small, large = shape(b"a", 8), shape(b"b", 8, 8)
    assert desk.fill(desk.session("a", small, 1000))
    chunks = list(desk.index.resident.values())
    for chunk in chunks[::8]:  # one in each slab
        desk.ledger.pin(chunk.offsets[0])
        for layer in (2, 4, 6):
            desk.ledger.pin(chunk.offsets[layer])
    desk.out.clear()
    wanted = desk.session("b", large, 50)
    for chunk in wanted:
        desk.now += 0.01
        assert not desk.fill([chunk])
    looked = sum(i.amount for i in desk.out if isinstance(i, Counted) and i.what == "victims_looked_at_in_vain")
    assert 1000 < looked < 10_000, "all once, and not again for each of fifty"
    for chunk in chunks[::8]:
        for layer in (0, 2, 4, 6):
            desk.ledger.unpin(chunk.offsets[layer])
    desk.now += 60
    assert desk.fill(wanted[:1]), "looked for again, and found"
    desk.ledger.validate()


def test_hints_that_find_no_room_do_not_each_look_for_it():
    desk = Desk(128, 64 * SLOT)
    assert desk.fill(desk.session("a", shape(b"a", 8), 1024))
    desk.advise("a")
    desk.out.clear()
    for number in range(50):
        desk.now += 0.001
        assert not desk.fill(desk.session(f"b{number}", shape(b"a", 8), 1), below=Rank.ADVISED)
    looked = [i.amount for i in desk.out if isinstance(i, Counted) and i.what == "victims_looked_at_in_vain"]
    assert len(looked) <= 2
    assert desk.fill(desk.session("c", shape(b"a", 8), 1)), "a request looks at once"


def test_room_is_made_ahead_of_need_but_not_for_hundreds_of_small_pieces_at_once():
    """Others wait while victims are chosen: half a second for 256 of them, on a busy machine."""
    desk = Desk(8192)
    assert desk.fill(desk.session("a", shape(b"a", 8), 1024))
    full = desk.here().total()
    assert desk.fill(desk.session("b", shape(b"a", 8), 1))
    assert 8 < full + 8 - desk.here().total() <= 64
