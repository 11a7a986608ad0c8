"""A device that several models share, in virtual time: production cores of engines, balloon, residency and store,
assembled as a worker does (`worker.serving`), with one step at a time (`worker.engine.device_loop`). Decides nothing.

A step is an event. Rounds of turns in which every model repeats its decode-only step are one event (`stretch`), which
an arrival ends after the current round.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from contracts.models import ModelState
from kvstore.core import instructions as store_do
from loadtest.simulate.channels import Channel
from loadtest.simulate.circulating import CirculatingCosts
from loadtest.simulate.events import Events
from loadtest.simulate.hosted import Host, HostedModel
from loadtest.simulate.mechanisms import IN_MEMORY, Mechanisms
from loadtest.simulate.request import Request
from loadtest.simulate.shared_kind import GRANULE_BYTES, SharedKind, SharedModel
from loadtest.simulate.store import Blob, NodeStore, Ways
from loadtest.simulate.stretch import Stretch
from loadtest.simulate.turned_engine import TurnedEngine
from loadtest.simulate.weights import Weights
from worker.core.balloon import Balloon, Share
from worker.core.lending import Lending
from worker.core.pages import PagePool
from worker.core.residency import Residency
from worker.core.resident import Expected, Resident
from worker.core.turns import turns_of
from worker.core.yielding import Yielding

#: `sharing` of the configuration: fixed parts; KV that grows and shrinks; and weights that come and go, of one model at
#: a time or of several.
Sharing = Literal["static", "elastic", "swap", "serverless", "prism"]
#: As in `worker.serving` and `worker.engine.device_loop`: least chunks of KV of a model; longest sleep.
_MIN_CHUNKS, _IDLE_S = 4, 0.5
#: As there: tokens of the prompt whose prefill hides the copies of an idle model's layers.
_SHORT_PROMPT = 512
#: A round of turns that computes nothing takes this long.
_EMPTY_ROUND_S = 1e-4


class SharedDevice:
    """See the module. The models of `kind` are registered here. ended: called with each complete answer. has: what KV
    is kept in. remap_cap: part of its layers that a model lends at most (with `prism`); 0: none lends. Invariants:
    those of its cores (`validate`); never is more mapped than there is."""

    def __init__(
        self,
        name: str,
        kind: SharedKind,
        sharing: Sharing,
        events: Events,
        *,
        ended: Callable[[Request], None],
        has: Mechanisms = IN_MEMORY,
        remap_cap: float = 0.0,
    ) -> None:
        self.name, self.kind, self.sharing, self._events, self._told = name, kind, sharing, events, ended
        self._remap_cap = remap_cap
        first = kind.models[0].kind
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
        #: Costs of models that may lend layers.
        self._lenders = {
            model.name: CirculatingCosts(model.kind.costs, model.layers, kind.transfer_s(model))
            for model in kind.models
            if remap_cap
        }
        self.models = {
            model.name: HostedModel(
                replace(model.kind, costs=self._lenders.get(model.name, model.kind.costs)),
                host,
                self._pool(model),
                TurnedEngine,
                itertools.count(1 + number, len(kind.models)),
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
        #: Engines that still get a turn in this round, and those that computed in it.
        self._queue: collections.deque[TurnedEngine] = collections.deque()
        self._computed: list[TurnedEngine] = []
        self._in_round = False
        #: Rounds alike that are one event, and the steps of each model in them.
        self._together: Stretch | None = None
        self._alike: dict[TurnedEngine, Stretch] = {}
        self._counts: dict[TurnedEngine, int] = {}
        self._cut_short = False
        self._version = 0
        self._round_s = math.inf
        self._assemble()
        self._round_at(events.now)

    # ---- assembly ----------------------------------------------------------------------------------------------
    def _pool(self, model: SharedModel) -> PagePool:
        granules = self.kind.granules
        if self.sharing in ("static", "elastic"):
            granules -= sum(each.granules for each in self.kind.models)
            granules //= len(self.kind.models) if self.sharing == "static" else 1
            if self.sharing == "static" and model.fixed_granules:
                granules = model.fixed_granules
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
        residency = Residency(self.balloon, turns_of(self.sharing))
        # As `worker.serving`, which loads each model once.
        first = self.kind.models[0]
        residency.copy_bytes_s = first.weight_bytes / self.kind.activation_s(first)
        here = self._first_here()
        for name, share in shares.items():
            model, core = self._by_name[name], self.models[name].core
            resident = Resident(share, core, Yielding(core), model.granules, int(model.weight_bytes), model.pinned)
            resident.lending = self._lending(model)
            residency.join(resident, ModelState.ACTIVE if name in here else ModelState.COLD)
        self.mapped = sum(self._by_name[name].granules for name in here)
        self.weights = Weights(self._events, self.kind, residency, self.bus, self._memory, self._woken, self._lenders)

    def _lending(self, model: SharedModel) -> Lending | None:
        """As `worker.serving`."""
        most, pace = min(int(self._remap_cap * model.layers), model.layers - 1), self.models[model.name].core.pace
        if most < 1:
            return None
        prefill_s = _SHORT_PROMPT * pace.prefill_token_s
        return Lending(model.layers, model.layer_granules, self.kind.transfer_s(model), prefill_s, most, pace)

    def _first_here(self) -> list[str]:
        """As `worker.serving`: each model is loaded once; the last ones stay as far as they fit."""
        here: list[SharedModel] = []
        for model in self.kind.models:
            chunks = -(-_MIN_CHUNKS * model.kind.shape.chunk_bytes // GRANULE_BYTES)
            while here and sum(each.granules for each in here) + model.granules + chunks > self.kind.granules:
                here.pop(0)
            here.append(model)
        return [model.name for model in (here[-1:] if self.sharing != "prism" else here)]

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

    def _let_go(self, asker: object = None) -> None:
        for engine in self._engines:
            if engine is not asker:
                engine.let_go()

    # ---- turns -------------------------------------------------------------------------------------------------
    def _woken(self, engine: TurnedEngine | None = None) -> None:
        if not self._in_round:
            self._round_at(self._events.now)
        elif self._together is not None:
            mine = engine is not None and engine in self._alike
            if engine is None or (engine.core.interrupted() if mine else engine.core.live):
                self._end_together()

    def _round_at(self, time_s: float, everybody: bool = False) -> None:
        if time_s < self._round_s:
            self._round_s = time_s
            self._events.at(time_s, lambda: self._round(time_s, everybody))

    def _round(self, time_s: float, everybody: bool) -> None:
        if time_s != self._round_s or self._in_round:
            return
        self._round_s, self._in_round, self._computed = math.inf, True, []
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
        while self._queue:
            engine = self._queue.popleft()
            if engine.take_turn():
                self._computed.append(engine)
                return
        if self._computed and self._go_on_together():
            return
        self._end_round()

    def _end_round(self) -> None:
        self._in_round = False
        self._round_at(self._events.now + (0.0 if self._computed else _EMPTY_ROUND_S))

    # ---- rounds alike ------------------------------------------------------------------------------------------
    def _go_on_together(self) -> bool:
        """Rounds in which each model of this one repeats its step, as one event. False: there are none."""
        now = self._events.now
        found = {engine: stretch for engine in self._computed if (stretch := engine.following()) is not None}
        if len(found) < len(self._computed):
            return False
        others = [engine for engine in self._engines if engine not in found]
        rest_s = min(self._weights_due_s(), *(engine.due_in_s() for engine in others), math.inf)
        rest_s = min(rest_s, *(engine.core.quiet_s for engine in found))
        if rest_s <= 0 or any(engine.core.may_fit for engine in found):
            return False
        together = Stretch(
            now,
            min(stretch.count for stretch in found.values()),
            sum(stretch.first_s for stretch in found.values()),
            sum(stretch.growth_s for stretch in found.values()),
        )
        if together.end_s > now + rest_s:
            together.cut(now + rest_s)
        self._alike, self._together, self._cut_short = found, together, False
        self._counts = dict.fromkeys(found, together.count)
        self._over_at(together.end_s)
        return True

    def _over_at(self, time_s: float) -> None:
        self._version += 1
        self._events.at(time_s, functools.partial(self._over_together, self._version))

    def _end_together(self) -> None:
        """End them with the step that runs now. Models whose step it is not yet have a turn afterwards."""
        together = self._together
        if together is None or self._cut_short or (rounds := together.over(self._events.now)) >= together.count:
            return
        end_s = together.start_s + together.seconds(rounds)
        for engine, stretch in self._alike.items():
            self._counts[engine] = rounds
            if end_s <= self._events.now:
                self._counts[engine] += 1
                end_s += stretch.first_s + rounds * stretch.growth_s
        self._cut_short = True
        self._over_at(end_s)

    def _over_together(self, version: int) -> None:
        if version != self._version or self._together is None:
            return
        counts, alike = self._counts, self._alike
        most, self._together, self._alike = max(counts.values()), None, {}
        for engine, count in counts.items():
            engine.run_on(alike[engine], count)
        self._computed = [engine for engine, count in counts.items() if count == most]
        self._queue.extend(engine for engine, count in counts.items() if count < most)
        if self._queue:
            self._go_on()
        else:
            self._end_round()

    # ---- requests ----------------------------------------------------------------------------------------------
    def expect(self, name: str, expected: Expected) -> None:
        """A request for this model is expected."""
        if self.residency is not None:
            self.residency.expect(name, expected)
            self._woken()

    def spare(self, name: str, until_s: float) -> None:
        """Until then, requests for this model go elsewhere."""
        if self.residency is not None:
            self.residency.spare(name, until_s)
            self._woken()

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
