"""Scheduler side and ranks over a real store: what is saved is loaded again byte for byte, by ranks of any split."""

from __future__ import annotations

import itertools
import secrets
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from upbeat_vllm import wire
from upbeat_vllm.core import Core
from upbeat_vllm.orders import StepOrders
from upbeat_vllm.rank_side import RankSide
from upbeat_vllm.scheduler_side import SchedulerSide
from upbeat_vllm.state import Turn

from contracts.ids import SessionKey
from contracts.kv import KvShape
from runtime import telemetry
from storelink.arena_sharing import arenas_of, is_locked
from tests.kvstore.conftest import Stack

SIZE, LAYERS, HEADS = 16, 4, 4
SHAPE = KvShape.of_heads(b"v" * 32, LAYERS, HEADS, 8, SIZE, "float32")
LOG = telemetry.logger("tests.vllm_plugin")
BLOCKS = 40


class HostBlocks:
    """Blocks of one rank in plain memory."""

    def __init__(self, layers: range, part: int, parts: int, saves: bool = True) -> None:
        self.layers, self.saves = layers, saves
        self.share_bytes = SHAPE.piece_bytes // parts
        self.share_at = part * self.share_bytes
        self.bytes = np.zeros((len(layers), BLOCKS, self.share_bytes), np.uint8)
        self._arena: Any = None

    def adopt(self, arena: memoryview) -> None:
        self._arena = np.frombuffer(arena, np.uint8)

    def computed(self) -> None:
        pass

    def load(self, layer: int, pieces: Sequence[tuple[int, int]]) -> None:
        for block, offset in pieces:
            at = offset + self.share_at
            self.bytes[layer - self.layers.start, block] = self._arena[at : at + self.share_bytes]

    def save(self, layer: int, pieces: Sequence[tuple[int, int]]) -> None:
        for block, offset in pieces:
            at = offset + self.share_at
            self._arena[at : at + self.share_bytes] = self.bytes[layer - self.layers.start, block]


class Engine:
    """A scheduler side and its ranks, driven as vLLM drives a connector."""

    def __init__(self, store: str, blocks: list[HostBlocks], in_flight: int = 1) -> None:
        name = str(uuid.uuid4())
        self.blocks = blocks
        self.core = Core(SHAPE, "m", len(blocks))
        self.side = SchedulerSide(self.core, store, name, "vllm-test", 0, LOG)
        self.ranks = [RankSide(b, LAYERS, name, LOG, in_flight) for b in blocks]
        self.failed: set[int] = set()
        self.reports: Counter[tuple[str, str]] = Counter()
        self.until(lambda: self.core.attached and all(b._arena is not None for b in blocks))

    def until(self, true: Callable[[], Any], limit_s: float = 30.0) -> None:
        end = time.monotonic() + limit_s
        while not true():
            assert time.monotonic() < end, "it did not happen in time"
            time.sleep(0.002)

    def step(self, run: Callable[[], None] = lambda: None) -> None:
        """One step of all ranks: orders, layer by layer, and what they report."""
        with self.side.lock:
            run()
            orders: StepOrders = self.core.take_orders()
            self.side.flush()
        for rank, blocks in zip(self.ranks, self.blocks, strict=True):
            rank.overwrite(orders)
            rank.begin(orders)
            for layer in blocks.layers:
                rank.wait_for_layer(layer)
            rank.computed(orders)
        for rank in self.ranks:
            sent, received, failed = rank.results()
            self.reports.update([("sent", r) for r in sent] + [("received", r) for r in received])
            self.failed |= failed

    def all_report(self, what: str, request_id: str) -> bool:
        """Every rank has said that the request's saves ("sent") or its load ("received") have ended."""
        return self.reports[what, request_id] == len(self.ranks)

    def match(self, turn: Turn, tokens: list[int]) -> tuple[int, bool]:
        found: list[Any] = []

        def ask() -> bool:
            with self.side.lock:
                count, outside = self.core.match(turn, tokens, 0, time.monotonic())
                self.side.flush()
            found[:] = [count, outside]
            return count is not None

        self.until(ask)
        return found[0], found[1]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.side.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store on a busy machine may answer late, and then the prompt is computed (test_core). Here bytes are tested."""
    monkeypatch.setattr("upbeat_vllm.core.ANSWER_S", 30.0)


@pytest.fixture
def stack(make_stack: Callable[..., Stack]) -> Stack:
    made = make_stack(nodes=1)
    made.start(0)
    end = time.monotonic() + 30.0
    while not arenas_of(made.config.node(0).arena_stem):
        assert time.monotonic() < end, made.log(0)
        time.sleep(0.01)
    return made


SPLITS = {
    "one rank": [(range(LAYERS), 0, 1)],
    "tensor parallel": [(range(LAYERS), 0, 2), (range(LAYERS), 1, 2)],
    "pipeline parallel": [(range(2), 0, 1), (range(2, LAYERS), 0, 1)],
    "both": [(range(2), 0, 2), (range(2), 1, 2), (range(2, LAYERS), 0, 2), (range(2, LAYERS), 1, 2)],
}


def turn(request_id: str, salt: bytes) -> Turn:
    return Turn(request_id, SessionKey("t", "s"), salt)


def content(blocks: list[HostBlocks], block: int) -> bytes:
    """A block of all layers, put together from its ranks' shares."""
    layers = []
    for layer in range(LAYERS):
        shares = sorted(
            (b.share_at, b.bytes[layer - b.layers.start, block].tobytes()) for b in blocks if layer in b.layers
        )
        layers.append(b"".join(share for _, share in shares))
    return b"".join(layers)


