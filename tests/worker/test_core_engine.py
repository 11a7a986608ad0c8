"""The engine's core alone: what it asks for when something happens, and that its sums hold whatever happens, in any
order."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contracts.ids import SessionKey
from contracts.kv import KvShape, chunk_keys
from contracts.request import GenerateRequest, Sampling
from storelink.core.load_plan import Source
from worker.core import events as ev
from worker.core import instructions as do
from worker.core.block import SaveState
from worker.core.engine_core import EngineCore
from worker.core.hbm import HbmCache
from worker.core.pages import PagePool
from worker.core.policy import Policy
from worker.core.sequence import Sequence, State
from worker.core.state import CoreState

LAYERS, CHUNK = 2, 4
SHAPE = KvShape.of_heads(b"f" * 32, LAYERS, 1, 8, CHUNK, "float32")
SALT = bytes(32)


def core_of(chunks: int = 12, **policy: Any) -> EngineCore:
    cache = HbmCache(PagePool(chunks, LAYERS, LAYERS))
    return EngineCore(CoreState(SHAPE, cache, Policy(**policy), lambda tenant: SALT, "m"))


def sequence(name: str, tokens: list[int], count: int = 3, session: str = "s") -> Sequence:
    request = GenerateRequest(name, "t", session, "m", Sampling())
    return Sequence(request, len(tokens), list(tokens), count, arrival=0)


def done(step: do.Step, **more: Any) -> ev.Stepped:
    """The step ran, and everybody who could speak did; an answer ends when it is as long as it may be."""
    speaks = [s for s, count in step.batch if s.computed + count == len(s.tokens)]
    tokens = {s.request.request_id: 7 for s in speaks}
    ended = {s.request.request_id for s in speaks if s.generated + 1 >= s.max_tokens}
    return ev.Stepped(step.batch, 0.01, tokens, ended=ended, **more)


def named(core: EngineCore) -> list[str]:
    return [type(asked).__name__ for asked in core.take()]


PROMPT = list(range(10, 20))  # two chunks and a half


def test_a_turn_is_asked_for_computed_saved_and_named() -> None:
    core = core_of(load_plan=False)
    core.handle(ev.StoreUp(), 0.0)
    core.handle(ev.Submitted(sequence("a", PROMPT, 1)), 0.0)
    assert core.turn(0.0) is None
    [mapped, load] = core.take()
    assert isinstance(mapped, do.MapSlabs) and isinstance(load, do.OpenLoad), (
        "memory is there before anybody copies into it"
    )
    core.handle(ev.Found(load.load_id, 0, ()), 0.001)
    core.handle(ev.LoadClosed(load.load_id, 0, 0.0, 0.0), 0.001)
    step = core.turn(0.001)
    assert step is not None and [(s.request.request_id, count) for s, count in step.batch] == [("a", len(PROMPT))]
    [save] = [asked for asked in core.take() if isinstance(asked, do.OfferSave)]
    assert (save.keys, save.ahead, step.ahead) == (chunk_keys(SALT, SHAPE, PROMPT[:8]), True, True)
    core.handle(done(step), 0.01)
    [timed] = core.take()
    assert isinstance(timed, do.Timed) and not core.live, "its name waits for its last chunk"
    core.handle(ev.SaveCopied(save.save_id, [0, 1], [], [], []), 0.02)
    saved, named = core.take()
    assert saved == do.Saved(save.save_id, [0, 1], []) and isinstance(named, do.TurnEnded)
    assert (named.manifest.keys, named.manifest.tokens, named.ended_s) == (save.keys, 8, 0.01)


def test_what_the_store_has_is_waited_for_layer_by_layer_and_the_rest_is_computed() -> None:
    core = core_of(load_plan=False)
    core.handle(ev.StoreUp(), 0.0)
    core.handle(ev.Submitted(sequence("a", PROMPT)), 0.0)
    assert core.turn(0.0) is None
    load = next(asked for asked in core.take() if isinstance(asked, do.OpenLoad))
    assert (load.keys, load.hint) == (chunk_keys(SALT, SHAPE, PROMPT[:8]), False)
    assert load.pages.shape == (2, LAYERS) and (load.pages >= 0).all()
    core.handle(ev.Found(load.load_id, 2, (Source.DRAM, Source.DRAM)), 0.001)
    assert core.turn(0.001) is None, "nothing is here"
    core.handle(ev.PiecesCame(load.load_id, np.array([0, 1]), np.array([0, 0])), 0.002)
    step = core.turn(0.002)
    assert step is not None, "the first layer is here, and the second will be in time"
    assert step.coming == {
        "a": [do.Coming(load.load_id, 0, frozenset({1})), do.Coming(load.load_id, 1, frozenset({1}))]
    }
    assert [count for _, count in step.batch] == [2]
    core.handle(ev.PiecesCame(load.load_id, np.array([0, 1]), np.array([1, 1])), 0.003)
    core.handle(done(step), 0.004)
    assert core.live["a"].cached == 8 and core.live["a"].generated == 1
    core.validate()


def test_layers_that_do_not_come_void_the_part_and_it_starts_again_without_them() -> None:
    core = core_of(load_plan=False)
    core.handle(ev.StoreUp(), 0.0)
    core.handle(ev.Submitted(sequence("a", PROMPT)), 0.0)
    core.turn(0.0)
    load = next(asked for asked in core.take() if isinstance(asked, do.OpenLoad))
    core.handle(ev.Found(load.load_id, 2, (Source.DRAM, Source.DRAM)), 0.001)
    core.handle(ev.PiecesCame(load.load_id, np.array([0, 1]), np.array([0, 0])), 0.002)
    step = core.turn(0.002)
    assert step is not None
    core.handle(ev.LoadClosed(load.load_id, 2, 0.001, 0.002), 0.003)
    core.handle(ev.Stepped(step.batch, 0.01, void={"a"}), 0.004) if core.live["a"].state is State.RUNNING else None
    assert core.live["a"].state is State.WAITING and core.live["a"].losses >= 1
    core.validate()


def test_a_load_that_is_given_up_is_halted_before_its_pages_are_anybody_elses() -> None:
    core = core_of(load_plan=False)
    core.handle(ev.StoreUp(), 0.0)
    core.handle(ev.Submitted(sequence("a", PROMPT)), 0.0)
    core.turn(0.0)
    load = next(asked for asked in core.take() if isinstance(asked, do.OpenLoad))
    core.handle(ev.Cancelled("a"), 0.1)
    assert do.HaltLoad(load.load_id) in core.take() and core.state.cache.pool.free == core.state.cache.pool.total
    core.handle(ev.PiecesCame(load.load_id, np.array([0]), np.array([0])), 0.2)  # it was on its way
    core.handle(ev.LoadClosed(load.load_id, 1, 0.1, 0.1), 0.2)
    core.validate()


def test_a_request_that_waits_for_memory_leaves_what_a_hint_brings_of_its_prompt_alone() -> None:
    core = core_of(chunks=8, load_plan=False)
    core.handle(ev.Submitted(sequence("here", PROMPT[::-1], 3)), 0.0)
    step = core.turn(0.0)
    assert step is not None
    core.take()
    core.handle(ev.StoreUp(), 0.0)
    hinted = chunk_keys(SALT, SHAPE, PROMPT[:8])
    core.handle(ev.Offered(SessionKey("t", "hinted"), tuple(hinted), 0, 0.0, 60.0), 0.0)
    core.handle(done(step), 0.01)
    assert core.turn(0.01) is not None
    brought = [asked for asked in core.take() if isinstance(asked, do.OpenLoad)]
    assert {key for load in brought for key in load.keys} == set(hinted)
    core.handle(ev.Submitted(sequence("large", PROMPT[:8] + [9] * 12, session="t")), 0.011)
    for load in brought:
        core.handle(ev.Found(load.load_id, len(load.keys), (Source.DRAM,) * len(load.keys)), 0.02)
        assert core.turn(0.02) is not None and core.live["large"].state is State.WAITING
        assert not core.take(), "no load is given up, so none is asked for again"
    core.validate()


def test_who_cannot_wait_is_refused_and_nothing_is_kept_of_it() -> None:
    core = core_of(max_waiting=1)
    for name in ("a", "b", "c"):
        core.handle(ev.Submitted(sequence(name, PROMPT)), 0.0)
    refused = [asked for asked in core.take() if isinstance(asked, do.Refuse)]
    assert refused and all(asked.full for asked in refused) and len(core.live) == 3 - len(refused)


def test_a_quiet_stretch_ends_where_a_chunk_is_full_or_an_answer_ends() -> None:
    core = core_of(cache=False)
    core.handle(ev.Submitted(sequence("a", list(range(6)), 30)), 0.0)
    step = core.turn(0.0)
    assert step is not None
    core.handle(done(step), 0.01)
    step = core.turn(0.01)
    assert step is not None and core.quiet_steps(step) == CHUNK - 6 % CHUNK
    core.handle(ev.Stepped(step.batch, 0.01, {"a": 7}, steps=2), 0.03)
    assert core.live["a"].computed == 8 and core.live["a"].generated == 3
    core.handle(ev.Submitted(sequence("b", list(range(6)), 3)), 0.03)
    assert core.interrupted()
    core.validate()


class Machine:
    """A store and a device that do what they are asked for, late, in part, or not at all."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.now = rng, 0.0
        self.core = core_of(
            chunks=rng.randint(6, 14),
            max_batch=rng.randint(1, 4),
            step_tokens=rng.choice((4, 16)),
            load_plan=rng.random() < 0.5,
        )
        self.loads: dict[int, do.OpenLoad] = {}
        self.saves: dict[int, do.OfferSave] = {}
        self.step: do.Step | None = None
        self.below: set[bytes] = set()
        self.names = 0

    def tell(self, event: ev.Event) -> None:
        self.now += self.rng.random() * 0.01
        self.core.handle(event, self.now)
        self.act()

    def act(self) -> None:
        for asked in self.core.take():
            match asked:
                case do.OpenLoad():
                    self.loads[asked.load_id] = asked
                case do.HaltLoad(load_id):
                    del self.loads[load_id]
                case do.OfferSave():
                    self.saves[asked.save_id] = asked
                case do.WithdrawAllSaves():
                    for save_id in list(self.saves):
                        self.copied(save_id, taken=False)
                case do.WithdrawSave(save_id) if save_id in self.saves:
                    self.copied(save_id, taken=False)
        self.core.validate()

    def copied(self, save_id: int, taken: bool) -> None:
        save = self.saves.pop(save_id)
        indices = list(range(len(save.keys)))
        self.below |= set(save.keys) if taken else set()
        self.tell(ev.SaveCopied(save_id, indices if taken else [], [], [], [] if taken else indices))

    # ---- what may happen
    def submit(self) -> None:
        self.names += 1
        session = self.rng.choice("xyz")
        tokens = [ord(session)] * self.rng.randint(1, 14)
        self.tell(ev.Submitted(sequence(f"r{self.names}", tokens, self.rng.randint(1, 6), session)))

    def cancel(self) -> None:
        if self.core.live and self.step is None:
            self.tell(ev.Cancelled(self.rng.choice(list(self.core.live))))

    def turn(self) -> None:
        if self.step is None:
            self.step = self.core.turn(self.now)
            self.act()

    def stepped(self) -> None:
        if self.step is not None:
            step, self.step = self.step, None
            void = frozenset(r for r in step.coming if self.rng.random() < 0.3)
            failed = frozenset(s.request.request_id for s, _ in step.batch if self.rng.random() < 0.05) - void
            doubtful = (
                frozenset(s.request.request_id for s, _ in step.batch if self.rng.random() < 0.05) - void - failed
            )
            event = done(step)
            lost = void | failed | doubtful
            tokens = {r: t for r, t in event.tokens.items() if r not in lost}
            self.tell(
                ev.Stepped(
                    step.batch, 0.01, tokens, ended=event.ended - lost, failed=failed, void=void, doubtful=doubtful
                )
            )

    def found(self) -> None:
        if self.loads:
            load = self.rng.choice(list(self.loads.values()))
            count = 0
            while count < len(load.keys) and load.keys[count] in self.below:
                count += 1
            self.tell(ev.Found(load.load_id, count, (Source.SSD,) * count))

    def came(self) -> None:
        if self.loads:
            load = self.rng.choice(list(self.loads.values()))
            wanted = np.argwhere(load.pages >= 0)
            some = wanted[[self.rng.randrange(len(wanted)) for _ in range(self.rng.randint(1, 4))]]
            self.tell(ev.PiecesCame(load.load_id, some[:, 0], some[:, 1]))

    def closed(self) -> None:
        if self.loads:
            load_id = self.rng.choice(list(self.loads))
            del self.loads[load_id]
            self.tell(ev.LoadClosed(load_id, 1, self.now, self.now))

    def granted(self) -> None:
        if self.saves and self.step is None:
            self.copied(self.rng.choice(list(self.saves)), self.rng.random() < 0.8)

    def store(self) -> None:
        if self.core.state.attached and self.rng.random() < 0.3:
            self.tell(ev.StoreDown())
            for load_id in list(self.loads):
                del self.loads[load_id]
                self.tell(ev.LoadClosed(load_id, 0, 0.0, 0.0))
        else:
            self.tell(ev.StoreUp())

    def hint(self) -> None:
        session, keys = self.rng.choice("xyz"), list(self.below)[:3]
        self.tell(ev.Offered(SessionKey("t", session), tuple(keys), self.rng.randint(-1, 1), 0.0, self.rng.random()))

    def void(self) -> None:
        self.tell(ev.Withdrawn(SessionKey("t", self.rng.choice("xyz"))))

    def erase(self) -> None:
        gone = tuple(key for key in self.below if self.rng.random() < 0.5)
        self.below -= set(gone)
        self.tell(ev.Erased({SessionKey("t", self.rng.choice("xyz"))}, gone))

    def end(self) -> None:
        """Everything ends, and all of HBM can be had."""
        for _ in range(2_000):
            if not self.core.live and not self.loads and not self.saves and self.step is None and self.core.quiet:
                break
            for load_id in list(self.loads):
                del self.loads[load_id]
                self.tell(ev.LoadClosed(load_id, 0, 0.0, 0.0))
            self.stepped()
            for save_id in list(self.saves):
                self.copied(save_id, taken=True)
            self.now += 11.0  # what nobody answers is given up
            self.turn()
        assert not self.core.live and not self.saves and self.core.quiet
        self.core.state.now += 1e6
        cache = self.core.state.cache
        assert all(block.save is not SaveState.WAITING for block in cache.index.values())
        assert cache.make_room(cache.pool.total, self.now + 1e6)


