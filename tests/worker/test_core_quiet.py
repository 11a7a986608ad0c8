"""Quiet stretches: an engine's core that is told of many steps at once decides what it decides step by step, whatever
comes meanwhile."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contracts.ids import SessionKey
from contracts.kv import KvShape, chunk_keys
from contracts.request import GenerateRequest, Sampling
from storelink.core.load_plan import LoadRate, Source
from worker.core import events as ev
from worker.core import instructions as do
from worker.core.engine_core import EngineCore
from worker.core.hbm import HbmCache
from worker.core.pages import PagePool
from worker.core.policy import Policy
from worker.core.sequence import Sequence
from worker.core.state import CoreState
from worker.core.windowed import Windowed

LAYERS, CHUNK = 2, 8
SHAPE = KvShape.of_heads(b"f" * 32, LAYERS, 1, 8, CHUNK, "float32")
DECODE_S, PREFILL_TOKEN_S = 0.01, 0.001
#: How long a store takes to say what it has, to bring a layer of two chunks, and to take a save.
FOUND_S, BRINGS_S, TAKES_S = 0.004, 0.0133, 0.0171


@dataclass
class Script:
    """What comes when, and how the engine is set."""

    chunks: int
    policy: Policy
    hold_hinted: bool
    coming: list[tuple[float, Callable[[Shell], None]]]
    windows: tuple[int, ...] = ()


@dataclass
class Shell:
    """A device whose steps take as long as what they hold, and a store with its own times. most: steps told at once."""

    script: Script
    most: int
    now: float = 0.0
    log: list[tuple[Any, ...]] = field(default_factory=list)
    told: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        windowed = Windowed.of(replace(SHAPE, windows=self.script.windows))
        pool = PagePool(self.script.chunks, LAYERS, LAYERS)
        cache = HbmCache(pool, hold_hinted=self.script.hold_hinted, windowed=windowed)
        self.core = EngineCore(CoreState(SHAPE, cache, self.script.policy, lambda tenant: bytes(32), "m"))
        self.core.state.rates.seed(Source.DRAM, LoadRate(0.0, 0.001))
        self.below: set[bytes] = set()
        self.loads: dict[int, do.OpenLoad] = {}
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.number = 0
        self.step: do.Step | None = None
        self.began_s, self.count, self.each_s = 0.0, 0, 0.0
        self.gone: list[str] = []
        self.tell(ev.StoreUp())
        for at_s, comes in self.script.coming:
            self.later(at_s, lambda comes=comes: comes(self))  # type: ignore[misc]

    def later(self, at_s: float, what: Callable[[], None]) -> None:
        self.number += 1
        heapq.heappush(self.due, (at_s, self.number, what))

    # ---- the core is told, and does
    def tell(self, event: ev.Event) -> None:
        self.core.handle(event, self.now)
        self.act()
        if self.step is not None and self.count > 1 and self.core.interrupted():
            self.cut()

    def act(self) -> None:
        for asked in self.core.take():
            if not isinstance(asked, do.Note):
                self.log.append(
                    (round(self.now, 6), type(asked).__name__, getattr(asked, "load_id", getattr(asked, "save_id", 0)))
                )
            match asked:
                case do.OpenLoad():
                    self.loads[asked.load_id] = asked
                    self.later(self.now + FOUND_S, lambda asked=asked: self.found(asked))  # type: ignore[misc]
                case do.HaltLoad(load_id):
                    self.loads.pop(load_id, None)
                case do.OfferSave():
                    self.later(self.now + TAKES_S, lambda asked=asked: self.took(asked))  # type: ignore[misc]
                case do.Refuse():
                    raise AssertionError("nobody is refused here")

    def found(self, load: do.OpenLoad) -> None:
        if load.load_id in self.loads:
            count = next((i for i, key in enumerate(load.keys) if key not in self.below), len(load.keys))
            for layer in range(LAYERS):
                self.later(
                    self.now + BRINGS_S * (layer + 1) * max(count, 1) / 2,
                    lambda layer=layer: self.came(load, layer, count),
                )  # type: ignore[misc]
            self.tell(ev.Found(load.load_id, count, (Source.SSD,) * count))

    def came(self, load: do.OpenLoad, layer: int, count: int) -> None:
        if load.load_id not in self.loads:
            return
        rows = np.array([i for i in range(count) if layer in load.layers[i]], dtype=np.int64)
        self.tell(ev.PiecesCame(load.load_id, rows, np.full(len(rows), layer)))
        if layer == LAYERS - 1 and self.loads.pop(load.load_id, None) is not None:
            self.tell(ev.LoadClosed(load.load_id, int(count > 0), self.now - 0.001, self.now))

    def took(self, save: do.OfferSave) -> None:
        indices = list(range(len(save.keys)))
        if save.keys[0][0] % 16 == 0:
            self.tell(ev.SaveCopied(save.save_id, [], [], [], indices))
        else:
            self.below |= set(save.keys)
            self.tell(ev.SaveCopied(save.save_id, indices, [], [], []))

    # ---- what comes from outside
    def submit(self, name: str, session: str, prompt: int, answer: int, priority: int) -> None:
        tokens = [ord(session)] * prompt
        request = GenerateRequest(name, "t", session, "m", Sampling(), priority=priority)
        self.tell(ev.Submitted(Sequence(request, prompt, tokens, answer, arrival=0)))

    def hint(self, session: str, chunks: int, priority: int, arrival_s: float, expires_s: float) -> None:
        keys = chunk_keys(bytes(32), SHAPE, [ord(session)] * chunks * CHUNK, [])
        there = tuple(keys[: next((i for i, key in enumerate(keys) if key not in self.below), len(keys))])
        self.tell(ev.Offered(SessionKey("t", session), there, priority, arrival_s, expires_s))

    def cancel(self, name: str) -> None:
        """It is told at the end of the step under way."""
        if self.step is None:
            if name in self.core.live:
                self.tell(ev.Cancelled(name))
        else:
            self.gone.append(name)
            self.cut()

    # ---- steps
    def begin(self) -> None:
        self.step = self.core.turn(self.now)
        self.act()
        if self.step is None:
            return
        self.began_s = self.now
        self.count = min(self.core.quiet_steps(self.step), self.most)
        prompts = sum(count for _, count in self.step.batch if count > 1)
        self.each_s = DECODE_S + PREFILL_TOKEN_S * prompts
        if self.core.quiet_s < self.count * self.each_s:
            self.count = max(int(np.ceil(self.core.quiet_s / self.each_s - 1e-9)), 1)

    def cut(self) -> None:
        self.count = min(self.count, int((self.now - self.began_s) / self.each_s + 1e-9) + 1)

    def over(self) -> None:
        step, count = self.step, self.count
        assert step is not None
        void = {
            name
            for name, coming in step.coming.items()
            for each in coming
            if each.load_id not in self.loads and not self.core.live[name].blocks[each.row].complete
        }
        self.step = None
        self.told.append(count)
        for n in range(count):
            names = tuple(s.request.request_id for s, _ in step.batch)
            self.log.append(
                (round(self.began_s + n * self.each_s, 6), "step", names, tuple(each for _, each in step.batch))
            )
        speak = [s for s, each in step.batch if s.computed + each == len(s.tokens) and s.request.request_id not in void]
        tokens = {s.request.request_id: ord(s.request.session_id) for s in speak}
        ended = {s.request.request_id for s in speak if s.generated + count >= s.max_tokens}
        self.tell(ev.Stepped(step.batch, self.each_s, tokens, ended=ended, void=frozenset(void), steps=count))
        self.core.validate()
        gone, self.gone = self.gone, []
        for name in gone:
            self.cancel(name)

    def run(self) -> None:
        while self.now < 60.0:
            if self.step is None:
                self.begin()
            if self.step is not None:
                ends_s = self.began_s + self.count * self.each_s
            else:
                ends_s = self.now if self.core.going_on else self.now + max(self.core.due_in_s(self.now), 1e-6)
            if self.due and self.due[0][0] < ends_s - 1e-9:
                self.now, _, what = heapq.heappop(self.due)
                what()
            elif self.step is not None:
                self.now = ends_s
                self.over()
            elif ends_s > 1e6:
                return
            else:
                self.now = ends_s


def script_of(rng: random.Random) -> Script:
    policy = Policy(
        cache=rng.random() < 0.85,
        layerwise=rng.random() < 0.8,
        load_plan=rng.random() < 0.5,
        max_batch=rng.randint(1, 5),
        step_tokens=rng.choice((16, 64)),
    )
    coming: list[tuple[float, Callable[[Shell], None]]] = []
    priorities = rng.choice(((0,), (0,), (-1, 0, 0)))
    for n in range(rng.randint(3, 24)):
        # No time falls on the end of a step, where the order of two things that are due together would say more than
        # the core.
        at_s = rng.random() * rng.choice((0.5, 3.0)) + 1.7e-4
        args = (f"r{n}", rng.choice("stuvw"), rng.randint(1, 40), rng.randint(1, 60), rng.choice(priorities))
        coming.append((at_s, lambda shell, args=args: shell.submit(*args)))  # type: ignore[misc]
        if rng.random() < 0.15:
            coming.append((at_s + rng.random(), lambda shell, name=f"r{n}": shell.cancel(name)))  # type: ignore[misc]
    for _ in range(rng.randint(0, 8)):
        hint = (
            rng.choice("stuvw"),
            rng.randint(1, 8),
            rng.choice(priorities),
            rng.choice((0.0, 0.8)),
            rng.random() * 2,
        )
        coming.append((rng.random() * 3.0, lambda shell, hint=hint: shell.hint(*hint)))  # type: ignore[misc]
    for what in (ev.Withdrawn, lambda gone: ev.Erased({gone}, ())):
        if rng.random() < 0.4:
            event = what(SessionKey("t", rng.choice("stuvw")))
            coming.append((rng.random() * 3.0, lambda shell, event=event: shell.tell(event)))  # type: ignore[misc]
    coming.sort(key=lambda each: each[0])
    return Script(rng.randint(14, 30), policy, rng.random() < 0.2, coming)


def both(seed: int, windows: tuple[int, ...] = ()) -> tuple[Shell, Shell]:
    shells = tuple(Shell(replace(script_of(random.Random(seed)), windows=windows), most) for most in (1, 10_000))
    for shell in shells:
        shell.run()
        assert not shell.core.live, "everybody is served"
    return shells  # type: ignore[return-value]


@given(seed=st.integers(0, 2**32), windows=st.sampled_from([(), (), (11, 0)]))
@example(seed=1900183, windows=())  # a load of a hint ended in a stretch
@settings(max_examples=60)
def test_many_steps_told_at_once_decide_what_they_decide_one_by_one(seed: int, windows: tuple[int, ...]) -> None:
    single, quiet = both(seed, windows)
    # A stretch is written down at its end.
    logs = (sorted(shell.log, key=lambda entry: (entry[0], entry[1] == "step")) for shell in (single, quiet))
    for n, (one, many) in enumerate(zip_longest(*logs)):
        assert one == many, f"decision {n}"


def test_most_steps_are_quiet_also_while_somebody_waits() -> None:
    """Four run and as many as fit; all others wait for a place, for long."""
    waiting = [(0.0001 * n, lambda shell, n=n: shell.submit(f"r{n}", "s", 4, 200, 0)) for n in range(40)]  # type: ignore[misc]
    shell = Shell(Script(400, Policy(max_batch=4, cache=False), False, list(waiting)), 10_000)
    shell.run()
    assert not shell.core.live and sum(shell.told) > 3.5 * len(shell.told)
