"""A fleet that an autoscaling policy grows and shrinks: production's policy and signals (`scheduler.core.scale_policy`,
`scheduler.core.scale_signals`) over simulated nodes with the production cores.

A node that is ordered serves after `startup_s`. The newest leaves first, as a StatefulSet does: it takes no new turns,
ends what it has and its write-back, and goes with its DRAM and SSD; what it has written to blob stays. A node is paid
for from its order to its leaving.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from contracts.ids import SessionKey
from loadtest.figures import Slo
from loadtest.simulate.costs import NodeKind
from loadtest.simulate.events import Events
from loadtest.simulate.fleet import VARIANTS, Fleet
from loadtest.simulate.request import Request
from loadtest.simulate.users import Script, Users
from scheduler.core.scale_policy import Policy, Recommender
from scheduler.core.scale_signals import TPOT, TTFT, Attained, signals

#: As in `scheduler.scaling`.
LOOK_EVERY_S = 5.0
#: How often a leaving node looks whether it may go, and how long it waits for its write-back, in seconds.
_LEAVING_EVERY_S, _WRITE_BACK_S = 0.5, 60.0


@dataclass(frozen=True, slots=True)
class ScaledRun:
    """nodes: at the start. policy: None: the fleet keeps them. limit_s: of virtual time in which turns may arrive.
    pieces: see `Fleet`; fewer bands than `upbeat simulate` has, and longer chunks for long prompts, as hours are
    simulated."""

    kind: NodeKind
    nodes: int
    policy: Policy | None
    slo: Slo
    startup_s: float = 120.0
    hints: bool = True
    seed: int = 1
    limit_s: float = math.inf
    drain_s: float = 3600.0
    pieces: tuple[int, int] = (2, 256)


@dataclass(frozen=True, slots=True)
class Look:
    """What the policy saw and decided. paid: nodes that are ordered or here."""

    at_s: float
    demand: float
    serving: int
    paid: int
    desired: int
    hbm_needed: float
    dram_needed: float
    why: str


@dataclass(slots=True)
class Moves:
    """Turns of known sessions that ran on another node than the one before. left: because that node has left."""

    at_s: list[float] = field(default_factory=list)
    left_at_s: list[float] = field(default_factory=list)


class ScaledFleet(Fleet):
    """See the module."""

    def __init__(self, events: Events, run: ScaledRun) -> None:
        variant = VARIANTS["balanced" if run.hints else "balanced-no-hints"]
        super().__init__(events, run.kind, run.nodes, variant, pieces=run.pieces)
        self._run = run
        self._recommender = None if run.policy is None else Recommender(run.policy)
        self.attained = Attained()
        self.looks: list[Look] = []
        self.moves = Moves()
        self._made = run.nodes
        #: Nodes that have been ordered; and those that leave, with the last time at which they had a request.
        self._coming: list[str] = []
        self._leaving: dict[str, float] = {}
        self._was_on: dict[SessionKey, str] = {}
        #: (time, nodes that are paid for) at each change.
        self.paid: list[tuple[float, int]] = [(events.now, run.nodes)]
        self._look()

    # ---- the policy --------------------------------------------------------------------------------------------
    def _look(self) -> None:
        now = self._events.now
        seen = signals(self.control.fleet, self.control.directory, self.attained, now, now)
        desired, demand, why = len(self.nodes), seen.arriving, ""
        if self._recommender is not None:
            said = self._recommender.look(seen, now)
            if said is not None:
                desired, demand, why = said.nodes, said.demand, said.why
                self._resize(desired)
        paid = len(self.nodes) + len(self._coming)
        self.looks.append(Look(now, demand, seen.nodes, paid, desired, seen.hbm_needed, seen.dram_needed, why))
        self._events.at(now + LOOK_EVERY_S, self._look)

    def _resize(self, desired: int) -> None:
        staying = [name for name in self.nodes if name not in self._leaving]
        while len(staying) + len(self._coming) < desired:
            self._order()
        while self._coming and len(staying) + len(self._coming) > desired:
            self._coming.pop()
        for name in reversed(staying[desired:]):  # the newest, as a StatefulSet does
            self._leaving[name] = self._events.now
            self.control.fleet.drain(name)
            self._leave(name)
        self._note_paid()

    def _note_paid(self) -> None:
        paid = len(self.nodes) + len(self._coming)
        if paid != self.paid[-1][1]:
            self.paid.append((self._events.now, paid))

    # ---- nodes that come and go --------------------------------------------------------------------------------
    def _order(self) -> None:
        name, self._made = f"node-{self._made}", self._made + 1
        self._coming.append(name)

        def arrive() -> None:
            if name in self._coming:
                self._coming.remove(name)
                self.nodes[name] = self._node(name)
                self._join(name, 0.0)

        self._events.at(self._events.now + self._run.startup_s, arrive)

    def _leave(self, name: str) -> None:
        now = self._events.now
        if not self._may_go(name, now):
            self._events.at(now + _LEAVING_EVERY_S, lambda: self._leave(name))
            return
        del self.nodes[name], self._leaving[name]
        self.control.worker_left(name, now)
        self.control.store_left(name)
        self._note_paid()

    def _may_go(self, name: str, now: float) -> bool:
        """Whether its requests have ended, and then its write-back, for which it waits `_WRITE_BACK_S` at most."""
        if self.control.fleet.devices[name].outstanding or self.nodes[name].outstanding:
            self._leaving[name] = now
            return False
        return not self._stores[name].core.saves.waiting_bytes or now - self._leaving[name] > _WRITE_BACK_S

    # ---- turns -------------------------------------------------------------------------------------------------
    def ask(self, request: Request) -> None:
        """See `Fleet.ask`; notes whether the session has moved."""
        super().ask(request)
        before = self._was_on.get(request.session)
        if before is not None and before != request.node:
            self.moves.at_s.append(self._events.now)
            if before not in self.nodes or before in self._leaving:
                self.moves.left_at_s.append(self._events.now)
        self._was_on[request.session] = request.node

    def _ended(self, request: Request) -> None:
        now, model = self._events.now, self.kind.model
        for target, kept in kept_targets(request, self._run.slo).items():
            self.attained.add(model, target, 1, int(kept), now)
        super()._ended(request)


def kept_targets(request: Request, slo: Slo) -> dict[str, bool]:
    """By target: whether an ended request kept to it; targets that do not apply are missing."""
    found = {}
    if slo.ttft_s is not None:
        found[TTFT] = request.first_s - request.sent_s <= slo.ttft_s
    if slo.tpot_s is not None and request.answer_tokens > 1:
        found[TPOT] = (request.end_s - request.first_s) / (request.answer_tokens - 1) <= slo.tpot_s
    return found


@dataclass(slots=True)
class Ran:
    """What happened. until_s: when the last turn had ended."""

    fleet: ScaledFleet
    requests: list[Request]
    until_s: float
    events: int


def run_scaled(run: ScaledRun, scripts: Sequence[Script]) -> Ran:
    """Replay conversations at their own times. Deterministic. Raises AssertionError if an invariant breaks."""
    events = Events()
    fleet = ScaledFleet(events, run)
    users = Users(events, fleet, run.seed)
    users.open([script for script in scripts if script.turns[0].arrival_s < run.limit_s])
    total = sum(len(s.turns) for s in scripts if s.turns[0].arrival_s < run.limit_s)
    events.run(lambda: users.ended == total, limit_s=run.limit_s)
    users.closing = True
    events.run(lambda: users.ended == len(users.requests), limit_s=events.now + run.drain_s)
    fleet.validate()
    return Ran(fleet, users.requests, events.now, events.done)