@given(seed=st.integers(0, 2**32))
@example(seed=728877003)  # a block that another request gives up while a step computes it
@example(seed=1127173836)
@settings(max_examples=150)
def test_whatever_happens_the_sums_hold_and_everything_ends(seed: int) -> None:
    rng = random.Random(seed)
    machine = Machine(rng)
    may: list[Callable[[], None]] = [
        machine.submit, machine.submit, machine.turn, machine.turn, machine.stepped, machine.stepped, machine.found,
        machine.came,
        machine.came, machine.closed, machine.granted, machine.granted, machine.cancel, machine.store, machine.hint,
        machine.void,
        machine.erase,
    ]  # fmt: skip
    machine.tell(ev.StoreUp())
    for _ in range(rng.randint(10, 120)):
        rng.choice(may)()
    machine.end()


def test_an_event_of_a_load_that_nobody_knows_changes_nothing() -> None:
    core = core_of()
    core.handle(ev.Found(99, 3, (Source.DRAM,) * 3), 0.0)
    core.handle(ev.PiecesCame(99, np.array([0]), np.array([0])), 0.0)
    core.handle(ev.LoadClosed(99, 0, 0.0, 0.0), 0.0)
    assert named(core) == []
    with pytest.raises(KeyError):
        core.handle(ev.SaveCopied(99, [], [], [], []), 0.0)
