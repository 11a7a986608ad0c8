"""The production engine in virtual time: its device, loader, store and model are small fakes, and nothing waits.

The model is a hash. A token's KV in a layer is a number that depends on the layer and on all tokens up to it, and the
next token depends on every number of every layer that its pages hold. So a page that is missing, stale or somebody
else's gives other tokens, and what a cold run gives is known without running one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from contracts.frames import StepFrame
from contracts.kv import tenant_salt
from contracts.request import GenerateRequest, Sampling
from runtime.sections import KvSection, WorkerSection
from tests.worker.virtual_model import (
    CHUNK,
    LAYERS,
    NO_WINDOWS,
    SHAPE,
    Granules,
    HashRunner,
    Pages,
    Windows,
    World,
    cold,
)
from tests.worker.virtual_store import VirtualLoader, VirtualStore
from worker.core.block import Block, SaveState
from worker.core.hbm import HbmCache
from worker.core.pages import PagePool
from worker.core.sequence import Sequence
from worker.core.windowed import Windowed
from worker.engine.device_loop import IDLE_S
from worker.engine.engine import Cancel, NativeEngine, Submit
from worker.engine.executor import Executor
from worker.link.loads import LoadTable
from worker.text.codec import TextCodec

CODEC = TextCodec.load(Path(__file__).parents[2] / "models" / "demo")


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

    def __init__(
        self,
        *,
        pages: int = 60,
        store: bool = True,
        layerwise: bool = True,
        world: World | None = None,
        granules: Granules | None = None,
        windows: Windows = NO_WINDOWS,
        **worker: Any,
    ) -> None:
        self.world = world or World()
        self.pages = Pages(pages, granules)
        self.pool = PagePool(pages // LAYERS, LAYERS, LAYERS)
        shape = replace(SHAPE, windows=windows)
        self.cache = HbmCache(self.pool, windowed=Windowed.of(shape))
        self.table = LoadTable(progress=self.world)  # type: ignore[arg-type]
        self.loader = VirtualLoader(self.pages, self.table, self.world)
        salt = tenant_salt(b"s" * 32, "t")
        settings = KvSection(chunk_tokens=CHUNK, layerwise=layerwise, layer_priority=True)
        self.executor = Executor(
            shape, self.pages, self.cache, self.table, self.loader, self.world, settings, lambda tenant: salt  # type: ignore[arg-type]
        )  # fmt: skip
        self.runner = HashRunner(self.pages, self.world, windows=windows)
        self.engine = NativeEngine(self.executor, self.runner, CODEC, set(), "hash", WorkerSection(**worker))
        # As a worker does before it serves.
        self.engine.core.pace.expect_decodes({n: self.runner.step_s + n * self.runner.token_s for n in (1, 8)})
        self.store = VirtualStore(self.world, self.loader)
        self.store.to_engine = self.loader.to_engine = self.engine.inbox.put
        self.executor.link = self.store  # type: ignore[assignment]
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

    def submit(
        self,
        prompt: list[int],
        count: int,
        *,
        session: str = "s",
        priority: int = 0,
        kept: int = 0,
        tenant: str = "t",
        weight: float = 1.0,
        alone: bool = False,
    ) -> str:
        """A greedy request for so many tokens. kept: of its session, as the scheduler believes."""
        name = f"r{len(self.answers)}"
        sampling = Sampling(temperature=0.0, ignore_eos=True, max_tokens=count)
        request = GenerateRequest(
            name,
            tenant,
            session,
            "hash",
            sampling,
            prompt_tokens=prompt,
            priority=priority,
            kept_tokens=kept,
            weight=weight,
            alone=alone,
        )
        self.answers[name] = Answer(prompt, count)
        self.engine.inbox.put(Submit(request, prompt, count, self))
        return name

    def cancel(self, name: str) -> None:
        """The client goes away."""
        self.engine.inbox.put(Cancel(name))

    def sequence(self, name: str) -> Sequence:
        """The sequence of a request that has not ended."""
        return self.engine.core.live[name]

    @property
    def sequences(self) -> list[Sequence]:
        """Of all requests that have not ended."""
        return list(self.engine.core.live.values())

    # ---- time --------------------------------------------------------------------------------------------------
    def turn(self) -> None:
        """One turn of the engine, and every invariant."""
        self.turns += 1
        self.engine.turn()
        self.check()

    def go(self, until: Callable[[], bool] | None = None, *, most_s: float = 3600.0) -> None:
        """Let time pass until `until`, or until all is quiet. Fails when that takes longer than `most_s`."""
        end = self.world.now() + most_s
        while not (until() if until else self._quiet()):
            assert self.world.now() < end, (
                f"nothing more happens; waiting: {[(s.request.request_id, s.state) for s in self.sequences]}"
            )
            if self.engine.core.going_on or not self.engine.inbox.empty():
                self.turn()
            else:
                self.world.next(IDLE_S)
                if self.engine.inbox.empty():
                    self.turn()

    def _quiet(self) -> bool:
        return self.engine.idle and not self.table.open and not self.engine.core.going_on

    # ---- invariants --------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Every page has its reason, and every sequence its blocks."""
        live = self.sequences
        core = self.engine.core
        for block in [
            *(b for s in live for b in s.blocks),
            *self.cache.index.values(),
            *(b for x in core.state.loads.values() for b in x.blocks),
        ]:
            self.blocks[id(block)] = block
        held = np.array([b.pages for b in self.blocks.values()]).reshape(len(self.blocks), self.pool.layers) >= 0
        self.blocks = {at: b for (at, b), some in zip(self.blocks.items(), held.any(axis=1), strict=True) if some}
        core.validate(self.blocks.values())
        pool = self.pool
        assert self.pages.slabs >= set(pool._slabs) - set(pool.to_map), "a page is not mapped"
        for block in self.blocks.values():
            assert block.users or block.moving or block.save is SaveState.WAITING or block.purgeable, (
                "a page is unfreeable"
            )
        if self.runner.steps:
            assert self.runner.steps[-1][1] <= core.state.policy.step_tokens

    def finish(self) -> None:
        """Everything ends; every answer is a cold run's; all of HBM can be had."""
        self.go()
        self.check()
        self.check_answers()
        assert self.cache.make_room(self.pool.total, self.world.now())
        assert self.pool.free == self.pool.total

    def check_answers(self) -> None:
        """Every answer has ended, and is a cold run's."""
        for name, answer in self.answers.items():
            assert answer.end is not None, name
            expected = cold(answer.prompt, answer.count, self.runner.windows)
            assert answer.tokens == expected[: len(answer.tokens)], f"{name} got other tokens"
            assert answer.end != "length" or len(answer.tokens) == answer.count
