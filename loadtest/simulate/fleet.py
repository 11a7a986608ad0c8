"""A fleet: the scheduler's production core (`scheduler.core.control.Control`), and nodes that report to it and carry
out its commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from contracts.ids import SessionKey
from loadtest.simulate.costs import NodeKind
from loadtest.simulate.events import Events
from loadtest.simulate.mechanisms import ALL, BLOB, DRAM, HBM, NONE, PEER, SSD, Mechanisms
from loadtest.simulate.node import SimulatedNode
from loadtest.simulate.request import Request
from loadtest.simulate.store import Blob, NodeStore
from loadtest.simulate.systems.conductor import Conductor
from loadtest.simulate.systems.contract import System
from loadtest.simulate.systems.infercept import InferCept, LlumnixInferCept, MigratingInferCept
from loadtest.simulate.systems.llumnix import Llumnix
from loadtest.simulate.systems.node import OtherNode
from loadtest.simulate.systems.parrot import Parrot
from loadtest.simulate.systems.running import Running
from loadtest.simulate.turns import coarsened
from scheduler.core.advisories import Hint
from scheduler.core.commands import Withdraw
from scheduler.core.control import Ask, Command, Control, Prefetch, Settings
from scheduler.core.fleet import Model, Rates
from scheduler.core.policies import POLICIES

#: As in `runtime.reporter` and `scheduler.server`.
REPORT_EVERY_S, TICK_EVERY_S = 0.1, 0.5
#: Decisions between two validations.
_VALIDATE_EVERY = 2_000


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy to compare. placement: of our scheduler; system: replaces it. hints: whether clients send them. has: the
    nodes' mechanisms. ours: nodes run our engine and store; False: `loadtest.simulate.systems.node`."""

    name: str
    placement: str = "balanced"
    hints: bool = False
    has: Mechanisms = ALL
    system: Callable[[], System] | None = None
    ours: bool = True


#: InferCept's nodes: host memory; a request begins when all of its KV has arrived.
_HOST = Mechanisms(frozenset((HBM, DRAM)), layerwise=False)
_HOST_AND_DISK = replace(_HOST, tiers=_HOST.tiers | {SSD})
#: LMCache as SYMPHONY compares with it (figure 14): encoded KV in remote storage, loaded when a request arrives,
#: decoded on the device. CacheGen's paper reports KV 3.5 to 4.3 times smaller than 8 bits; LMCache's defaults give
#: about 7 times against 16 bits.
_LMCACHE = Mechanisms(frozenset((HBM, BLOB)), layerwise=False, codec=7.0, decode_bytes_per_s=20e9)

VARIANTS: dict[str, Variant] = {
    v.name: v
    for v in (
        Variant("balanced", hints=True),
        Variant("balanced-no-hints"),
        Variant("sticky", "sticky"),
        Variant("sticky-hints", "sticky", hints=True),
        Variant("recompute", has=NONE),
        Variant("cache-aware", "cache-aware"),
        Variant("random", "random"),
        Variant("round-robin", "round-robin"),
        Variant("llumnix", has=NONE, system=Llumnix, ours=False),
        Variant("infercept", has=_HOST, system=InferCept, ours=False),
        Variant("llumnix-infercept", has=_HOST, system=LlumnixInferCept, ours=False),
        Variant(
            "infercept-migration", has=replace(_HOST, tiers=_HOST.tiers | {PEER}), system=MigratingInferCept, ours=False
        ),
        Variant("parrot", has=Mechanisms(frozenset((HBM,))), system=Parrot, ours=False),
        Variant("lmcache", has=_LMCACHE, ours=False),
        # Not in SYMPHONY: vLLM with automatic prefix caching, and InferCept and LMCache with an SSD. vLLM and LMCache
        # have a router that sends a turn where its session's KV is.
        Variant("prefix-caching", "sticky", has=Mechanisms(frozenset((HBM,)), layerwise=False), ours=False),
        Variant("infercept-ssd", has=_HOST_AND_DISK, system=InferCept, ours=False),
        Variant("lmcache-ssd", "sticky", has=_HOST_AND_DISK, ours=False),
        # Each with one mechanism off, or on that is off by default (figure 17).
        Variant("no-cooperative", hints=True, has=Mechanisms(cooperative=False)),
        Variant("layer-priority", hints=True, has=Mechanisms(layer_priority=True)),
        Variant("no-layerwise", hints=True, has=Mechanisms(layerwise=False)),
        # Without hints, layer priority is the better setting (docs/design/0036).
        Variant("sticky-layers", "sticky", has=Mechanisms(layer_priority=True)),
    )
}