def saved(engine: Engine, tokens: list[int], salt: bytes) -> dict[int, bytes]:
    """Compute a prompt on this engine, and have it saved; what its blocks hold."""
    rng = np.random.default_rng(1)
    blocks = list(range(3, 3 + len(tokens) // SIZE))
    for share in engine.blocks:
        share.bytes[:] = rng.integers(0, 256, share.bytes.shape, np.uint8)
    assert engine.match(turn("first", salt), tokens) == (0, False)
    with engine.side.lock:
        engine.core.allocated("first", blocks, 0)
    engine.step(lambda: engine.core.scheduled("first", tokens, blocks, len(tokens)))
    with engine.side.lock:
        keep = engine.core.finished("first", False, time.time())
    while keep and not engine.all_report("sent", "first"):
        engine.step()
    engine.until(lambda: not engine.core._saves)
    names = (f"look-{n}" for n in itertools.count())
    engine.until(lambda: engine.match(turn(next(names), salt), tokens)[0] == len(blocks) * SIZE)
    return {block: content(engine.blocks, block) for block in blocks}


@pytest.mark.parametrize(
    "splits", [("one rank", "one rank"), ("tensor parallel", "both"), ("pipeline parallel", "one rank")]
)
@pytest.mark.parametrize("sync", [True, False])
def test_what_one_engine_saved_another_loads_byte_for_byte(stack: Stack, splits: tuple[str, str], sync: bool) -> None:
    salt, tokens = secrets.token_bytes(32), list(range(100, 100 + 5 * SIZE + 3))
    first = Engine(stack.address(0), [HostBlocks(*split) for split in SPLITS[splits[0]]])
    expected = list(saved(first, tokens, salt).values())
    first.close()
    second = Engine(stack.address(0), [HostBlocks(*split) for split in SPLITS[splits[1]]])
    found, _ = second.match(turn("second", salt), tokens)
    assert found == 5 * SIZE
    blocks = [30, 7, 12, 9, 31]
    with second.side.lock:
        second.core._requests["second"].load.near = sync  # type: ignore[union-attr]
        second.core.allocated("second", blocks, found)
    second.step()
    while not sync and not second.all_report("received", "second"):
        second.step()
    assert [content(second.blocks, block) for block in blocks] == expected and not second.failed
    second.until(lambda: not second.core._loads)
    second.close()


def test_copies_that_fail_end_their_load_and_their_save_and_no_thread(stack: Stack) -> None:
    salt, tokens = secrets.token_bytes(32), list(range(100, 100 + 5 * SIZE + 3))
    engine = Engine(stack.address(0), [HostBlocks(range(LAYERS), 0, 1)])
    works, arena = engine.blocks[0], engine.blocks[0]._arena
    works._arena = None
    assert engine.match(turn("lost", salt), tokens) == (0, False)
    with engine.side.lock:
        engine.core.allocated("lost", list(range(3, 8)), 0)
    engine.step(lambda: engine.core.scheduled("lost", tokens, list(range(3, 8)), len(tokens)))
    with engine.side.lock:
        keep = engine.core.finished("lost", False, time.time())  # False: its save has ended already
    while keep and not engine.all_report("sent", "lost"):
        engine.step()
    engine.until(lambda: not engine.core._saves)  # the store hears that they failed before it hears what comes next
    works._arena = arena
    expected = list(saved(engine, tokens, salt).values())
    for name, blocks in (("fails", [20, 21, 22, 23, 24]), ("comes", [30, 27, 26, 29, 31])):
        works._arena = None if name == "fails" else arena
        found, _ = engine.match(turn(name, salt), tokens)
        with engine.side.lock:
            engine.core.allocated(name, blocks, found)
        engine.step()
        while not (engine.failed if name == "fails" else content(engine.blocks, 31) == expected[4]):
            engine.step()
    assert engine.failed == {20, 21, 22, 23, 24}
    assert [content(engine.blocks, block) for block in blocks] == expected
    engine.close()


def test_an_end_that_comes_before_the_order_does_not_overtake_pieces_that_came_earlier(stack: Stack) -> None:
    salt, tokens = secrets.token_bytes(32), list(range(100, 100 + 5 * SIZE + 3))
    engine = Engine(stack.address(0), [HostBlocks(range(LAYERS), 0, 1)])
    expected = list(saved(engine, tokens, salt).values())
    found, _ = engine.match(turn("second", salt), tokens)
    blocks, rank = [30, 27, 22, 29, 31], engine.ranks[0]
    with engine.side.lock:
        load = engine.core._requests["second"].load
        assert load is not None
        load.near = True
        engine.core.allocated("second", blocks, found)
    engine.until(lambda: any(m[0] == wire.END for m in rank._early.get(load.load_id, ())))
    with rank._changed:  # the loads' thread has not come to the last messages
        early = rank._early[load.load_id]
        late = [early.pop() for _ in range(min(2, len(early) - 1))]
        for message in reversed(late):
            rank._work.put(message)
        with engine.side.lock:
            orders = engine.core.take_orders()
        rank.begin(orders)
    for layer in range(LAYERS):
        rank.wait_for_layer(layer)
    rank.computed(orders)
    assert not rank.results()[2]
    assert [content(engine.blocks, block) for block in blocks] == expected
    engine.close()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_what_a_step_computes_from_blocks_that_did_not_come_is_not_saved(stack: Stack, in_flight: int) -> None:
    salt, tokens = secrets.token_bytes(32), list(range(100, 100 + 8 * SIZE))
    engine = Engine(stack.address(0), [HostBlocks(range(LAYERS), 0, 1)], in_flight)
    saved(engine, tokens[: 5 * SIZE + 3], salt)
    found, _ = engine.match(turn("second", salt), tokens)
    assert found == 5 * SIZE
    blocks, rank = list(range(20, 28)), engine.ranks[0]
    with engine.side.lock:
        load = engine.core._requests["second"].load
        assert load is not None
        load.near = True
        engine.core.allocated("second", blocks, found)
    engine.until(lambda: sum(len(m[2]) for m in rank._early.get(load.load_id, ()) if len(m) > 2) == 5 * LAYERS)
    with rank._changed:
        rank._early[load.load_id] = [[wire.END, load.load_id]]
    engine.step(lambda: engine.core.scheduled("second", tokens, blocks, 7 * SIZE, 5 * SIZE))
    assert engine.failed == {20, 21, 22, 23, 24}
    if in_flight == 2:  # scheduled before vLLM has heard of the failure
        engine.step(lambda: engine.core.scheduled("second", tokens, blocks, 8 * SIZE, 7 * SIZE))
    engine.until(lambda: not engine.core._saves)
    assert engine.match(turn("look", salt), [*tokens, 1])[0] == 5 * SIZE, "nothing beyond what was sound"
    engine.step(lambda: engine.core.scheduled("second", tokens, blocks, 8 * SIZE, 0))
    engine.until(lambda: not engine.core._saves)
    names = (f"again-{n}" for n in itertools.count())
    engine.until(lambda: engine.match(turn(next(names), salt), [*tokens, 1])[0] == 8 * SIZE)
    engine.close()


def test_a_store_that_is_killed_costs_the_blocks_that_had_not_come_and_another_start_is_used(stack: Stack) -> None:
    salt, tokens = secrets.token_bytes(32), list(range(100, 100 + 5 * SIZE + 3))
    engine = Engine(stack.address(0), [HostBlocks(range(LAYERS), 0, 1)])
    saved(engine, tokens, salt)
    found, _ = engine.match(turn("second", salt), tokens)
    stack.signal(0, signal.SIGKILL)
    engine.until(lambda: not engine.core.attached)
    with engine.side.lock:
        engine.core.allocated("second", [20, 21, 22, 23, 24], found)
    engine.step()
    assert engine.failed <= {20, 21, 22, 23, 24}
    assert engine.match(turn("third", salt), tokens) == (0, False)
    stack.start(0)
    engine.until(lambda: engine.core.attached, 30.0)
    engine.close()


def test_an_engine_that_is_gone_leaves_nothing_locked(stack: Stack) -> None:
    salt, tokens = secrets.token_bytes(32), list(range(100, 100 + 5 * SIZE + 3))
    (arena,) = arenas_of(stack.config.node(0).arena_stem)
    with arena.open("rb") as file:
        for attachment in (1, 2, 3):
            engine = Engine(stack.address(0), [HostBlocks(range(LAYERS), 0, 1)])
            if attachment == 1:
                saved(engine, tokens, salt)
            assert engine.match(turn("r", salt), tokens)[0] == 5 * SIZE
            assert is_locked(file.fileno(), attachment), "the store lends nothing again that may still be copied"
            engine.close()
            engine.until(lambda attachment=attachment: not is_locked(file.fileno(), attachment))  # type: ignore[misc]
