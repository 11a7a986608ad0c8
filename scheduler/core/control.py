"""The scheduler's core: events and their time go in, placements and commands to stores come out.

Decides where turns go and which hints a workflow's request leads to. What becomes of a hint: `core.hints`; how a
device is chosen: `core.placer`. The process (`scheduler.server`) and the simulator both run this code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from contracts.ids import SessionKey
from contracts.workflow import Hop
from scheduler.core.advisories import MOVES, Hint
from scheduler.core.callgraph_table import Callgraphs
from scheduler.core.columns import urgency_class
from scheduler.core.commands import Command as Command
from scheduler.core.commands import Prefetch as Prefetch
from scheduler.core.commands import Withdraw as Withdraw
from scheduler.core.directory import Report
from scheduler.core.erasures import Erasures
from scheduler.core.hints import Hints
from scheduler.core.membership import Membership
from scheduler.core.placement import Choice
from scheduler.core.placer import Placer
from scheduler.core.placer import seed_of as seed_of
from scheduler.core.policies import Policy, balanced
from scheduler.core.snapshot import PlacementRequest
from scheduler.core.trust import Trust

#: Hints that expire in one go.
MOST_EXPIRED = 512

#: After its expected arrival, a next hop's hint lasts for this many seconds plus this many times the expected delay.
_HOP_LATE_S, _HOP_LATE_TIMES = 15.0, 2.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A turn that has arrived.

    pin: the node or device that must run it. avoid: devices that have just failed it. hop: its place in a workflow.
    taken: the gateway has already sent it to `pin`, by a route hint.
    """

    request_id: str
    session: SessionKey
    model: str
    priority: int = 0
    pin: str = ""
    avoid: frozenset[str] = frozenset()
    hop: Hop | None = None
    taken: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """The device for a turn.

    sources: other nodes with its cache, best first. kept: tokens of its cache, wherever that is. advised: a hint had
    sent the cache to this device. commands: from the hints for the next hops of its workflow. hint_trace: of the hint
    that the turn has used; empty: none.
    """

    choice: Choice
    sources: tuple[str, ...]
    kept: int
    advised: bool
    commands: tuple[Command, ...] = ()
    hint_trace: str = ""

    @property
    def node(self) -> str:
        """The device's name."""
        return self.choice.node


@dataclass(frozen=True, slots=True)
class Settings:
    """The scheduler's configuration. models: the registered ones. nodes: the configured ones. hints_per_s, hint_burst:
    the prefetch budget of each tenant and each of its addresses. pinned, min_nodes: see `core.model_moves`.
    moves_models: whether this scheduler moves models between devices; one of a fleet does."""

    policy: Policy = balanced
    models: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    hints_per_s: float = 200.0
    hint_burst: float = 1000.0
    pinned: frozenset[str] = frozenset()
    min_nodes: Mapping[str, int] = field(default_factory=dict)
    moves_models: bool = True


