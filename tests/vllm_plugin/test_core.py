"""The scheduler side's decisions: what vLLM is answered, what the store is asked, and when blocks are free."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from upbeat_vllm.core import ANSWER_S, COMES_S, Core
from upbeat_vllm.orders import LoadOrder, SaveOrder
from upbeat_vllm.state import Turn

from contracts.ids import SessionKey
from contracts.kv import KvShape, chunk_keys
from contracts.v1 import common_pb2
from contracts.v1 import kvstore_pb2 as pb
from contracts.warm_up import decode_warm_up, encode_warm_up, note_of

SIZE = 4
SHAPE = KvShape.of_heads(b"f" * 32, 3, 2, 8, SIZE, "float32")
SALT = b"s" * 32
A = SessionKey("t", "a")


def turn(request_id: str = "r", **more: Any) -> Turn:
    return Turn(request_id, A, SALT, **more)


def end(load_id: int, usable: int) -> pb.StoreToWorker:
    return pb.StoreToWorker(end=pb.LoadEnd(load_id=load_id, usable=usable))


def found(load_id: int, chunks: int, near: bool = True, source: int = 0) -> pb.StoreToWorker:
    return pb.StoreToWorker(found=pb.LoadFound(load_id=load_id, chunks=chunks, near=near, sources=[source] * chunks))


def kinds(core: Core) -> list[str]:
    taken, core.to_store = core.to_store, []
    return [str(m.WhichOneof("kind")) for m in taken]


@pytest.fixture
def core() -> Core:
    made = Core(SHAPE, "m", ranks=2)
    made.here(True)
    return made


TOKENS = list(range(18))  # four full chunks, of which the last token's is computed


def test_the_store_is_asked_once_and_vllm_waits_for_its_answer(core: Core) -> None:
    assert core.match(turn(), TOKENS, 0, 0.0) == (None, False)
    (asked,) = core.to_store
    assert [c.key for c in asked.load.chunks] == chunk_keys(SALT, SHAPE, TOKENS[:16])
    assert core.match(turn(), TOKENS, 0, 0.1) == (None, False)
    assert kinds(core) == ["load"]
    core.hear(found(1, 3), 0.2)
    assert core.match(turn(), TOKENS, 0, 0.2) == (12, False), "in the arena: layer by layer, within the step"


def test_what_has_to_be_fetched_comes_outside_of_steps(core: Core) -> None:
    core.match(turn(), TOKENS, 0, 0.0)
    core.hear(found(1, 4, near=False, source=1), 0.2)
    assert core.match(turn(), TOKENS, 0, 0.2) == (16, True)


def test_without_a_store_or_an_answer_the_request_computes(core: Core) -> None:
    core.match(turn(), TOKENS, 0, 0.0)
    assert core.match(turn(), TOKENS, 0, ANSWER_S) == (0, False)
    assert kinds(core) == ["load", "cancel"]
    core.here(False)
    assert core.match(turn("other"), TOKENS, 0, 9.0) == (0, False)
    assert kinds(core) == []


def test_what_cannot_be_keyed_is_neither_asked_for_nor_saved(core: Core) -> None:
    assert core.match(turn(cacheable=False), TOKENS, 0, 0.0) == (0, False)
    core.scheduled("r", TOKENS, [1, 2, 3, 4, 5], 18)
    assert not core.to_store and not core.take_orders().saves


def test_blocks_that_vllm_has_are_not_loaded_again(core: Core) -> None:
    core.match(turn(), TOKENS, 4, 0.0)
    core.hear(found(1, 3), 0.1)
    assert core.match(turn(), TOKENS, 8, 0.1) == (8, False), "another block of its own meanwhile"
    core.allocated("r", [10, 11, 12, 13, 14], 8)
    assert core.take_orders().loads == [LoadOrder(1, "r", (-1, 12, 13), sync=True)]


def test_when_vllm_has_lost_blocks_meanwhile_the_store_is_asked_again(core: Core) -> None:
    core.match(turn(), TOKENS, 8, 0.0)
    core.hear(found(1, 2), 0.1)
    assert core.match(turn(), TOKENS, 0, 0.1) == (None, False)
    assert kinds(core) == ["load", "load", "cancel"]


def test_a_request_that_gets_no_room_for_a_load_gives_it_up(core: Core) -> None:
    core.match(turn(), TOKENS, 0, 0.0)
    core.hear(found(1, 4), 0.1)
    core.match(turn(), TOKENS, 0, 0.1)
    core.allocated("r", [1, 2], 0)
    assert kinds(core) == ["load", "cancel"] and not core.take_orders().loads


def test_chunks_are_offered_with_the_step_that_completes_them_and_told_when_all_ranks_have_copied(core: Core) -> None:
    core.match(turn(), TOKENS, 0, 0.0)
    core.hear(found(1, 0), 0.1)
    assert core.match(turn(), TOKENS, 0, 0.1) == (0, False)
    core.allocated("r", [1, 2, 3], 0)
    core.scheduled("r", TOKENS, [1, 2, 3], 10)
    assert core.take_orders().saves == [SaveOrder(2, (1, 2))]
    core.scheduled("r", TOKENS, [1, 2, 3, 4, 5], 18)
    assert core.take_orders().saves == [SaveOrder(3, (3, 4))]
    assert core.finished("r", False, 7.0), "its blocks are still copied"
    assert core.take_orders().ending == [("r", (2, 3))]
    kinds(core)
    core.copied(2, [0, 1])
    core.copied(2, [0])
    core.copied(3, [0, 1])
    assert [(list(m.saved.ok), list(m.saved.aborted)) for m in core.to_store] == [([0], [1])]
    core.copied(3, [0, 1])
    assert kinds(core) == ["saved", "saved", "turn"]
    core.validate()


def test_chunks_that_did_not_come_are_offered_when_they_have_been_computed(core: Core) -> None:
    core.match(turn(), TOKENS, 0, 0.0)
    core.hear(found(1, 4), 0.1)
    assert core.match(turn(), TOKENS, 0, 0.1) == (16, False)
    core.allocated("r", [1, 2, 3, 4, 5], 16)
    core.scheduled("r", TOKENS, [1, 2, 3, 4, 5], 18, 16)
    assert not core.take_orders().saves
    core.scheduled("r", TOKENS, [1, 2, 13, 14, 5], 18, 8)
    assert core.take_orders().saves == [SaveOrder(2, (13, 14))]
    core.hear(pb.StoreToWorker(erase=pb.Erase(keys=chunk_keys(SALT, SHAPE, TOKENS[:16])[2:3])), 0.2)
    assert core.blocks.to_evict == {13}, "where it is now"


def test_the_session_is_told_of_what_was_computed_of_the_answer_too(core: Core) -> None:
    core.match(turn(), TOKENS, 0, 0.0)
    core.hear(found(1, 0), 0.1)
    core.match(turn(), TOKENS, 0, 0.1)
    said = [*TOKENS, 90, 91, 92]
    core.scheduled("r", said, [1, 2, 3, 4, 5, 6], 20)
    assert core.finished("r", False, 7.0)
    (save,) = [m.save for m in core.to_store if m.WhichOneof("kind") == "save"]
    assert list(save.keys) == chunk_keys(SALT, SHAPE, said[:20])


def test_a_save_that_the_store_does_not_want_holds_nothing(core: Core) -> None:
    core.match(turn(), TOKENS, 0, 0.0)
    core.hear(found(1, 0), 0.1)
    core.match(turn(), TOKENS, 0, 0.1)
    core.scheduled("r", TOKENS, [1, 2, 3, 4, 5], 18)
    core.hear(pb.StoreToWorker(grant=pb.SaveGrant(save_id=2, held=[0, 1, 2, 3])), 0.2)
    assert not core.finished("r", False, 1.0)
    assert kinds(core)[-1] == "turn"


def test_a_grant_that_comes_too_late_is_given_back(core: Core) -> None:
    core.hear(pb.StoreToWorker(grant=pb.SaveGrant(save_id=9, indices=[0, 2], offsets=[0] * 6)), 0.0)
    (message,) = core.to_store
    assert list(message.saved.aborted) == [0, 2] and not message.saved.ok


def test_preempted_blocks_are_drained_before_they_are_overwritten(core: Core) -> None:
    core.match(turn(), TOKENS, 0, 0.0)
    core.hear(found(1, 0), 0.1)
    core.match(turn(), TOKENS, 0, 0.1)
    core.scheduled("r", TOKENS, [1, 2, 3, 4, 5], 18)
    core.take_orders()
    core.preempted("r")
    assert core.take_orders().drain == [2]
    assert core.match(turn(), TOKENS, 0, 1.0) == (None, False), "what was saved is asked for when it comes back"


def test_an_erased_session_is_evicted_and_not_told_of_again(core: Core) -> None:
    core.match(turn(), TOKENS, 0, 0.0)
    core.hear(found(1, 0), 0.1)
    core.match(turn(), TOKENS, 0, 0.1)
    core.scheduled("r", TOKENS, [1, 2, 3, 4, 5], 18)
    erase = pb.Erase(
        keys=chunk_keys(SALT, SHAPE, TOKENS[:8]), sessions=[common_pb2.Session(tenant="t", session_id="a")]
    )
    core.hear(pb.StoreToWorker(erase=erase), 0.3)
    assert core.blocks.to_evict == {1, 2}
    kinds(core)
    core.copied(2, [0, 1, 2, 3])
    core.copied(2, [0, 1, 2, 3])
    core.finished("r", False, 1.0)
    assert kinds(core) == ["saved"]


def test_what_came_from_the_store_is_evicted_with_its_session_too(core: Core) -> None:
    core.match(turn(), TOKENS, 0, 0.0)
    core.hear(found(1, 4), 0.1)
    assert core.match(turn(), TOKENS, 0, 0.1) == (16, False)
    core.allocated("r", [1, 2, 3, 4, 5], 16)
    core.hear(pb.StoreToWorker(erase=pb.Erase(keys=chunk_keys(SALT, SHAPE, TOKENS[:16])[1:3])), 0.2)
    assert core.blocks.to_evict == {2, 3}


def test_vllm_may_take_less_than_it_was_answered(core: Core) -> None:
    core.match(turn(), TOKENS, 4, 0.0)
    core.hear(found(1, 3), 0.1)
    assert core.match(turn(), TOKENS, 4, 0.1) == (12, False)
    core.allocated("r", [10, 11, 12], 8)
    assert core.take_orders().loads == [LoadOrder(1, "r", (11, 12, -1), sync=True)]


@dataclass
class Machine:
    """Drives a core at random, as vLLM, a store and two ranks would."""

    random: random.Random
    core: Core = field(default_factory=lambda: Core(SHAPE, "m", 2))
    now: float = 0.0
    live: dict[str, list[int]] = field(default_factory=dict)
    loads: list[int] = field(default_factory=list)
    saves: dict[int, int] = field(default_factory=dict)
    kept: dict[str, set[int]] = field(default_factory=dict)

    def step(self) -> None:
        self.now += self.random.random()
        act = self.random.choice(
            (self.submit, self.match, self.match, self.schedule, self.store, self.copy, self.end, self.link)
        )
        act()
        for message in self.core.to_store:
            kind = message.WhichOneof("kind")
            if kind == "load":
                self.loads.append(message.load.load_id)
            elif kind == "save":
                self.saves[message.save.save_id] = 0
        self.core.to_store.clear()
        for request_id, saves in self.core.take_orders().ending:
            self.kept[request_id] = set(saves)
        self.core.validate()

    def submit(self) -> None:
        length = self.random.randrange(1, 30)
        self.live[f"r{self.random.random()}"] = [self.random.randrange(5) for _ in range(length)]

    def one(self) -> str | None:
        return self.random.choice(list(self.live)) if self.live else None

    def match(self) -> None:
        if (request_id := self.one()) is None:
            return
        tokens = self.live[request_id]
        computed = self.random.randrange(0, len(tokens) // SIZE + 1) * SIZE
        count, outside = self.core.match(
            turn(request_id), tokens, min(computed, (len(tokens) - 1) // SIZE * SIZE), self.now
        )
        if count is not None:
            assert 0 <= count < len(tokens) and count % SIZE == 0 and (count or not outside)
            if self.random.random() < 0.5:  # the store does not wait for vLLM
                self.random.choice((self.store, self.link))()
            given = self.random.choice((count, 0))
            self.core.allocated(request_id, list(range(100, 110)), given)
            orders = [order for order in self.core._orders.loads if order.request_id == request_id]
            if given:  # vLLM waits for these blocks, in the way that it was told
                assert [sum(block >= 0 for block in order.blocks) * SIZE for order in orders] == [given]
                assert orders[0].sync is not outside

    def schedule(self) -> None:
        if (request_id := self.one()) is not None:
            tokens = self.live[request_id]
            tokens += [1] * self.random.randrange(3)
            self.core.scheduled(request_id, tokens, list(range(100, 110)), self.random.randrange(len(tokens) + 1))

    def store(self) -> None:
        if self.loads:
            self.core.hear(
                found(self.random.choice(self.loads), self.random.randrange(5), self.random.random() < 0.5), self.now
            )
            self.core.hear(end(self.random.choice(self.loads), self.random.randrange(5)), self.now)
        if self.saves:
            save_id = self.random.choice(list(self.saves))
            self.core.hear(
                pb.StoreToWorker(
                    grant=pb.SaveGrant(save_id=save_id, indices=[0] if self.random.random() < 0.7 else [])
                ),
                self.now,
            )
        if self.loads and self.random.random() < 0.3:
            self.core.loaded(self.random.choice(self.loads), 3, 0.0, 0.1, self.now)

    def copy(self) -> None:
        if self.saves:
            save_id = self.random.choice(list(self.saves))
            self.core.copied(save_id, [0])
            self.saves[save_id] += 1
            if self.saves[save_id] == 2:
                del self.saves[save_id]

    def end(self) -> None:
        if (request_id := self.one()) is None:
            return
        if self.random.random() < 0.3:
            self.core.preempted(request_id)
            return
        del self.live[request_id]
        self.core.finished(request_id, self.core.is_loading(request_id), self.now)

    def link(self) -> None:
        self.core.here(self.random.random() < 0.8, self.random.randrange(20) * SHAPE.chunk_bytes)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_the_invariants_hold_and_nothing_is_held_for_ever(seed: int) -> None:
    machine = Machine(random.Random(seed))
    machine.core.here(True)
    for _ in range(400):
        machine.step()
    for request_id in list(machine.live):
        machine.core.finished(request_id, False, machine.now)
    for save_id, copied in machine.saves.items():
        for _ in range(2 - copied):
            machine.core.copied(save_id, [0])
    assert not machine.core._saves and not machine.core._requests and not machine.core._turns


def offer(keys: int = 4, **more: Any) -> pb.StoreToWorker:
    session = common_pb2.Session(tenant="t", session_id="a")
    given = {"fingerprint": SHAPE.fingerprint, "note": note_of("salt", TOKENS), "expires_s": 3.0} | more
    return pb.StoreToWorker(offer=pb.PrefetchOffer(session=session, keys=[b"k" * 32] * keys, **given))


def test_a_turn_leaves_its_tokens_for_a_hint() -> None:
    core = Core(SHAPE, "m", 1, warms=True)
    core.here(True)
    core.match(turn(cache_salt="salt"), TOKENS, 0, 0.0)
    core.hear(found(1, 0), 0.1)
    core.match(turn(cache_salt="salt"), TOKENS, 0, 0.1)
    core.allocated("r", [1, 2, 3, 4, 5], 0)
    core.scheduled("r", TOKENS, [1, 2, 3, 4, 5], 18)
    core.hear(pb.StoreToWorker(grant=pb.SaveGrant(save_id=2)), 0.2)
    core.finished("r", False, 1.0, TOKENS)
    (told,) = [m.turn.manifest for m in core.to_store if m.WhichOneof("kind") == "turn"]
    warm_up = decode_warm_up(encode_warm_up(A, told.note, 99, 1.0))
    assert (warm_up.cache_salt, list(warm_up.tokens)) == ("salt", TOKENS[:16])


def test_a_warm_up_loads_all_that_is_there_and_leaves_nothing() -> None:
    core = Core(SHAPE, "m", 1, warms=True)
    core.here(True)
    core.choice.prefill_token_s = 1e-9  # computing would be sooner
    core.match(turn(warms=True), TOKENS, 0, 0.0)
    core.hear(found(1, 4), 0.1)
    assert core.match(turn(warms=True), TOKENS, 0, 0.1) == (16, False)
    core.allocated("r", [1, 2, 3, 4, 5], 16)
    core.scheduled("r", TOKENS, [1, 2, 3, 4, 5], 18)
    core.finished("r", False, 1.0, TOKENS)
    assert not core.take_orders().saves and set(kinds(core)) == {"load"}
    assert set(core.blocks._block_of.values()) == {1, 2, 3, 4}, "an erasure finds its blocks"


def test_only_an_offer_with_a_note_of_this_model_reaches_the_sidecar() -> None:
    core = Core(SHAPE, "m", 1, warms=True)
    core.hear(offer(note=b""), 0.0)
    core.hear(offer(fingerprint=b"o" * 32), 0.0)
    assert not core.to_warm
    core.hear(offer(keys=2), 0.0)
    assert list(decode_warm_up(core.to_warm.pop()).tokens) == TOKENS[:8]
    Core(SHAPE, "m", 1).hear(offer(), 0.0)


def load_once(core: Core, request_id: str, waited_s: float, now: float) -> int | None:
    """A request of its own session finds four chunks on the SSD, and loads them if that is worth it. Returns the tokens
    that it loads."""
    given = Turn(request_id, SessionKey("t", request_id), SALT)
    core.match(given, TOKENS, 0, now)
    (load_id,) = core._loads
    core.hear(found(load_id, 4, near=False, source=1), now)
    tokens, _ = core.match(given, TOKENS, 0, now + COMES_S)
    core.allocated(request_id, [1, 2, 3, 4, 5], tokens or 0)
    core.loaded(load_id, 12, waited_s, 0.01, now + waited_s)
    return tokens


def test_where_loads_wait_for_room_requests_compute_until_that_is_forgotten(core: Core) -> None:
    core.choice.prefill_token_s = 0.01
    assert load_once(core, "first", 0.0, 0.0) == 16
    for number in range(5):
        load_once(core, f"waits-{number}", 4.0, 1.0)
    assert load_once(core, "computes", 4.0, 5.0) == 0
    assert load_once(core, "later", 0.0, 99.0) == 16


def test_a_load_may_take_as_long_as_the_prompts_before_it(core: Core) -> None:
    core.choice.prefill_token_s = 0.01
    for number in range(5):
        load_once(core, f"waits-{number}", 0.5, 0.0)
        core.finished(f"waits-{number}", False, 0.0)
    long = list(range(400))
    core.match(turn("long", cacheable=False), long, 0, 1.0)
    core.allocated("long", list(range(100)), 0)
    assert load_once(core, "loads", 0.5, 1.0) == 16, "400 tokens are computed first"
    core.finished("long", False, 2.0)
    core.finished("loads", False, 2.0)
    assert load_once(core, "computes", 0.5, 2.0) == 0


def test_while_others_compute_a_request_waits_without_blocks_for_what_is_on_its_way(core: Core) -> None:
    core.match(turn("computes", cacheable=False), TOKENS, 0, 0.0)
    core.allocated("computes", [9, 10, 11, 12, 13], 0)
    assert core.match(turn("r"), TOKENS, 0, 0.0) == (None, False)
    core.hear(found(1, 4, near=False, source=1), 0.0)
    assert core.match(turn("r"), TOKENS, 0, 0.1) == (None, False)
    core.hear(end(1, 3), 0.2)
    assert core.match(turn("r"), TOKENS, 0, 0.2) == (12, False), "the fourth chunk could not be had"
    core.allocated("r", [1, 2, 3, 4, 5], 12)
    (order,) = core.take_orders().loads
    assert order.sync and order.blocks == (1, 2, 3)


def test_what_vllm_was_told_is_ordered_although_the_store_says_more_or_goes_before_there_are_blocks(
    core: Core,
) -> None:
    for number, happens in enumerate((lambda: core.hear(end(1, 2), 0.1), lambda: core.here(False))):
        name = f"r{number}"
        core.here(True)
        core.match(turn(name), TOKENS, 0, 0.0)
        (load_id,) = core._loads
        core.hear(found(load_id, 4, near=False, source=1), 0.0)
        assert core.match(turn(name), TOKENS, 0, 0.0) == (16, True)
        happens()
        core.allocated(name, [1, 2, 3, 4, 5], 16)
        (order,) = core.take_orders().loads
        assert not order.sync and order.blocks == (1, 2, 3, 4), "the ranks tell vLLM which blocks did not come"
        core.loaded(load_id, 6, 0.0, 0.1, 0.2)
        core.finished(name, False, 1.0)


def test_a_request_that_waits_for_a_store_that_is_gone_computes(core: Core) -> None:
    core.match(turn("r"), TOKENS, 0, 0.0)
    core.here(False)
    core.here(True)
    assert core.match(turn("r"), TOKENS, 0, 0.1) == (0, False)


def test_a_load_of_which_nothing_came_is_given_up_at_once(core: Core) -> None:
    core.match(turn("r"), TOKENS, 0, 0.0)
    core.hear(found(1, 4, near=False, source=1), 0.0)
    core.to_store.clear()
    core.hear(end(1, 0), 6.0)
    assert kinds(core) == ["cancel"] and core.match(turn("r"), TOKENS, 0, 6.0) == (0, False)


def test_a_request_waits_so_only_for_a_while_and_not_while_nothing_computes(core: Core) -> None:
    core.match(turn("r"), TOKENS, 0, 0.0)
    core.hear(found(1, 4, near=False, source=1), 0.0)
    assert core.match(turn("r"), TOKENS, 0, 0.0) == (16, True)
    core.match(turn("computes", cacheable=False), TOKENS, 0, 0.0)
    core.allocated("computes", [9, 10, 11, 12, 13], 0)
    assert core.match(turn("r"), TOKENS, 0, COMES_S - 0.01) == (None, False)
    assert core.match(turn("r"), TOKENS, 0, COMES_S) == (16, True)


def test_nothing_but_loads_goes_on_once_they_are_ordered_and_until_a_request_computes(core: Core) -> None:
    core.match(turn("r"), TOKENS, 0, 0.0)
    core.hear(found(1, 4, near=False, source=1), 0.0)
    assert core.match(turn("r"), TOKENS, 0, 0.0) == (16, True) and not core.only_loads
    core.allocated("r", [1, 2, 3, 4, 5], 16)
    assert not core.only_loads, "the ranks do not know yet"
    core.take_orders()
    assert core.only_loads
    core.match(turn("computes", cacheable=False), TOKENS, 0, 0.0)
    core.allocated("computes", [9, 10, 11, 12, 13], 0)
    assert not core.only_loads
    core.finished("computes", False, 0.0)
    core.loaded(1, 12, 0.0, 0.1, 0.2)
    assert not core.only_loads


def test_loads_of_requests_without_blocks_leave_half_of_the_arena(core: Core) -> None:
    core.here(True, 16 * SHAPE.chunk_bytes)
    names = [f"r{n}" for n in range(4)]

    def asked() -> int:
        core.take_orders()
        for name in names:
            core.match(turn(name), TOKENS, 0, 0.0)
        return len(core._loads)

    assert asked() == 2
    core.hear(found(1, 0), 0.0)
    assert asked() == 2 and core.match(turn("r0"), TOKENS, 0, 0.0) == (0, False), "it has nothing, and the third asks"
    core.hear(found(2, 4), 0.0)
    core.match(turn("r1"), TOKENS, 0, 0.0)
    core.allocated("r1", [1, 2, 3, 4, 5], 16)
    assert asked() == 3, "what is copied into blocks does not count"
    core.validate()


def test_a_load_larger_than_that_is_asked_for_alone_and_in_its_turn(core: Core) -> None:
    core.here(True, 6 * SHAPE.chunk_bytes)
    core.match(turn("small"), TOKENS[:6], 0, 0.0)
    core.match(turn("large"), TOKENS, 0, 0.0)
    core.match(turn("behind"), TOKENS[:6], 0, 0.0)
    assert list(core._loads.values()) == ["small"], "nobody overtakes the large one for ever"
    core.hear(found(1, 0), 0.0)
    core.take_orders()
    for name, tokens in (("small", TOKENS[:6]), ("large", TOKENS), ("behind", TOKENS[:6])):
        core.match(turn(name), tokens, 0, 0.1)
    assert list(core._loads.values()) == ["large"]


def test_the_sidecar_hears_of_an_erased_session() -> None:
    core = Core(SHAPE, "m", 1, warms=True)
    core.hear(pb.StoreToWorker(erase=pb.Erase(sessions=[common_pb2.Session(tenant="t", session_id="a")])), 0.0)
    (message,) = core.to_warm
    assert decode_warm_up(message).session == A and not decode_warm_up(message).tokens
