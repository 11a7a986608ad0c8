"""The scheduler's core as one: what happened goes in with its time, placements and commands to nodes come out.

The process (`scheduler.server`) and the simulator run this very code; neither decides anything itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from blake3 import blake3

from contracts.devices import is_of, node_of
from contracts.errors import RequestError
from contracts.ids import SessionKey
from contracts.workflow import Hop
from scheduler.core import moves, snapshot
from scheduler.core.advisories import Advisories, Hint, Pending, Sent, merged
from scheduler.core.callgraph_table import Callgraphs
from scheduler.core.columns import urgency_class
from scheduler.core.decisions import Decision, Decisions
from scheduler.core.directory import Directory, Report
from scheduler.core.erasures import Erasures
from scheduler.core.fleet import Fleet
from scheduler.core.placement import Choice, place
from scheduler.core.policies import Policy, balanced
from scheduler.core.snapshot import Snapshot, Turn
from scheduler.core.trust import DOUBT_PRIORITY, Trust, Worth

#: A next hop's hint ends when the request is later than expected by so much, and so many times the expected delay.
_HOP_LATE_S, _HOP_LATE_TIMES = 15.0, 2.0


#: A hint that is renewed without its request for so long counts as one that did not come true, in seconds.
PROMISE_S = 300.0


@dataclass(frozen=True, slots=True)
class Ask:
    """A turn that is here. avoid: devices that just failed it; pin: the node or device that must run it; hop: what it is in a workflow.
    taken: it runs on `pin` already, where its hint's answer had sent it."""

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
    """Where a turn goes: to a device. sources: other nodes with its cache, best first. kept: tokens that are cached somewhere. advised: a
    hint had sent the cache there. commands: for the hints of the next hops of its workflow."""

    choice: Choice
    sources: tuple[str, ...]
    kept: int
    advised: bool
    commands: tuple[Command, ...] = ()

    @property
    def node(self) -> str:
        """Its name."""
        return self.choice.node


@dataclass(frozen=True, slots=True)
class Prefetch:
    """To the store of a device's node: bring this session's cache up, and offer it to the device. node: the device's name.
    `hint.priority` includes what trust takes away."""

    node: str
    hint: Hint
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """To the store of a device's node: what was brought for this session's hint may go first."""

    node: str
    session: SessionKey


Command = Prefetch | Withdraw


@dataclass(frozen=True, slots=True)
class Settings:
    """What the configuration says. models: those that are registered. hints_per_s, hint_burst: of each tenant and of each of its addresses,
    that are prefetched."""

    policy: Policy = balanced
    models: tuple[str, ...] = ()
    hints_per_s: float = 200.0
    hint_burst: float = 1000.0


