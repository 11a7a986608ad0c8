"""The production engine in virtual time: its device, loader, store and model are small fakes, and nothing waits.

The model is a hash. A token's KV in a layer is a number that depends on the layer and on all tokens up to it, and the next token
depends on every number of every layer that its pages hold. So a page that is missing, stale or somebody else's gives other tokens, and
what a cold run gives is known without running one.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from contracts.convert import layers_from_bitmap, session_to_wire
from contracts.frames import StepFrame
from contracts.ids import SessionKey
from contracts.kv import KvShape, leading, tenant_salt
from contracts.request import GenerateRequest, Sampling
from contracts.v1 import kvstore_pb2
from runtime.config import KvSection, WorkerSection
from worker.core import hbm
from worker.core.hbm import Block, HbmCache
from worker.core.pages import PagePool
from worker.core.sequence import Sequence, State
from worker.device import Device
from worker.engine import IDLE_S, Cancel, Engine, Submit
from worker.loads import FromStore, Load, LoadClosed, LoadTable, PiecesCame, Save, SaveCopied, StoreDown, StoreUp
from worker.runner import Slice
from worker.text import TextCodec

CHUNK, LAYERS, VOCABULARY = 4, 3, 256
SHAPE = KvShape(b"f" * 32, LAYERS, 1, 1, CHUNK, "float32")
CODEC = TextCodec.load(Path(__file__).parents[2] / "models" / "demo")
_MIX = (1 << 61) - 1


def _entry(before: int, token: int, layer: int) -> int:
    return (before * 6364136223846793005 + (token + 7) * 1442695040888963407 + layer * 97) % _MIX


def _choice(entries: np.ndarray) -> int:
    """The next token, of KV `[layers, tokens]`."""
    weights = np.arange(1, entries.shape[1] + 1, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(1)
    mixed = int((entries.astype(np.uint64) * weights[None]).sum()) & ((1 << 64) - 1)
    return 3 + (mixed >> 20) % (VOCABULARY - 3)


def cold(prompt: list[int], count: int) -> list[int]:
    """The tokens that follow `prompt`."""
    entries = np.zeros((LAYERS, len(prompt) + count), np.int64)
    tokens = list(prompt)
    for at in range(len(prompt) + count - 1):
        if at >= len(tokens):
            tokens.append(_choice(entries[:, :at]))
        for layer in range(LAYERS):
            entries[layer, at] = _entry(int(entries[layer, at - 1]) if at else 0, tokens[at], layer)
    tokens.append(_choice(entries[:, : len(prompt) + count - 1]))
    return tokens[len(prompt) :]


@dataclass
class World:
    """Virtual time, and what will happen in it. A clock, too."""

    time_s: float = 0.0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: int = 0

    def at(self, delay_s: float, then: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.time_s + delay_s, self._count, then))

    def now(self) -> float:
        return self.time_s

    def wall(self) -> float:
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError("the engine's thread never sleeps by its clock")

    def pass_(self, seconds: float) -> None:
        """Time passes, and everything happens that is due."""
        end = self.time_s + seconds
        while self._events and self._events[0][0] <= end:
            self.time_s, _, then = heapq.heappop(self._events)
            then()
        self.time_s = end

    def next(self, most_s: float) -> None:
        """The next thing happens, or that much time passes."""
        if self._events and self._events[0][0] <= self.time_s + most_s:
            self.time_s, _, then = heapq.heappop(self._events)
            then()
        else:
            self.time_s += most_s

    # A condition whose waits are virtual.
    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def wait(self, timeout: float) -> None:
        self.next(timeout)

    def notify_all(self) -> None:
        return None


class Pages:
    """HBM: a number a token of each page. Stale numbers stay until somebody writes."""

    def __init__(self, pages: int) -> None:
        self.numbers = np.full((pages, CHUNK), -1, np.int64)

    def map_slab(self, slab: int) -> None:
        return None


class HashRunner:
    """Computes steps of the hash model and takes virtual time for it."""

    def __init__(self, pages: Pages, world: World, *, step_s: float = 0.002, token_s: float = 0.001) -> None:
        self.pages, self.world, self.step_s, self.token_s = pages, world, step_s, token_s
        #: (when it ended, tokens) of every step.
        self.steps: list[tuple[float, int]] = []

    def step(self, slices: list[Slice], before_layer: Callable[[int], None], after_layer: Callable[[int], None]) -> torch.Tensor:
        tokens = sum(len(s.tokens) for s in slices)
        seen = [np.zeros((LAYERS, s.start + len(s.tokens)), np.int64) for s in slices]
        for layer in range(LAYERS):
            self.world.pass_((self.step_s + self.token_s * tokens) / LAYERS)
            before_layer(layer)
            for s, entries in zip(slices, seen, strict=True):
                for n, token in enumerate(s.tokens):
                    at = s.start + n
                    before = self.pages.numbers[s.pages[layer, (at - 1) // CHUNK], (at - 1) % CHUNK] if at else 0
                    self.pages.numbers[s.pages[layer, at // CHUNK], at % CHUNK] = _entry(int(before), token, layer)
                entries[layer] = self.pages.numbers[s.pages[layer]].reshape(-1)[: entries.shape[1]]
            after_layer(layer)
        self.steps.append((self.world.now(), tokens))
        wanted = [entries for s, entries in zip(slices, seen, strict=True) if s.want_logits]
        logits = torch.zeros(len(wanted), VOCABULARY)
        for row, entries in enumerate(wanted):
            logits[row, _choice(entries)] = 1.0
        return logits


class VirtualLoader:
    """Copies between pages and arena when their time has come."""

    def __init__(self, pages: Pages, table: LoadTable, world: World) -> None:
        self.pages, self.table, self.world = pages, table, world
        self.to_engine: Callable[[object], None] = lambda event: None
        self.copy_s = 0.001
        self.loaded, self.saved = {"demand": 0, "hint": 0}, 0
        self._offered: dict[int, Save] = {}

    def pieces(self, message: kvstore_pb2.LoadPieces, arena: dict[int, np.ndarray]) -> None:
        load = self.table.open.get(message.load_id)
        if load is None or load.closed:
            return
        load.first_s = load.first_s or self.world.now()
        for chunk, layer, offset in zip(message.chunks, message.layers, message.offsets, strict=True):
            page = int(load.pages[chunk, layer])
            if page >= 0:
                self.pages.numbers[page] = arena[offset]
                load.blocks[chunk].ready[layer] = True
                self.loaded["hint" if load.hint else "demand"] += 1
                load.came += 1
        load.last_s = self.world.now()
        self.to_engine(PiecesCame(message.load_id))

    def end(self, load_id: int) -> None:
        if (load := self.table.open.get(load_id)) is not None:
            self._close(load)

    def _close(self, load: Load) -> None:
        if not load.closed:
            load.closed = True
            self.to_engine(LoadClosed(load))

    def cancel(self, load: Load) -> None:
        self.world.at(self.copy_s, lambda: self._close(load))

    def halt(self, load: Load) -> None:
        load.closed = True

    def offer(self, save: Save) -> None:
        self._offered[save.save_id] = save

    def withdraw(self, save_id: int) -> None:
        if (save := self._offered.pop(save_id, None)) is not None:
            self.to_engine(SaveCopied(save_id, [], [], [], list(range(len(save.pages)))))

    def store_gone(self) -> None:
        for save_id in list(self._offered):
            self.withdraw(save_id)

    def grant(self, grant: kvstore_pb2.SaveGrant, arena: dict[int, np.ndarray], store: VirtualStore) -> None:
        save = self._offered.pop(grant.save_id, None)
        if save is None:
            store.send(kvstore_pb2.WorkerToStore(saved=kvstore_pb2.SaveDone(save_id=grant.save_id, aborted=grant.indices)))
            return
        done = SaveCopied(save.save_id, list(grant.indices), [], list(grant.held), list(grant.refused))

        def copy(layer: int) -> None:
            if layer == LAYERS:
                self.saved += len(done.ok) * LAYERS
                self.to_engine(done)
            elif save.progress is not None and save.progress._computed <= layer:
                self.world.at(0.0005, lambda: copy(layer))
            else:
                for n, index in enumerate(done.ok):
                    arena[grant.offsets[n * LAYERS + layer]] = self.pages.numbers[save.pages[index, layer]].copy()
                self.world.at(self.copy_s * len(done.ok) / LAYERS, lambda: copy(layer + 1))

        copy(0)


class VirtualStore:
    """A store that is a dictionary. Everything it does takes `latency()` seconds; while it hangs nothing is done.

    Arena slots are never reused, so a load that it forgot of when it died copies what was promised.
    """

    def __init__(self, world: World, loader: VirtualLoader) -> None:
        self.world, self.loader = world, loader
        self.to_engine: Callable[[object], None] = lambda event: None
        #: None while it is down. Numbers of a piece by its offset.
        self.arena: dict[int, np.ndarray] | None = None
        self.chunks: dict[bytes, list[int]] = {}
        self.latency: Callable[[], float] = lambda: 0.002
        self.fault: Callable[[bytes, int], bool] = lambda key, layer: False
        self.refuse: Callable[[bytes], bool] = lambda key: False
        self.hangs_until_s = 0.0
        #: What it says of where chunks come from.
        self.source = 0
        self.asked: list[kvstore_pb2.LoadRequest] = []
        self._memory: dict[int, np.ndarray] = {}
        self._life = self._next = 0
        self._grants: dict[int, tuple[list[bytes], dict[int, list[int]]]] = {}
        self._cancelled: set[int] = set()

    def up(self) -> None:
        """It is attached, with what it had."""
        self.arena = self._memory
        self.to_engine(StoreUp())

    def down(self) -> None:
        """It dies, and whatever it was about to do."""
        self._life += 1
        self.arena, self._grants = None, {}
        self.to_engine(StoreDown())

    def hint(self, session: str, keys: list[bytes], expires_s: float) -> None:
        """This session is about to speak."""
        wire = session_to_wire(SessionKey("t", session))
        self._tell(offer=kvstore_pb2.PrefetchOffer(session=wire, fingerprint=SHAPE.fingerprint, keys=keys, expires_s=expires_s))

    def send(self, message: kvstore_pb2.WorkerToStore) -> None:
        """From the engine."""
        self._later(lambda: self._on(message))

    def _later(self, then: Callable[[], None]) -> None:
        life = self._life

        def when_due() -> None:
            if life != self._life or self.arena is None:
                return
            if self.world.now() < self.hangs_until_s:
                self.world.at(self.hangs_until_s - self.world.now(), when_due)
            else:
                then()

        self.world.at(self.latency(), when_due)

    def _tell(self, **kind: Any) -> None:
        self.to_engine(FromStore(kvstore_pb2.StoreToWorker(**kind)))

    def _on(self, message: kvstore_pb2.WorkerToStore) -> None:
        match message.WhichOneof("kind"):
            case "load":
                self.asked.append(message.load)
                self._load(message.load)
            case "cancel":
                self._cancelled.add(message.cancel.load_id)
            case "save":
                self._save(message.save)
            case "saved":
                keys, slots = self._grants.pop(message.saved.save_id, ([], {}))  # else it was its predecessor's
                self.chunks |= {keys[index]: slots[index] for index in message.saved.ok if slots}

    def _load(self, load: kvstore_pb2.LoadRequest) -> None:
        found = leading(c.key in self.chunks for c in load.chunks)
        slots = [self.chunks[c.key] for c in load.chunks[:found]]
        self._tell(found=kvstore_pb2.LoadFound(load_id=load.load_id, chunks=found, sources=[self.source] * found))
        self._layer(load, slots, 0, set())

    def _layer(self, load: kvstore_pb2.LoadRequest, slots: list[list[int]], layer: int, bad: set[int]) -> None:
        if load.load_id in self._cancelled or self.arena is None:
            return
        if layer == LAYERS:
            for i in bad:
                self.chunks.pop(load.chunks[i].key, None)
            self.loader.end(load.load_id)
            return
        pieces = kvstore_pb2.LoadPieces(load_id=load.load_id)
        for i, chunk in enumerate(load.chunks[: len(slots)]):
            if layer in layers_from_bitmap(chunk.layers, LAYERS):
                if self.fault(chunk.key, layer):
                    bad.add(i)
                else:
                    pieces.chunks.append(i)
                    pieces.layers.append(layer)
                    pieces.offsets.append(slots[i][layer])
        if pieces.chunks:
            self.loader.pieces(pieces, self.arena)
        self._later(lambda: self._layer(load, slots, layer + 1, bad))

    def _save(self, save: kvstore_pb2.SaveRequest) -> None:
        grant = kvstore_pb2.SaveGrant(save_id=save.save_id)
        slots: dict[int, list[int]] = {}
        for index, key in enumerate(save.keys):
            if key in self.chunks:
                grant.held.append(index)
            elif self.refuse(key):
                grant.refused.append(index)
            else:
                slots[index] = list(range(self._next, self._next + LAYERS))
                self._next += LAYERS
                grant.indices.append(index)
                grant.offsets.extend(slots[index])
        self._grants[save.save_id] = (list(save.keys), slots)
        assert self.arena is not None
        self.loader.grant(grant, self.arena, self)


@dataclass
class Answer:
    """What a request gave, and when."""

    prompt: list[int]
    count: int
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    cached: int = 0
    end: str | None = None


class VirtualEngine:
    """An engine, its world, and the answers to what was submitted. `check()` is called after every turn."""

    def __init__(self, *, pages: int = 60, store: bool = True, layerwise: bool = True, **worker: Any) -> None:
        self.world = World()
        self.pages = Pages(pages)
        self.pool = PagePool(pages // LAYERS, LAYERS, LAYERS)
        self.cache = HbmCache(self.pool)
        self.table = LoadTable(progress=self.world)  # type: ignore[arg-type]
        self.loader = VirtualLoader(self.pages, self.table, self.world)
        salt = tenant_salt(b"s" * 32, "t")
        settings = KvSection(chunk_tokens=CHUNK, layerwise=layerwise)
        self.device = Device(
            SHAPE, self.pages, self.cache, self.table, self.loader, self.world, settings, lambda tenant: salt  # type: ignore[arg-type]
        )  # fmt: skip
        self.runner = HashRunner(self.pages, self.world)
        self.engine = Engine(self.device, self.runner, CODEC, set(), "hash", WorkerSection(**worker))
        self.store = VirtualStore(self.world, self.loader)
        self.store.to_engine = self.loader.to_engine = self.engine.inbox.put
        self.device.link = self.store  # type: ignore[assignment]
        if store:
            self.store.up()
        self.answers: dict[str, Answer] = {}
        self.blocks: dict[int, Block] = {}
        self.turns = 0

    # ---- the gateway's side ------------------------------------------------------------------------------------
    def put(self, frame: StepFrame) -> None:
        """A stream's end."""
        for failed in frame.failed:
            self.answers[failed.request_id].end = f"refused {failed.error[0]}"
        for output in frame.outputs:
            answer = self.answers[output.request_id]
            answer.tokens += output.tokens
            answer.times_s += [self.world.now()] * len(output.tokens)
            answer.cached = output.cached_tokens
            answer.end = output.finish_reason or answer.end

    def submit(self, prompt: list[int], count: int, *, session: str = "s", priority: int = 0) -> str:
        """A greedy request for so many tokens."""
        name = f"r{len(self.answers)}"
        sampling = Sampling(temperature=0.0, ignore_eos=True, max_tokens=count)
        request = GenerateRequest(name, "t", session, "hash", sampling, prompt_tokens=prompt, priority=priority)
        self.answers[name] = Answer(prompt, count)
        self.engine.inbox.put(Submit(request, prompt, count, self))
        return name

    def cancel(self, name: str) -> None:
        """The client goes away."""
        self.engine.inbox.put(Cancel(name))

    def sequence(self, name: str) -> Sequence:
        """The sequence of a request that has not ended."""
        return self.engine._live[name].sequence

    @property
    def sequences(self) -> list[Sequence]:
        """Of all requests that have not ended."""
        return self.engine._sequences()

    # ---- time --------------------------------------------------------------------------------------------------
    def turn(self) -> None:
        """One turn of the engine, and every invariant."""
        self.turns += 1
        self.engine.turn(block=False)
        self.check()

    def go(self, until: Callable[[], bool] | None = None, *, most_s: float = 3600.0) -> None:
        """Let time pass until `until`, or until all is quiet. Fails when that takes longer than `most_s`."""
        end = self.world.now() + most_s
        while not (until() if until else self._quiet()):
            assert self.world.now() < end, f"nothing more happens; waiting: {[(s.request.request_id, s.state) for s in self.sequences]}"
            if self.engine.going_on or not self.engine.inbox.empty():
                self.turn()
            else:
                self.world.next(IDLE_S)
                if self.engine.inbox.empty():
                    self.turn()

    def _quiet(self) -> bool:
        return self.engine.idle and not self.table.open and not self.engine.going_on

    # ---- invariants --------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Every page has its reason, and every sequence its blocks."""
        live = self.sequences
        used: dict[int, int] = {}
        for s in live:
            for block in s.blocks:
                self.blocks[id(block)] = block
                used[id(block)] = used.get(id(block), 0) + 1
        for block in [*self.cache.index.values(), *(b for load in self.table.open.values() for b in load.blocks)]:
            self.blocks[id(block)] = block
        self.blocks = {at: b for at, b in self.blocks.items() if (b.pages >= 0).any()}
        self.cache.validate(self.blocks.values())
        for at, block in self.blocks.items():
            assert block.users == used.get(at, 0), "a page is held for nobody"
            assert block.users or block.moving or block.save is hbm.Save.WAITING or block.purgeable, "a page is unfreeable"
        assert sum(s.state in (State.RUNNING, State.LOADING) for s in live) <= self.engine.scheduling.settings.max_batch
        for s in live:
            assert len(s.blocks) * CHUNK >= s.computed
            assert s.state is not State.WAITING or not s.blocks
        if self.engine.scheduling.settings.step_tokens and self.runner.steps:
            assert self.runner.steps[-1][1] <= self.engine.scheduling.settings.step_tokens

    def finish(self) -> None:
        """Everything ends; every answer is a cold run's; all of HBM can be had."""
        self.go()
        self.check()
        for name, answer in self.answers.items():
            assert answer.end is not None, name
            expected = cold(answer.prompt, answer.count)
            assert answer.tokens == expected[: len(answer.tokens)], f"{name} got other tokens"
            assert answer.end != "length" or len(answer.tokens) == answer.count
        assert self.cache.make_room(self.pool.total, self.world.now())
        assert self.pool.free == self.pool.total


def random_prompt(dice: random.Random, length: int) -> list[int]:
    """Token ids of the hash model."""
    return [dice.randrange(3, VOCABULARY) for _ in range(length)]
