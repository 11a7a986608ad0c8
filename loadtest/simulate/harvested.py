"""A GPU that decodes and trains at the same time, in virtual time: the production engine's core and choice of splits,
and a trainer. Decides nothing.

It is a decode instance: prompts are computed elsewhere, and their KV is here when a request comes (HARLI, section 8.1).
During a step nothing comes from outside, so a step is computed at its beginning: what inference, units of training and
copies do until it ends. A unit that runs keeps its part of the GPU to its end, also when training is paused.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from loadtest.simulate.contention import DecodeWork, SharedGpu
from loadtest.simulate.costs import NodeKind
from loadtest.simulate.engine import Engine, Shell
from loadtest.simulate.events import Events
from loadtest.simulate.request import Request
from loadtest.simulate.stretch import Stretch
from loadtest.simulate.token_gaps import TokenGaps
from loadtest.simulate.training import Training
from loadtest.simulate.turns import coarse, sequence_of, slabs
from worker.core import events as ev
from worker.core import instructions as do
from worker.core.engine_core import EngineCore
from worker.core.harvest import Split
from worker.core.hbm import HbmCache
from worker.core.pages import PagePool
from worker.core.policy import Policy
from worker.core.sequence import Sequence
from worker.core.state import CoreState

#: A second look at an idle device comes after so long.
_LOOK_S = 0.051
_GRANULE_BYTES = 2 << 20


class Splitting(Protocol):
    """Decides which part trains (`worker.core.harvest.Harvest`, or another system's)."""

    def plan(self, now: float, batch: int, tokens: int, prefill_tokens: int, target_s: float) -> Split: ...
    def stepped(self, now: float, seconds: float) -> None: ...
    def rest(self, now: float) -> Split: ...
    def starved(self, now: float, starved: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class HarvestedKind:
    """A device. shares: parts that it can be divided into. kv_bytes: for KV, and for frozen layers where KV leaves it.
    target_s: of an output token. kept_granules: that frozen layers leave for inference. noise: of a step, the deviation
    of its logarithm. Pieces of KV are coarse."""

    gpu: SharedGpu
    decodes: DecodeWork
    kv_bytes: float
    shares: int = 10
    target_s: float = 0.04
    kept_granules: int = 0
    noise: float = 0.015
    most_running: int = 256

    @property
    def node(self) -> NodeKind:
        """As the engine's parts take it. Prompts cost nothing."""
        shape = self.decodes.shape
        return NodeKind(
            name=self.gpu.device.name,
            model=shape.name,
            shape=coarse(replace(shape, kv_heads=shape.kv_heads // self.decodes.devices).kv_shape(), 1, 64),
            costs=_Decoded(self),
            hbm_bytes=self.kv_bytes,
            dram_bytes=0.0,
            ssd_bytes=0.0,
            dram_bytes_per_s=1.0,
            ssd_bytes_per_s=1.0,
            link_bytes_per_s=1.0,
            blob_bytes_per_s=1.0,
            step_tokens=1 << 20,
            mixed_step_s=0.0,
            max_batch=self.most_running,
        )


class _Decoded:
    """`Costs` of a decode instance alone on its device. Prompts are computed elsewhere."""

    def __init__(self, kind: HarvestedKind) -> None:
        self._kind = kind

    def decode(self, batch: int, context_tokens: float) -> tuple[float, float]:
        """See Costs."""
        gpu, work, more = self._kind.gpu, self._kind.decodes, 64.0 * batch
        seconds, later_s = (
            gpu.step_s(1.0, work.bytes_(tokens), work.flops(batch, tokens)) + work.join_s
            for tokens in (context_tokens, context_tokens + more)
        )
        return seconds, (later_s - seconds) / more

    def mixed_s(self, batch: int, context_tokens: float, prefills: Iterable[tuple[int, int]]) -> float:
        """See Costs."""
        came = list(prefills)
        return self.decode(batch + len(came), context_tokens + sum(count for count, _ in came))[0]

    def prefill_s(self, tokens: int, context_tokens: int) -> float:
        """See Costs."""
        return 1e-9 * tokens


@dataclass(frozen=True, slots=True)
class StepSeen:
    """A step that is over. begin_s: when it began; split: as planned. running: sequences that got a token; tokens:
    their context in all. steady: no unit ran with another part than planned. window: layers; used_bytes: of KV."""

    begin_s: float
    seconds: float
    split: Split
    running: int
    tokens: int
    steady: bool
    window: int
    used_bytes: float


class _Engine(Engine):
    """An engine whose steps take what its device says."""

    step_of: Callable[[int, int], float]
    step_over: Callable[[float, float], object]

    def _begin(self, step: do.Step) -> None:
        batch = step.batch
        seconds = self.step_of(len(batch), sum(len(s.tokens) for s, _ in batch))
        self._step, self._stretch = step, Stretch(self._events.now, 1, seconds)
        self._schedule()

    def _over(self, version: int) -> None:
        if version == self._version and self._step is not None:
            self.step_over(self._events.now, self._stretch.first_s)
        super()._over(version)


class HarvestedGpu:
    """See the module. training: None: it only decodes. seen: called with each step."""

    def __init__(
        self,
        kind: HarvestedKind,
        events: Events,
        splitting: Splitting,
        training: Training | None,
        seed: int = 1,
        seen: Callable[[StepSeen], object] = lambda step: None,
    ) -> None:
        self.kind, self._events, self.splitting, self.training, self._seen = kind, events, splitting, training, seen
        self._dice = random.Random(seed)
        node = kind.node
        policy = Policy(cache=False, max_batch=node.max_batch, max_waiting=1 << 30, step_tokens=node.step_tokens)
        pool = PagePool(*slabs(node), node.shape.layers)
        self.core = EngineCore(CoreState(node.shape, HbmCache(pool), policy, lambda tenant: b"", node.model))
        shell = Shell(lambda asked: None, self._spoke, self._ended, lambda coming: True, self._told)
        self.engine = _Engine(events, node, self.core, shell)
        self.engine.step_of, self.engine.step_over = self._step, self.splitting.stepped
        self.shape = node.shape
        self.gaps = TokenGaps()
        self.outstanding: dict[str, Request] = {}
        self.answered = 0
        #: Until when training is computed.
        self._until_s = 0.0
        #: The last step's duration.
        self._took_s = 0.0
        self._hold_memory()

    # ---- requests ----------------------------------------------------------------------------------------------
    def submit(self, request: Request) -> None:
        """Take a request, whose prompt has been computed. Raises ValueError if it can never fit."""
        size = self.shape.chunk_tokens
        chunks = -(-(request.prompt_tokens + request.answer_tokens) // size)
        if chunks * self.shape.chunk_bytes > self.kind.kv_bytes:
            raise ValueError(f"{request.request_id} does not fit the KV of {self.kind.gpu.device.name}")
        keys = [f"{request.request_id} {chunk}".encode().ljust(32, b"\0") for chunk in range(chunks)]
        self.outstanding[request.request_id] = request
        self.engine.tell(ev.Submitted(sequence_of(request, 0, keys, ())))

    def _spoke(self, sequence: Sequence) -> None:
        self.outstanding[sequence.request.request_id].first_s = self._events.now

    def _told(self, sequences: list[Sequence], count: int) -> None:
        if (later := sum(s.generated > 1 for s in sequences)) > 0:
            self.gaps.add(self._took_s, later)

    def _ended(self, sequence: Sequence) -> None:
        request = self.outstanding.pop(sequence.request.request_id)
        request.end_s = self._events.now
        self.answered += 1
        request.done(request)

    # ---- memory ------------------------------------------------------------------------------------------------
    @property
    def used_bytes(self) -> float:
        """Of KV."""
        pool = self.core.state.cache.pool
        return float(pool.used * pool.pages_per_slab * self.shape.piece_bytes)

    def _hold_memory(self) -> None:
        """Frozen layers have what KV leaves."""
        if self.training is None:
            return
        free = (self.kind.kv_bytes - self.used_bytes) / _GRANULE_BYTES
        self.training.resize(int(free), self.kind.kept_granules)

    # ---- time --------------------------------------------------------------------------------------------------
    def _step(self, running: int, tokens: int) -> float:
        """A step begins. Returns its seconds."""
        now = self._events.now
        self.idle_until(now)
        self._hold_memory()
        self._starved(now)
        split = self.splitting.plan(now, running, tokens, 0, self.kind.target_s)
        training, window = self.training, self.training.window if self.training is not None else None
        steady = training is None or not training.unit.begun or training.unit.part * self.kind.shares == split.training
        layers = window.size if window is not None else 0
        seconds = self._took_s = self._run(split, math.inf, running, tokens)
        self._until_s = now + seconds
        self._seen(StepSeen(now, seconds, split, running, tokens, steady, layers, self.used_bytes))
        return seconds

    def idle_until(self, now: float) -> None:
        """Nothing was decoded since the last step: training had its part."""
        while self._until_s < now - 1e-12 and self.training is not None:
            at = self._until_s
            self._hold_memory()
            self._starved(at)
            until = min(now, at + _LOOK_S)
            self._run(self.splitting.rest(at), until - at, 0, 0)
            self._until_s = until
        self._until_s = max(self._until_s, now)

    def compute(self, split: Split, running: int, tokens: int) -> tuple[float, float]:
        """A step of such sequences, without a request: its seconds, and tokens trained meanwhile."""
        before = self.training.tokens if self.training is not None else 0.0
        seconds = self._run(split, math.inf, running, tokens)
        return seconds, self.training.tokens - before if self.training is not None else 0.0

    def _run(self, split: Split, limit_s: float, running: int, tokens: int) -> float:
        """Compute a step of so many sequences, and training beside it; without any, training for `limit_s`. Returns the
        seconds that it took."""
        gpu, work, shares, training = self.kind.gpu, self.kind.decodes, self.kind.shares, self.training
        noise = self._dice.lognormvariate(0.0, self.kind.noise) if running else 1.0
        bytes_, flops = work.bytes_(tokens), work.flops(running, tokens)
        left, passed_s = 1.0, 0.0
        while True:
            unit = training.unit if training is not None else None
            if training is not None and unit is not None and not unit.begun and split.training and not training.waits:
                training.begin(split.training / shares)
            had = unit.part if unit is not None else 0.0
            asked = gpu.copy_bytes_per_s if training is not None and training.copying else 0.0
            step_s = unit_s = math.inf
            if running:
                step_s = noise * gpu.step_s(min(split.infer / shares, 1 - had), bytes_, flops) + work.join_s
                asked += bytes_ / step_s
            if unit is not None and unit.begun:
                unit_s = gpu.train_s(had, unit.flops)
                asked += gpu.pulled(had, unit.forward)
            slower = gpu.slower(asked)
            step_s, unit_s = step_s * slower, unit_s * slower
            end_s = left * step_s if running else limit_s - passed_s
            ends_s = [end_s]
            if training is not None and unit is not None:
                if unit.begun:
                    ends_s.append(unit.left * unit_s)
                if training.copying:
                    ends_s.append(training.copy_left_s)
            next_s = min(ends_s)
            passed_s += next_s
            left -= next_s / step_s
            if training is not None and unit is not None:
                if unit.begun:
                    if unit.left * unit_s <= next_s:
                        training.ended()
                    else:
                        training.computed(next_s / unit_s)
                training.copied(next_s)
            if next_s >= end_s:
                return passed_s

    def _starved(self, now: float) -> None:
        self.splitting.starved(now, self.training is None or self.training.waits)