class Fleet:
    """See the module. Requests and hints arrive at the current virtual time; `Request.done` is called at the end.
    pieces: bands of layers, and tokens of a chunk (`turns.coarse`)."""

    def __init__(
        self,
        events: Events,
        kind: NodeKind,
        nodes: int,
        variant: Variant,
        settings: Settings | None = None,
        pieces: tuple[int, int] = (4, 256),
    ) -> None:
        kind = coarsened(kind, *pieces) if variant.ours else kind
        self._events, self.kind, self.variant = events, kind, variant
        base = settings or Settings()
        self.control = Control(
            Settings(
                POLICIES[variant.placement],
                models=(kind.model,),
                hints_per_s=base.hints_per_s,
                hint_burst=base.hint_burst,
            )
        )
        self.nodes: dict[str, SimulatedNode | OtherNode] = {}
        others: dict[str, OtherNode] = {}
        self.loads: list[list[float]] = []  #: by sample: mean requests on each node since the last one
        #: Tokens of each session after its last complete turn.
        self.tokens: dict[SessionKey, int] = {}
        self.hints = 0
        self._conducted: Conductor | None = None
        keep = None if variant.system is None else self._keep
        self._blob, self._stores = Blob(), dict[str, NodeStore]()
        for number in range(nodes):
            name = f"node-{number}"
            if variant.ours:
                self.nodes[name] = self._node(name)
            else:
                self.nodes[name] = others[name] = OtherNode(
                    name, kind, events, others, ended=self._ended, has=variant.has, keep=keep
                )
            if variant.system is None:
                # Nodes' reports are not synchronised.
                self._join(name, REPORT_EVERY_S * number / nodes)
        if variant.system is None:
            self._tick()
        else:
            self._conducted = Conductor(events, variant.system(), others)

    def _node(self, name: str) -> SimulatedNode:
        return SimulatedNode(
            name,
            self.kind,
            self._events,
            ended=self._ended,
            has=self.variant.has,
            blob_tier=self._blob,
            stores=self._stores,
        )

    def _join(self, name: str, first_report_s: float) -> None:
        """The node is here; it reports for the first time in `first_report_s`."""
        kind, now = self.kind, self._events.now
        model = Model(kind.model, kind.shape, kind.max_tokens, 0)
        rates = Rates(kind.link_bytes_per_s, kind.ssd_bytes_per_s, kind.blob_bytes_per_s)
        self.control.fleet.worker_joined(name, f"{name}:1", (model,), now, rates)
        self.control.fleet.store_joined(name, f"{name}:2")
        self.control.fleet.node(name).dram_bytes_total = int(kind.dram_bytes)
        self._events.at(now + first_report_s, self._reporting(self.nodes[name]))

    @property
    def migrated(self) -> int:
        """Number of requests that another system migrated."""
        return 0 if self._conducted is None else self._conducted.migrated

    def _keep(self, node: OtherNode, sequence: Running) -> frozenset[str]:
        assert self._conducted is not None
        return self._conducted.keep(node, sequence)

    def ask(self, request: Request) -> None:
        """Place a turn, and submit it to its node."""
        if self._conducted is not None:
            request.node, sources = self._conducted.place(request)
            self._submit(request, sources)
            return
        hop = request.hop if self.variant.hints else None
        ask = Ask(request.request_id, request.session, self.kind.model, request.priority, hop=hop)
        placement = self.control.place(ask, self._events.now)
        request.node = placement.node
        self._submit(request, placement.sources)
        self._carry_out(list(placement.commands))
        if self.control.decisions % _VALIDATE_EVERY == 0:
            self.validate()

    def _submit(self, request: Request, sources: tuple[str, ...]) -> None:
        node = self.nodes[request.node]
        if self.kind.request_s:
            self._events.at(self._events.now + self.kind.request_s, lambda: node.submit(request, sources))
        else:
            node.submit(request, sources)

    def advise(self, hint: Hint) -> None:
        """Give the scheduler a hint."""
        self.hints += 1
        self._carry_out(self.control.advise(hint, self._events.now))

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            node = self.nodes.get(command.node)
            if not isinstance(node, SimulatedNode):
                continue  # only our nodes take hints, and those that are here
            if isinstance(command, Prefetch):
                hint = command.hint
                tokens = self.tokens.get(hint.session, 0)
                node.prefetch(hint.session, hint.priority, hint.expires_s, tokens, command.sources, hint.arrival_s)
            elif isinstance(command, Withdraw):
                node.withdraw(command.session)

    def _ended(self, request: Request) -> None:
        self.tokens[request.session] = request.prompt_tokens + request.answer_tokens
        request.done(request)

    def _reporting(self, node: SimulatedNode | OtherNode) -> Callable[[], None]:
        number = 0

        def report() -> None:
            nonlocal number
            if node.name not in self.nodes:
                return  # it has left
            number += 1
            now = self._events.now
            load, here, ended = node.load()
            self.control.fleet.loaded(node.name, load, here, ended, now, number)
            self.control.callgraphs.finished(ended, now)
            for session, held in node.held():
                self.control.directory.report(
                    node.name, session, self.kind.model, self.tokens.get(session, held.tokens), now, held
                )
            self._events.at(now + REPORT_EVERY_S, report)

        return report

    def _tick(self) -> None:
        self._carry_out(self.control.tick(self._events.now))
        self._events.at(self._events.now + TICK_EVERY_S, self._tick)

    def sample(self, every_s: float) -> None:
        """Record each node's load, now and every `every_s` seconds."""
        self.loads.append([node.mean_load(every_s) for node in self.nodes.values()])
        self._events.at(self._events.now + every_s, lambda: self.sample(every_s))

    def validate(self) -> None:
        """Raise AssertionError if an invariant of the scheduler's core or of a node is broken."""
        self.control.validate()
        for node in self.nodes.values():
            node.validate()
