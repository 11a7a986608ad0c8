"""A device that several models share, in virtual time: production cores of engines, balloon, residency and store,
assembled as a worker does (`worker.serving`), with one step at a time (`worker.engine.device_loop`). Decides nothing.

Steps are single events, except while only one model computes and no other has requests: then its decode-only steps are
one event (`stretch`).
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable
from typing import Literal

from contracts.models import ModelState
from kvstore.core import instructions as store_do
from loadtest.simulate.channels import Channel
from loadtest.simulate.costs import NodeKind
from loadtest.simulate.engine import Engine, Shell
from loadtest.simulate.events import Events
from loadtest.simulate.hosted import Host, HostedModel
from loadtest.simulate.mechanisms import DRAM, HBM, Mechanisms
from loadtest.simulate.request import Request
from loadtest.simulate.shared_kind import GRANULE_BYTES, SharedKind, SharedModel
from loadtest.simulate.store import Blob, NodeStore, Ways
from loadtest.simulate.stretch import LONGEST
from loadtest.simulate.weights import Weights
from worker.core.balloon import Balloon, Share
from worker.core.engine_core import EngineCore
from worker.core.pages import PagePool
from worker.core.residency import Residency, Resident
from worker.core.yielding import Yielding

#: `sharing` of the configuration: fixed parts; KV that grows and shrinks; and weights that come and go, of one model at
#: a time or of several.
Sharing = Literal["static", "elastic", "swap", "prism"]
#: As in `worker.serving` and `worker.engine.device_loop`: least chunks of KV of a model; longest sleep.
_MIN_CHUNKS, _IDLE_S = 4, 0.5
#: A round of turns that computes nothing takes this long.
_EMPTY_ROUND_S = 1e-4


class TurnedEngine(Engine):
    """An engine that its device gives turns. told: it has heard something since its last turn."""

    def __init__(self, events: Events, kind: NodeKind, core: EngineCore, shell: Shell) -> None:
        super().__init__(events, kind, core, shell)
        self.told = True
        #: Called when something has come, and when a step is over. late: calls back when weights are here, or is False.
        self.woken: Callable[[], None] = lambda: None
        self.stepped: Callable[[], None] = lambda: None
        self.late: Callable[[Callable[[], None]], bool] = lambda follow: False
        #: Takes the seconds that mapping has taken the device.
        self.mapping_s: Callable[[], float] = lambda: 0.0

    def due_in_s(self) -> float:
        """See `worker.engine.engine.NativeEngine.due_in_s`."""
        if self.core.going_on or self.told or self.core.may_fit:
            return 0.0
        return self.core.due_in_s(self._events.now)

    def take_turn(self, until_s: float) -> bool:
        """Whether a step has begun; `stepped` follows. until_s: a stretch of several steps ends by then."""
        self.told = False
        step = self.core.turn(self._events.now)
        self._act()
        if step is None:
            return False
        self.disturb(self.mapping_s())
        self._longest, self._ends_s = (LONGEST if until_s > self._events.now else 1), until_s
        self._begin(step)
        return True

    def let_go(self) -> None:
        """Unmap what another model has taken over."""
        self.core.state.unmap()
        self._act()

    def end_stretch(self) -> None:
        """End a stretch with its current step."""
        if self._step is not None and self._stretch.count > 1 and self._stretch.cut(self._events.now):
            self._schedule()

    def _wants_turn(self) -> None:
        self.told = True
        self.woken()

    def _over(self, version: int) -> None:
        if version == self._version and self._step is not None and self.late(lambda: self._last_layer(version)):
            return
        before = self._step
        super()._over(version)
        if before is not None and self._step is None:
            self.stepped()

    def _last_layer(self, version: int) -> None:
        self._events.at(self._events.now + self._stretch.first_s / self._kind.shape.layers, lambda: self._over(version))


class SharedDevice:
    """See the module. The models of `kind` are registered here. ended: called with each complete answer. Invariants:
    those of its cores (`validate`); never is more mapped than there is."""

    def __init__(
        self, name: str, kind: SharedKind, sharing: Sharing, events: Events, *, ended: Callable[[Request], None]
    ) -> None:
        self.name, self.kind, self.sharing, self._events, self._told = name, kind, sharing, events, ended
        first = kind.models[0].kind
        has = Mechanisms(frozenset((HBM, DRAM)))
        self.bus, self.link = Channel(events, first.dram_bytes_per_s), Channel(events, first.link_bytes_per_s)
        ways = Ways(Channel(events, first.ssd_bytes_per_s), self.link, Channel(events, first.blob_bytes_per_s))
        shapes = [model.kind.shape for model in kind.models]
        stores = dict[str, NodeStore]()
        self.store = stores[name] = NodeStore(
            name, first, shapes, events, ways, Blob(), stores, has, lambda seconds: None
        )
        self.store.owners["worker"] = self
        host = Host(events, self.store, self.bus, has, self._ended, self._pages)
        #: Granules that are mapped.
        self.mapped = 0
        self.balloon = Balloon(kind.granules)
        self.weights: Weights | None = None
        #: Seconds of mapping that no step has yet waited for.
        self._mapping_s = 0.0
        self.models = {
            model.name: HostedModel(
                model.kind, host, self._pool(model), TurnedEngine, itertools.count(1 + number, len(kind.models))
            )
            for number, model in enumerate(kind.models)
        }
        self._by_name = {model.name: model for model in kind.models}
        self._by_fingerprint = {hosted.shape.fingerprint: hosted for hosted in self.models.values()}
        self._hosted = list(self.models.values())
        self._engines: list[TurnedEngine] = []
        for each, hosted in self.models.items():
            engine = hosted.engine
            assert isinstance(engine, TurnedEngine)
            engine.woken, engine.stepped = self._woken, self._go_on
            engine.late, engine.mapping_s = functools.partial(self._late, each), self._take_mapping_s
            self._engines.append(engine)
        self.ended_ids: list[str] = []
        #: Engines that still get a turn in this round; the one whose step runs; whether the round computed anything.
        self._queue: collections.deque[TurnedEngine] = collections.deque()
        self._computing: TurnedEngine | None = None
        self._in_round = self._computed = False
        self._round_s = math.inf
        self._assemble()
        self._round_at(events.now)

    # ---- assembly ----------------------------------------------------------------------------------------------
    def _pool(self, model: SharedModel) -> PagePool:
        granules = self.kind.granules
        if self.sharing in ("static", "elastic"):
            granules -= sum(each.granules for each in self.kind.models)
            granules //= len(self.kind.models) if self.sharing == "static" else 1
        need = -(-_MIN_CHUNKS * model.kind.shape.chunk_bytes // GRANULE_BYTES)
        if granules < need:
            raise ValueError(f"{self.name}: {self.sharing}: no room for KV of {model.name} beside the weights")
        return PagePool(granules // model.slab_granules, model.pages_per_slab, model.kind.shape.layers)

    def _assemble(self) -> None:
        if self.sharing == "static":
            self.mapped = sum(model.granules for model in self.kind.models)
            return
        shares = {name: self._join(name) for name in self.models}
        if self.sharing == "elastic":
            for name, share in shares.items():
                share.weights = self._by_name[name].granules
            self.mapped = sum(share.weights for share in shares.values())
            self.balloon.limits_changed()
            return
        residency = Residency(self.balloon, one_at_a_time=self.sharing == "swap")
        here = self._first_here()
        for name, share in shares.items():
            model, core = self._by_name[name], self.models[name].core
            resident = Resident(share, core, Yielding(core), model.granules, int(model.weight_bytes), model.pinned)
            residency.join(resident, ModelState.ACTIVE if name in here else ModelState.COLD)
        self.mapped = sum(self._by_name[name].granules for name in here)
        self.weights = Weights(self._events, self.kind, residency, self.bus, self._memory, self._woken)

    def _first_here(self) -> list[str]:
        """As `worker.serving`: each model is loaded once; the last ones stay as far as they fit."""
        here: list[SharedModel] = []
        for model in self.kind.models:
            chunks = -(-_MIN_CHUNKS * model.kind.shape.chunk_bytes // GRANULE_BYTES)
            while here and sum(each.granules for each in here) + model.granules + chunks > self.kind.granules:
                here.pop(0)
            here.append(model)
        return [model.name for model in (here[-1:] if self.sharing == "swap" else here)]

    def _join(self, name: str) -> Share:
        core = self.models[name].core
        share = self.balloon.join(name, core.state.cache, self._by_name[name].slab_granules)
        share.yields = Yielding(core)
        return share

    # ---- memory ------------------------------------------------------------------------------------------------
    def _memory(self, granules: int) -> None:
        self.mapped += granules
        assert 0 <= self.mapped <= self.kind.granules, f"{self.mapped} granules of {self.kind.granules} are mapped"

    def _pages(self, name: str, mapped: int, unmapped: int) -> None:
        granules = self._by_name[name].slab_granules
        if mapped:
            self._let_go(self.models[name].engine)
            if self.weights is not None:
                self._mapping_s += self.weights.execute(self._let_go)
        self._memory((mapped - unmapped) * granules)
        self._mapping_s += (mapped * self.kind.map_s + unmapped * self.kind.unmap_s) * granules

    def _take_mapping_s(self) -> float:
        taken, self._mapping_s = self._mapping_s, 0.0
        return taken

    def _late(self, name: str, follow: Callable[[], None]) -> bool:
        return self.weights is not None and self.weights.when_here(name, follow)

    def _let_go(self, asker: Engine | None = None) -> None:
        for engine in self._engines:
            if engine is not asker:
                engine.let_go()

    # ---- turns -------------------------------------------------------------------------------------------------
    def _woken(self) -> None:
        if self._in_round:
            if self._computing is not None:
                self._computing.end_stretch()
        else:
            self._round_at(self._events.now)

    def _round_at(self, time_s: float, everybody: bool = False) -> None:
        if time_s < self._round_s:
            self._round_s = time_s
            self._events.at(time_s, lambda: self._round(time_s, everybody))

    def _round(self, time_s: float, everybody: bool) -> None:
        if time_s != self._round_s or self._in_round:
            return
        self._round_s, self._in_round, self._computed = math.inf, True, False
        seconds = self.weights.turn(self._let_go) if self.weights is not None else 0.0
        if seconds := seconds + (self._take_mapping_s() if seconds else 0.0):
            self._events.at(self._events.now + seconds, lambda: self._turns(everybody))
        else:
            self._turns(everybody)

    def _turns(self, everybody: bool) -> None:
        busy = self._engines if everybody else [engine for engine in self._engines if engine.due_in_s() <= 0]
        if not busy:
            self._in_round = False
            due_s = min(self._weights_due_s(), *(engine.due_in_s() for engine in self._engines))
            if due_s < math.inf:
                self._round_at(self._events.now + max(min(due_s, _IDLE_S), _EMPTY_ROUND_S), everybody=True)
            return
        self._queue.extend(busy)
        self._go_on()

    def _weights_due_s(self) -> float:
        return self.weights.residency.due_in_s(self._events.now) if self.weights is not None else math.inf

    def _go_on(self) -> None:
        self._computing = None
        while self._queue:
            engine = self._queue.popleft()
            if engine.take_turn(self._alone_until_s(engine)):
                self._computing, self._computed = engine, True
                return
        self._in_round = False
        self._round_at(self._events.now + (0.0 if self._computed else _EMPTY_ROUND_S))

    def _alone_until_s(self, engine: TurnedEngine) -> float:
        """Until when no other engine wants a turn, if none comes for its events."""
        if self._queue:
            return self._events.now
        due_s = min((other.due_in_s() for other in self._engines if other is not engine), default=math.inf)
        return self._events.now + min(due_s, self._weights_due_s())

    # ---- requests ----------------------------------------------------------------------------------------------
    def submit(self, name: str, request: Request) -> None:
        """Take a request for a model. Raises ValueError if it can never fit."""
        hosted = self.models[name]
        pool, tokens = hosted.core.state.cache.pool, request.prompt_tokens + request.answer_tokens
        most = (pool.total // hosted.shape.layers - _MIN_CHUNKS) * hosted.shape.chunk_tokens
        if tokens > most:
            raise ValueError(f"a request of {tokens} tokens for {name} does not fit {self.name}, which holds {most}")
        hosted.submit(request, ())

    def _ended(self, request: Request) -> None:
        self.ended_ids.append(request.request_id)
        self._told(request)

    def answer(self, said: store_do.Instruction) -> None:
        """See `store.Owner`. The engines get it after the store's present instructions."""
        self._events.at(self._events.now, lambda: self._heard(said))

    def _heard(self, said: store_do.Instruction) -> None:
        match said:
            case store_do.Found() | store_do.Pieces() | store_do.End():
                self._hosted[(int(said.load[1]) - 1) % len(self._hosted)].heard(said)
            case store_do.Grant():
                self._hosted[(int(said.save[1]) - 1) % len(self._hosted)].heard(said)
            case store_do.Offer():
                self._by_fingerprint[said.fingerprint].heard(said)
            case _:
                for hosted in self._hosted:
                    hosted.heard(said)

    # ---- reports -----------------------------------------------------------------------------------------------
    @property
    def residency(self) -> Residency | None:
        """Whose weights are here; None: all are."""
        return self.weights.residency if self.weights is not None else None

    def validate(self) -> None:
        """Raise AssertionError if an invariant of a core, or of the memory, is broken."""
        self.store.core.validate()
        self.balloon.validate()
        if self.weights is not None:
            self.weights.residency.validate()
        for hosted in self._hosted:
            hosted.validate()
        assert self.mapped <= self.kind.granules