class Control:
    """See the module. All state is soft. Methods mutate it, and raise RequestError for a caller's mistake."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self._placer = Placer(self.settings.policy, self.settings.models, self.settings.pinned, self.settings.min_nodes)
        self.fleet, self.directory = self._placer.fleet, self._placer.directory
        self.advisories, self.explained = self._placer.advisories, self._placer.explained
        self.trust = Trust(self.settings.hints_per_s, self.settings.hint_burst)
        self.erasures, self.callgraphs = Erasures(), Callgraphs()
        self.membership = Membership(self.settings.nodes)
        self._hints = Hints(self._placer, self.trust)
        self.model_moves = self._placer.model_moves

    @property
    def decisions(self) -> int:
        """Turns placed so far."""
        return self._placer.count

    @property
    def hints(self) -> Counter[str]:
        """Hints received, by what was done with them (`Hints.received`)."""
        return self._hints.received

    # ---- turns -------------------------------------------------------------------------------------------------
    def place(self, ask: Ask, now: float) -> Placement:
        """Choose the device for a turn, and count it as outstanding there."""
        placer = self._placer
        pending = self.advisories.get(ask.session)
        sent = pending.sent if pending is not None else None
        turn = PlacementRequest(
            ask.model,
            prefetched=pending.node if pending is not None and sent is not None else "",
            prefetched_s=now - sent.at_s if sent is not None else 0.0,
            pin=ask.pin,
            avoid=ask.avoid,
            urgency=urgency_class(ask.priority),
        )
        choice = placer.choose(ask.session, turn, placer.view(ask.session, turn, now, pending))
        if pending is not None:
            self.advisories.use(ask.session)
            self.trust.ended(pending.hint.on_trust_of, pending.hint.address, 1.0)
        elif not ask.pin and not ask.avoid:  # a retry, or a further answer of the turn, has already used its hint
            self.advisories.outcomes["missed"] += 1
        placer.count += 1
        self.fleet.placed(choice.node, ask.request_id, now, ask.priority, ask.model)
        sources = placer.sources(ask.session, choice.node, now)
        placer.explain(
            "turn", ask.session, turn, choice, now, pending, request_id=ask.request_id, sources=sources, taken=ask.taken
        )
        commands = tuple(self._advise_next_hops(ask, ask.hop, choice.node, now)) if ask.hop is not None else ()
        advised = choice.node == turn.prefetched
        hint_trace = pending.hint.trace if pending is not None else ""
        return Placement(choice, sources, placer.cached_tokens(ask.session), advised, commands, hint_trace)

    def _advise_next_hops(self, ask: Ask, hop: Hop, node: str, now: float) -> list[Command]:
        """Hints for the likely successors of an agent's request (SYMPHONY, section 3.5).

        Their record of trust is the workflow's: a wrong guess of the call graph is not the tenant's fault. A caller's
        own hint takes precedence.
        """
        caller = f"{ask.session.tenant}/{hop.workflow}"
        hops, served = self.callgraphs.request(ask.request_id, ask.session, hop, now)
        for session in served:
            pending = self.advisories.get(session)
            if pending is not None and pending.hint.caller == caller:
                self.advisories.forget([session])
                self.trust.ended(caller, "", 1.0)
        commands: list[Command] = []
        for number, next_hop in enumerate(hops):
            before = self.advisories.get(next_hop.session)
            if before is not None and before.hint.caller != caller:
                continue
            hint = Hint(
                next_hop.session,
                f"hop-{ask.request_id}-{number}",
                self._placer.last_model(next_hop.session) or ask.model,
                arrival_s=next_hop.arrival_s,
                expires_s=next_hop.arrival_s + _HOP_LATE_S + _HOP_LATE_TIMES * next_hop.delay_s,
                priority=ask.priority,
                # The session's cache will be on the device that runs this turn.
                pin=node if next_hop.session == ask.session else "",
                chance=next_hop.chance,
                caller=caller,
            )
            commands += self.advise(hint, now)
        return commands

    # ---- hints -------------------------------------------------------------------------------------------------
    def advise(self, hint: Hint, now: float) -> list[Command]:
        """See `Hints.advise`."""
        return self._hints.advise(hint, now)

    def hinted_route(
        self, session: SessionKey, advisory_id: str, now: float
    ) -> tuple[str, tuple[str, ...], int] | None:
        """See `Hints.route`."""
        return self._hints.route(session, advisory_id, now)

    def withdraw(self, session: SessionKey | None, tenant: str, advisory_id: str) -> list[Command] | None:
        """See `Hints.withdraw`."""
        return self._hints.withdraw(session, tenant, advisory_id)

    # ---- time --------------------------------------------------------------------------------------------------
    def tick(self, now: float) -> list[Command]:
        """Time has passed: expire hints, declare silent devices dead, and move hints off bad choices.

        Of many hints that end together only some expire, so that turns do not wait: while `late`, call `expire`."""
        self.expire(now)
        self.callgraphs.tick(now)
        for name in self.fleet.silent(now):
            self.directory.forget_node(name)
        self.fleet.note_states(now)
        woken = self.model_moves.tick(now, self.settings.moves_models)
        return [*self._hints.move(now), *woken]

    def late(self, now: float) -> bool:
        """Whether hints that have expired are still here."""
        return self.advisories.late(now)

    def expire(self, now: float) -> None:
        """Drop at most `MOST_EXPIRED` expired hints."""
        self._hints.expire(now, MOST_EXPIRED)

    # ---- nodes -------------------------------------------------------------------------------------------------
    def worker_left(self, name: str, now: float | None = None) -> None:
        """The worker's stream ended: its requests are lost. The next `tick` moves its hints."""
        self.fleet.worker_left(name, now)

    def store_joined(self, name: str, address: str) -> None:
        """A store said hello. It will report again all that it holds."""
        self.directory.forget_node(name)
        self.fleet.store_joined(name, address)

    def held(
        self, name: str, reports: Iterable[Report], *, full: bool = False, joining: bool = False, number: int = 0
    ) -> None:
        """A store reports what it holds of some sessions.

        full: the first message of a report on all its sessions; joining: a later message of such a report. number:
        position in the stream, from 1; a repeated or late message is ignored. 0: not numbered.
        """
        node = self.fleet.node(name)
        if number and number <= node.held_number:
            return
        node.held_number = number
        if full:
            self.directory.forget_node(name)
        for key, model, tokens_total, last_use_s, held in reports:
            self.directory.report(name, key, model, tokens_total, last_use_s, held, joining=full or joining)

    def store_left(self, name: str) -> None:
        """The store's stream ended: its node is no source any more."""
        self.fleet.store_left(name)
        self.directory.forget_node(name)

    def node_gone(self, name: str) -> None:
        """The node has left the fleet for good: it is no source, and owes no erasure."""
        self.directory.forget_node(name)
        self.erasures.forget_node(name)
        self.fleet.forget(name)

    def validate(self) -> None:
        """Raise AssertionError when the tables disagree."""
        for part in (
            self.membership,
            self.fleet,
            self.directory,
            self.advisories,
            self.trust,
            self.explained,
            self.erasures,
            self.callgraphs,
        ):
            part.validate()
        columns = self.fleet.columns
        for row, name in enumerate(columns.names):
            right, expected = sum(p.chance for p in self.advisories.of_node(name)), columns.expected[:, row].sum()
            assert all(len(p.left) <= MOVES and p.node not in p.left for p in self.advisories.of_node(name))
            assert abs(expected - right) < 1e-6 * max(1.0, right), (
                f"{name}: {expected} requests expected instead of {right}"
            )
