"""The scheduler's core as one: what happened goes in with its time, placements and commands to nodes come out.

The process (`scheduler.server`) and the simulator run this very code; neither decides anything itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from blake3 import blake3

from contracts.errors import RequestError
from contracts.ids import SessionKey
from scheduler.core import snapshot, terms
from scheduler.core.advisories import Advisories, Hint, Pending, merged
from scheduler.core.columns import urgency_class
from scheduler.core.directory import Directory
from scheduler.core.erasures import Erasures
from scheduler.core.fleet import SUSPECT_AFTER_S, Fleet
from scheduler.core.placement import Choice, place
from scheduler.core.policies import Policy, balanced
from scheduler.core.snapshot import Turn
from scheduler.core.trust import DOUBT_PRIORITY, Trust, Worth

#: A hint leaves a node that has so much more work than the best, in typical requests.
_MOVE_REQUESTS = 4.0
#: Hints that are moved at most each time.
_MOVES = 256


@dataclass(frozen=True, slots=True)
class Ask:
    """A turn that is here. avoid: nodes that just failed it; pin: the node that must run it."""

    request_id: str
    session: SessionKey
    model: str
    priority: int = 0
    pin: str = ""
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a turn goes. sources: nodes that hold its cache, best first. advised: a hint had sent the cache there."""

    choice: Choice
    sources: tuple[str, ...]
    advised: bool

    @property
    def node(self) -> str:
        """Its name."""
        return self.choice.node


@dataclass(frozen=True, slots=True)
class Prefetch:
    """To a node's store: bring this session's cache up. `hint.priority` includes what trust takes away."""

    node: str
    hint: Hint
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """To a node's store: what was brought for this session's hint may go first."""

    node: str
    session: SessionKey


Command = Prefetch | Withdraw


@dataclass(frozen=True, slots=True)
class Settings:
    """What the configuration says. hints_per_s, hint_burst: of each tenant and of each of its addresses, that are prefetched."""

    policy: Policy = balanced
    served_model: str = ""
    hints_per_s: float = 200.0
    hint_burst: float = 1000.0