class Control:
    """See the module. All state is soft. Methods mutate it and raise RequestError for what the caller did wrong."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.fleet, self.directory, self.erasures = Fleet(), Directory(), Erasures()
        self.fleet.registered = frozenset(self.settings.models)
        self.advisories = Advisories(self.fleet.columns.expect)
        self.trust = Trust(self.settings.hints_per_s, self.settings.hint_burst)
        self.explained = Decisions()
        self.callgraphs = Callgraphs()
        self.decisions = 0
        #: Hints that came, by what was done: prefetched (`full`, `behind`), `noted`, `known` (the store needs no word), `unusable`.
        self.hints: Counter[str] = Counter()

    # ---- turns -------------------------------------------------------------------------------------------------
    def place(self, ask: Ask, now: float) -> Placement:
        """The device for a turn that is here; it counts as outstanding there."""
        pending = self.advisories.get(ask.session)
        sent = pending.sent if pending is not None else None
        turn = Turn(
            ask.model,
            prefetched=pending.node if pending is not None and sent is not None else "",
            prefetched_s=now - sent.at_s if sent is not None else 0.0,
            pin=ask.pin,
            avoid=ask.avoid,
            urgency=urgency_class(ask.priority),
        )
        choice = place(self._view(ask.session, turn, now, pending), turn, self.settings.policy, seed_of(ask.session))
        if pending is not None:
            self.advisories.use(ask.session)
            self.trust.ended(pending.hint.on_trust_of, pending.hint.address, 1.0)
        elif not ask.pin and not ask.avoid:  # another attempt, or another answer to the same turn, has had its hint
            self.advisories.outcomes["missed"] += 1
        self.decisions += 1
        self.fleet.placed(choice.node, ask.request_id, now, ask.priority, ask.model)
        sources = self._sources(ask.session, choice.node)
        self._explain("turn", ask.session, turn, choice, now, pending, request_id=ask.request_id, sources=sources, taken=ask.taken)
        commands = tuple(self._follow(ask, ask.hop, choice.node, now)) if ask.hop is not None else ()
        return Placement(choice, sources, self._kept(ask.session), choice.node == turn.prefetched, commands)

    def _view(self, session: SessionKey, turn: Turn, now: float, pending: Pending | None) -> Snapshot:
        """What a decision looks at: all but the session's own hint, which would keep it away from its own node."""
        expect = self.fleet.columns.expect
        if pending is not None:
            expect(pending.node, pending.urgency, -pending.chance)
        view = snapshot.take(self.fleet, self.directory.get(session), turn.model, now, self.decisions)
        if pending is not None:
            expect(pending.node, pending.urgency, pending.chance)
        return view

    def _explain(
        self, what: str, session: SessionKey, turn: Turn, choice: Choice, now: float, pending: Pending | None = None, **more: Any
    ) -> None:
        decision = Decision(
            what,
            now,
            choice,
            turn.model,
            hinted=pending is not None,
            prefetched=turn.prefetched,
            prefetched_s=turn.prefetched_s,
            moves=len(pending.left) if pending is not None else 0,
            pin="" if more.get("taken") else turn.pin,
            avoided=len(turn.avoid),
            **more,
        )
        self.explained.note(session, decision)

    def _sources(self, session: SessionKey, node: str) -> tuple[str, ...]:
        """Nodes other than the device's that hold its cache, and the one where its last turn runs or has just ended: what that computed has
        not been reported."""
        known = self.directory.get(session)
        held = tuple(known.sources(without=node_of(node))) if known else ()
        last = node_of(self.fleet.where(self.explained.last_turn(session)))
        return held if last in ("", node_of(node), *held) else (*held, last)

    def _kept(self, session: SessionKey) -> int:
        known = self.directory.get(session)
        return known.tokens if known else 0

    def _follow(self, ask: Ask, hop: Hop, node: str, now: float) -> list[Command]:
        """The hints of what is likely to follow a request of an agent (SYMPHONY, section 3.5). They are on the trust of their graph: a
        wrong guess of ours is not a lie of the tenant's."""
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
                self._last_model(next_hop.session) or ask.model,
                arrival_s=next_hop.arrival_s,
                expires_s=next_hop.arrival_s + _HOP_LATE_S + _HOP_LATE_TIMES * next_hop.delay_s,
                priority=ask.priority,
                # What runs on a device now will have its cache there.
                pin=node if next_hop.session == ask.session else "",
                chance=next_hop.chance,
                caller=caller,
            )
            commands += self.advise(hint, now)
        return commands

    # ---- hints -------------------------------------------------------------------------------------------------
    def advise(self, hint: Hint, now: float) -> list[Command]:
        """A hint came, for the model that it names or else the session's last one. One that nobody can
        use is dropped without a word; one more of the same session is merged with the first, stays where that is while the node serves, and
        its store is told only what is news (`Sent.is_outdated`)."""
        before = self.advisories.get(hint.session)
        if before is not None:
            hint = merged(before.hint, hint, now)
        if not hint.model:
            hint = replace(hint, model=self._last_model(hint.session))
        if before is not None and (not hint.pin or is_of(hint.pin, before.node)) and self.fleet.serves(before.node, hint.model, now):
            pending = replace(before, hint=hint)
            if now - before.placed_s > PROMISE_S:  # renewed for ever, it would never be found out
                self.trust.ended(hint.on_trust_of, hint.address, 0.0)
                pending = replace(pending, placed_s=now)
        else:
            turn = Turn(hint.model, advised=True, lead_s=hint.lead_s(now), pin=hint.pin, urgency=urgency_class(hint.priority))
            try:
                choice = place(self._view(hint.session, turn, now, before), turn, self.settings.policy, seed_of(hint.session))
            except RequestError:
                self.hints["unusable"] += 1
                return []
            pending = Pending(hint, choice.node, now)
            self._explain("hint", hint.session, turn, choice, now, worth=self.trust.worth(hint.on_trust_of, hint.address).value)
        commands: list[Command] = []
        if before is not None and before.sent is not None and pending.node != before.node:
            commands.append(Withdraw(before.node, hint.session))
        return commands + self._tell(pending, now)

    def _last_model(self, session: SessionKey) -> str:
        """Of the session's last turn, or of what is cached of it, or the only one there is; empty: nobody can know."""
        known, models = self.directory.get(session), self.settings.models
        only = models[0] if len(models) == 1 else ""
        return self.explained.last_model(session) or (known.model if known is not None else "") or only

    def _tell(self, pending: Pending, now: float) -> list[Command]:
        """Remember a hint, and send for its cache as far as the hint is worth it and the store does not know."""
        hint, sent = pending.hint, pending.sent
        worth = self.trust.worth(hint.on_trust_of, hint.address)
        priority = hint.priority + (DOUBT_PRIORITY if worth is Worth.BEHIND else 0)
        if sent is not None and (worth is Worth.NOTED or not sent.is_outdated(hint, priority, now)):
            self.hints["known"] += 1
            self.advisories.place(pending)
            return []
        if worth is Worth.NOTED or not self.trust.take(hint.on_trust_of, hint.address, now):
            self.hints["noted"] += 1
            self.advisories.place(pending if sent is not None else replace(pending, chance=0.0))
            return []
        self.hints[worth.value] += 1
        chance = hint.chance * self.trust.chance(hint.on_trust_of, hint.address)
        told = Sent(sent.at_s if sent is not None else now, priority, hint.arrival_s, hint.expires_s)
        self.advisories.place(replace(pending, chance=chance, sent=told))
        return [Prefetch(pending.node, replace(hint, priority=priority), self._sources(hint.session, pending.node))]

    def promised(self, session: SessionKey, advisory_id: str, now: float) -> tuple[str, tuple[str, ...], int] | None:
        """The device to which this hint's turn may go at once, the nodes that hold its cache, and how many tokens are cached; None: the
        turn is to be asked for. Only where its cache was sent for, so that a hint which is worth little decides nothing."""
        pending = self.advisories.get(session)
        if pending is None or pending.sent is None or pending.hint.advisory_id != advisory_id:
            return None
        if not self.fleet.serves(pending.node, pending.hint.model, now):
            return None
        return pending.node, self._sources(session, pending.node), self._kept(session)

    def withdraw(self, session: SessionKey | None, tenant: str, advisory_id: str) -> list[Command] | None:
        """A hint is taken back, named by its session or its id. None: there was none."""
        pending = self.advisories.invalidate(session, tenant, advisory_id)
        if pending is None:
            return None
        self.trust.ended(pending.hint.on_trust_of, pending.hint.address, 0.5)
        return [Withdraw(pending.node, pending.session)]

    # ---- time --------------------------------------------------------------------------------------------------
    def tick(self, now: float) -> list[Command]:
        """Some time has passed: hints end, silent devices die, and hints leave those that have become a bad choice."""
        for pending in self.advisories.expire(now):
            # A hint that was given as unlikely was less of a lie.
            self.trust.ended(pending.hint.on_trust_of, pending.hint.address, 1.0 - pending.hint.chance)
        self.callgraphs.tick(now)
        for name in self.fleet.silent(now):
            self.directory.forget_node(name)
        self.fleet.note_states(now)
        commands: list[Command] = []
        for pending, gone in moves.candidates(self.fleet, self.advisories, now) if len(self.advisories) else ():
            commands += self._move(replace(pending, looked_s=now), now, gone=gone)
        return commands

    def _move(self, pending: Pending, now: float, *, gone: bool) -> list[Command]:
        """Choose again for a hint (`core.moves`)."""
        hint, turn = pending.hint, moves.turn_of(pending, now, gone=gone)
        view = self._view(hint.session, turn, now, pending)
        try:
            choice = place(view, turn, self.settings.policy, seed_of(hint.session))
        except RequestError:
            choice = None
        if choice is None or not moves.is_worth_it(view, turn, pending, choice.node, gone=gone):
            self.advisories.place(pending)
            return []
        self.advisories.outcomes["moved"] += 1
        sources, told = self._sources(hint.session, choice.node), pending.sent
        moved = replace(pending, node=choice.node, placed_s=now, left=(*pending.left, pending.node))
        self._explain("move", hint.session, turn, choice, now, moved, sources=sources)
        if told is not None:
            told = Sent(now, told.priority, hint.arrival_s, hint.expires_s)
        self.advisories.place(replace(moved, sent=told))
        if told is None:
            return []
        return [Withdraw(pending.node, hint.session), Prefetch(choice.node, replace(hint, priority=told.priority), sources)]

    # ---- nodes -------------------------------------------------------------------------------------------------
    def worker_left(self, name: str, now: float | None = None) -> None:
        """The worker's stream ended: what ran there is gone. Its hints are placed again by the next `tick`."""
        self.fleet.worker_left(name, now)

    def store_joined(self, name: str, address: str) -> None:
        """A store said hello: it will say anew what it holds."""
        self.directory.forget_node(name)
        self.fleet.store_joined(name, address)

    def held(self, name: str, reports: Iterable[Report], *, full: bool = False, joining: bool = False, number: int = 0) -> None:
        """A store's word on some of its sessions. full: on all, which may go on in more messages; joining: part of such a word.

        number: counts these messages of one stream from 1; one that comes again or late changes nothing. 0: not numbered.
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
        """The store's stream ended: what it held cannot be had from it."""
        self.fleet.store_left(name)
        self.directory.forget_node(name)

    def validate(self) -> None:
        """Raise AssertionError when the tables disagree."""
        for part in (self.fleet, self.directory, self.advisories, self.trust, self.explained, self.erasures, self.callgraphs):
            part.validate()
        columns = self.fleet.columns
        for row, name in enumerate(columns.names):
            right, expected = sum(p.chance for p in self.advisories.of_node(name)), columns.expected[:, row].sum()
            assert all(len(p.left) <= moves.MOVES and p.node not in p.left for p in self.advisories.of_node(name))
            assert abs(expected - right) < 1e-6 * max(1.0, right), f"{name}: {expected} requests expected instead of {right}"


def seed_of(session: SessionKey) -> int:
    """64 bits that depend on the session only."""
    return int.from_bytes(blake3(str(session).encode()).digest(8), "little")
