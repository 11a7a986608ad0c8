"""What becomes of a hint: where it is placed, what its store is told, when it moves and how its end counts for trust.

Not decided here: how pending hints are kept (`core.advisories`), which of them may move (`core.moves`), and how much
prefetch a caller gets (`core.trust`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from contracts.devices import is_of
from contracts.errors import RequestError
from contracts.ids import SessionKey
from scheduler.core import moves
from scheduler.core.advisories import Hint, Pending, Sent, merged
from scheduler.core.columns import urgency_class
from scheduler.core.commands import Command, Prefetch, Wake, Withdraw
from scheduler.core.placer import Placer
from scheduler.core.snapshot import PlacementRequest
from scheduler.core.trust import DOUBT_PRIORITY, Trust, Worth

#: A hint that is renewed for this long without its request counts as false, in seconds.
RENEWED_S = 300.0


class Hints:
    """See the module. Mutates the placer's advisories and `trust`."""

    def __init__(self, placer: Placer, trust: Trust) -> None:
        self._placer, self._trust, self._advisories = placer, trust, placer.advisories
        #: Hints received, by what was done: prefetched (`full`, `behind`), `noted` (not prefetched), `known` (the
        #: store was not told again), `unusable`.
        self.received: Counter[str] = Counter()

    def advise(self, hint: Hint, now: float) -> list[Command]:
        """Handle a hint; commands for the stores.

        A hint without a model gets the session's last one. A hint of a session that has one is merged with it and keeps
        its node while that serves; the store is told only what changed (`Sent.is_outdated`). A hint that no node can
        take is counted as `unusable` and dropped.
        """
        placer = self._placer
        before = self._advisories.get(hint.session)
        if before is not None:
            hint = merged(before.hint, hint, now)
        if not hint.model:
            hint = replace(hint, model=placer.last_model(hint.session))
        if (
            before is not None
            and (not hint.pin or is_of(hint.pin, before.node))
            and placer.fleet.serves(before.node, hint.model, now)
        ):
            pending = replace(before, hint=hint)
            if now - before.placed_s > RENEWED_S:
                self._trust.ended(hint.on_trust_of, hint.address, 0.0)
                pending = replace(pending, placed_s=now)
        else:
            turn = PlacementRequest(
                hint.model, advised=True, lead_s=hint.lead_s(now), pin=hint.pin, urgency=urgency_class(hint.priority)
            )
            try:
                choice = placer.choose(hint.session, turn, placer.view(hint.session, turn, now, before))
            except RequestError:
                self.received["unusable"] += 1
                return []
            pending = Pending(hint, choice.node, now)
            worth = self._trust.worth(hint.on_trust_of, hint.address).value
            placer.explain("hint", hint.session, turn, choice, now, worth=worth)
        commands: list[Command] = []
        if before is not None and before.sent is not None and pending.node != before.node:
            commands.append(Withdraw(before.node, hint.session))
        return commands + self._record(pending, now)

    def _record(self, pending: Pending, now: float) -> list[Command]:
        """Keep a hint. Prefetch its cache if trust and budgets allow it and the store does not know the hint."""
        hint, sent = pending.hint, pending.sent
        worth = self._trust.worth(hint.on_trust_of, hint.address)
        priority = hint.priority + (DOUBT_PRIORITY if worth is Worth.BEHIND else 0)
        if sent is not None and (worth is Worth.NOTED or not sent.is_outdated(hint, priority, now)):
            self.received["known"] += 1
            return self._keep(pending)
        tokens = self._placer.cached_tokens(hint.session)
        if worth is Worth.NOTED or not self._trust.take(hint.on_trust_of, hint.address, now, tokens):
            self.received["noted"] += 1
            return self._keep(pending if sent is not None else replace(pending, chance=0.0))
        self.received[worth.value] += 1
        chance = hint.chance * self._trust.chance(hint.on_trust_of, hint.address)
        told = Sent(sent.at_s if sent is not None else now, priority, hint.arrival_s, hint.expires_s)
        withdrawn = self._keep(replace(pending, chance=chance, sent=told))
        sources = self._placer.sources(hint.session, pending.node, now)
        return withdrawn + self._prefetch(pending.node, replace(hint, priority=priority), sources, now)

    def _keep(self, pending: Pending) -> list[Command]:
        """Keep a hint. The stores forget those that are dropped for it."""
        return [Withdraw(p.node, p.session) for p in self._advisories.place(pending) if p.sent is not None]

    def _prefetch(self, node: str, hint: Hint, sources: tuple[str, ...], now: float) -> list[Command]:
        """Bring the session's cache to the device, and its model's weights."""
        commands: list[Command] = [Prefetch(node, hint, sources)]
        if self._placer.fleet.is_cold(node, hint.model):
            arrival_s = now if hint.arrival_s is None else hint.arrival_s
            commands.append(Wake(node, hint.model, arrival_s, hint.expires_s))
        return commands

    def route(self, session: SessionKey, advisory_id: str, now: float) -> tuple[str, tuple[str, ...], int] | None:
        """Where the turn of this hint may go without asking: the device, nodes with its cache, and tokens cached.

        None: the gateway must ask; always so for hints that were not prefetched.
        """
        pending = self._advisories.get(session)
        if pending is None or pending.sent is None or pending.hint.advisory_id != advisory_id:
            return None
        if not self._placer.fleet.serves(pending.node, pending.hint.model, now):
            return None
        return pending.node, self._placer.sources(session, pending.node, now), self._placer.cached_tokens(session)

    def withdraw(self, session: SessionKey | None, tenant: str, advisory_id: str) -> list[Command] | None:
        """The caller withdraws a hint, named by its session or its id. None: there is none."""
        pending = self._advisories.invalidate(session, tenant, advisory_id)
        if pending is None:
            return None
        self._trust.ended(pending.hint.on_trust_of, pending.hint.address, 0.5)
        return [Withdraw(pending.node, pending.session)]

    def expire(self, now: float, most: int) -> None:
        """Drop at most so many expired hints. One that was given as unlikely costs less trust."""
        for pending in self._advisories.expire(now, most):
            self._trust.ended(pending.hint.on_trust_of, pending.hint.address, 1.0 - pending.hint.chance)

    def move(self, now: float) -> list[Command]:
        """Move hints away from devices that have become a bad choice (`core.moves`)."""
        commands: list[Command] = []
        due = moves.candidates(self._placer.fleet, self._advisories, now) if len(self._advisories) else ()
        for pending, gone in due:
            commands += self._place_again(replace(pending, looked_s=now), now, gone=gone)
        return commands

    def _place_again(self, pending: Pending, now: float, *, gone: bool) -> list[Command]:
        placer, hint, turn = self._placer, pending.hint, moves.turn_of(pending, now, gone=gone)
        view = placer.view(hint.session, turn, now, pending)
        try:
            choice = placer.choose(hint.session, turn, view)
        except RequestError:
            choice = None
        if choice is None or not moves.is_worth_it(view, turn, pending, choice.node, gone=gone):
            self._advisories.place(pending)
            return []
        self._advisories.outcomes["moved"] += 1
        sources, told = placer.sources(hint.session, choice.node, now), pending.sent
        moved = replace(pending, node=choice.node, placed_s=now, left=(*pending.left, pending.node))
        placer.explain("move", hint.session, turn, choice, now, moved, sources=sources)
        if told is not None:
            told = Sent(now, told.priority, hint.arrival_s, hint.expires_s)
        self._advisories.place(replace(moved, sent=told))
        if told is None:
            return []
        return [
            Withdraw(pending.node, hint.session),
            *self._prefetch(choice.node, replace(hint, priority=told.priority), sources, now),
        ]