class Control:
    """See the module. All state is soft. Methods mutate it and raise RequestError for what the caller did wrong."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.fleet, self.directory, self.erasures = Fleet(), Directory(), Erasures()
        self.advisories = Advisories(self.fleet.columns.expect)
        self.trust = Trust(self.settings.hints_per_s, self.settings.hint_burst)
        self.decisions = 0

    # ---- turns -------------------------------------------------------------------------------------------------
    def place(self, ask: Ask, now: float) -> Placement:
        """The node for a turn that is here; it counts as outstanding there."""
        pending = self.advisories.use(ask.session)
        if pending is not None:
            self.trust.ended(ask.session.tenant, pending.hint.address, 1.0)
        prefetched = pending.node if pending is not None and pending.prefetched else ""
        turn = Turn(ask.model, prefetched=prefetched, pin=ask.pin, avoid=ask.avoid, urgency=urgency_class(ask.priority))
        choice = self._choose(ask.session, turn, now, self.settings.policy)
        self.decisions += 1
        self.fleet.placed(choice.node, ask.request_id, now, ask.priority)
        return Placement(choice, self._sources(ask.session, choice.node), advised=choice.node == prefetched)

    def _choose(self, session: SessionKey, turn: Turn, now: float, policy: Policy) -> Choice:
        view = snapshot.take(self.fleet, self.directory.get(session), turn.model, now, self.decisions)
        return place(view, turn, policy, seed_of(session))

    def _sources(self, session: SessionKey, node: str) -> tuple[str, ...]:
        known = self.directory.get(session)
        return tuple(known.sources(without=node)) if known else ()

    # ---- hints -------------------------------------------------------------------------------------------------
    def advise(self, hint: Hint, now: float) -> list[Command]:
        """A hint came. One that nobody can use is dropped without a word; one more of the same session is merged with the first."""
        before = self.advisories.get(hint.session)
        if before is not None:
            hint = merged(before.hint, hint, now)
        known = self.directory.get(hint.session)
        hint = replace(hint, model=hint.model or (known.model if known else "") or self.settings.served_model)
        keep = before is not None and not hint.pin and self._serves(before.node, hint.model)
        pin = before.node if before is not None and keep else hint.pin
        turn = Turn(hint.model, advised=True, pin=pin, urgency=urgency_class(hint.priority))
        try:
            node = self._choose(hint.session, turn, now, self.settings.policy).node
        except RequestError:
            return []
        worth = self.trust.worth(hint.session.tenant, hint.address, now)
        chance = self.trust.chance(hint.session.tenant, hint.address)
        self.advisories.place(Pending(hint, node, now, chance, prefetched=worth is not Worth.NOTED))
        commands: list[Command] = [Withdraw(before.node, hint.session)] if before is not None and before.node != node else []
        if worth is Worth.NOTED:
            return commands
        priority = hint.priority + (DOUBT_PRIORITY if worth is Worth.BEHIND else 0)
        return [*commands, Prefetch(node, replace(hint, priority=priority), self._sources(hint.session, node))]

    def withdraw(self, session: SessionKey | None, tenant: str, advisory_id: str) -> list[Command] | None:
        """A hint is taken back, named by its session or its id. None: there was none."""
        pending = self.advisories.invalidate(session, tenant, advisory_id)
        if pending is None:
            return None
        self.trust.ended(pending.session.tenant, pending.hint.address, 0.5)
        return [Withdraw(pending.node, pending.session)]

    def _serves(self, name: str, model: str) -> bool:
        node = self.fleet.nodes.get(name)
        return node is not None and node.serving and any(m.name == model for m in node.models)

    # ---- time --------------------------------------------------------------------------------------------------
    def tick(self, now: float) -> list[Command]:
        """Some time has passed: hints end, silent nodes die, and hints leave nodes that have become a bad choice."""
        for pending in self.advisories.expire(now):
            self.trust.ended(pending.session.tenant, pending.hint.address, 0.0)
        for name in self.fleet.silent(now):
            self.directory.forget_node(name)
        return self._move(now)

    def _move(self, now: float) -> list[Command]:
        """Hints of nodes that serve no more, or have far more work than the best, are placed again."""
        columns, n, request_s = self.fleet.columns, self.fleet.columns.count, self.fleet.request_s
        if not n or not len(self.advisories):
            return []
        work = columns.reported_s[:, :n].sum(axis=0) + (columns.young_count[:, :n].sum(axis=0) + columns.expected[:n]) * request_s
        able = columns.serving[:n] & (now - columns.heard_s[:n] <= SUSPECT_AFTER_S)
        if not able.any():
            return []
        bad = ~able | (work - work[able].min() > _MOVE_REQUESTS * request_s)
        commands: list[Command] = []
        for row in np.flatnonzero(bad).tolist():
            for pending in self.advisories.of_node(columns.names[row])[: _MOVES - len(commands)]:
                commands += self._move_one(pending, now, gone=not able[row])
        return commands

    def _move_one(self, pending: Pending, now: float, *, gone: bool) -> list[Command]:
        hint = pending.hint
        view = snapshot.take(self.fleet, self.directory.get(hint.session), hint.model, now, self.decisions)
        turn = Turn(hint.model, advised=True, urgency=urgency_class(hint.priority), avoid=frozenset({pending.node} if gone else ()))
        try:
            node = place(view, turn, self.settings.policy, seed_of(hint.session)).node
        except RequestError:
            return []
        there = np.array([columns_row(view, node)])
        late = hint.arrival_s is not None and float(terms.load_s(view, replace(turn, advised=False), there)[0]) > hint.arrival_s - now
        if hint.pin or node == pending.node or (late and not gone):
            return []
        self.advisories.outcomes["moved"] += 1
        self.advisories.place(replace(pending, node=node))
        if not pending.prefetched:
            return []
        return [Withdraw(pending.node, hint.session), Prefetch(node, hint, self._sources(hint.session, node))]

    # ---- nodes -------------------------------------------------------------------------------------------------
    def worker_left(self, name: str) -> None:
        """The worker's stream ended: what ran there is gone. Its hints are placed again by the next `tick`."""
        self.fleet.worker_left(name)

    def store_left(self, name: str) -> None:
        """The store's stream ended: what it held cannot be had from it."""
        self.fleet.store_left(name)
        self.directory.forget_node(name)

    def validate(self) -> None:
        """Raise AssertionError when the tables disagree."""
        for part in (self.fleet, self.directory, self.advisories, self.trust, self.erasures):
            part.validate()
        columns = self.fleet.columns
        for row, name in enumerate(columns.names):
            right, expected = sum(p.chance for p in self.advisories.of_node(name)), columns.expected[row]
            assert abs(expected - right) < 1e-6 * max(1.0, right), f"{name}: {expected} requests expected instead of {right}"


def columns_row(view: snapshot.Snapshot, node: str) -> int:
    """The row of a node that is there."""
    row = view.row(node)
    assert row is not None
    return row


def seed_of(session: SessionKey) -> int:
    """64 bits that depend on the session only."""
    return int.from_bytes(blake3(str(session).encode()).digest(8), "little")
