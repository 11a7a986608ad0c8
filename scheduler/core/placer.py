"""Chooses a device for a turn or a hint from all that the scheduler knows, and records why.

The choice itself is `core.placement`. What a hint does once it is placed: `core.hints`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from blake3 import blake3

from contracts.devices import node_of
from contracts.ids import SessionKey
from scheduler.core import snapshot
from scheduler.core.advisories import Advisories, Pending
from scheduler.core.decisions import Decision, Decisions
from scheduler.core.directory import Directory
from scheduler.core.fleet import Fleet
from scheduler.core.model_moves import ModelMoves
from scheduler.core.placement import Choice, place
from scheduler.core.policies import Policy
from scheduler.core.snapshot import PlacementRequest, Snapshot

#: A turn that has left nothing for so long after it was placed has failed, unless it is still under way, in seconds.
UNREPORTED_S = 60.0


class Placer:
    """Fleet, session directory, pending hints and past decisions, and choices made from them.

    models: the registered ones. `count`: turns placed so far.
    """

    def __init__(
        self,
        policy: Policy,
        models: tuple[str, ...],
        pinned: frozenset[str] = frozenset(),
        min_nodes: Mapping[str, int] | None = None,
    ) -> None:
        self._policy, self._models = policy, models
        self.fleet, self.directory, self.explained = Fleet(), Directory(), Decisions()
        self.fleet.registered = frozenset(models)
        self.advisories = Advisories(self.fleet.columns.expect)
        self.model_moves = ModelMoves(self.fleet, pinned, min_nodes)
        self.count = 0

    def view(self, session: SessionKey, turn: PlacementRequest, now: float, pending: Pending | None) -> Snapshot:
        """The snapshot for a decision. It leaves out the session's own hint, which would keep it off its own node."""
        expect = self.fleet.columns.expect
        if pending is not None:
            expect(pending.node, pending.urgency, -pending.chance)
        known, last = self.directory.get(session), self.unreported(session, turn.model, now)
        view = snapshot.take(self.fleet, known, turn.model, now, self.count, last)
        if pending is not None:
            expect(pending.node, pending.urgency, pending.chance)
        return view

    def choose(self, session: SessionKey, turn: PlacementRequest, view: Snapshot) -> Choice:
        """The device for this turn or hint; one that the model is leaving only if there is no other. Raises what
        `filters.eligible` raises."""
        leaving = self.model_moves.leaving(turn.model)
        if leaving and any(here and name not in leaving for name, here in zip(view.names, view.here, strict=True)):
            turn = replace(turn, avoid=frozenset(turn.avoid) | leaving)
        return place(view, turn, self._policy, seed_of(session))

    def explain(
        self,
        what: str,
        session: SessionKey,
        turn: PlacementRequest,
        choice: Choice,
        now: float,
        pending: Pending | None = None,
        **more: Any,
    ) -> None:
        """Record a decision; `more`: further fields of `Decision`."""
        known = self.directory.get(session)
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
            known_s=known.last_use_s if known is not None else 0.0,
            **more,
        )
        self.explained.note(session, decision)

    def sources(self, session: SessionKey, node: str, now: float) -> tuple[str, ...]:
        """Other nodes to fetch the session's cache from, best first; includes that of `unreported`."""
        known = self.directory.get(session)
        held = tuple(known.sources(without=node_of(node))) if known else ()
        last = self.unreported(session, self.last_model(session), now)
        return held if last in ("", node_of(node), *held) else (*held, last)

    def unreported(self, session: SessionKey, model: str, now: float) -> str:
        """The node that runs the session's last turn with this model, or has just ended it, as long as no store has
        reported what that turn computed and its own is here (docs/design/0056); empty: none."""
        turn, known = self.explained.last_turn(session), self.directory.get(session)
        if turn is None or turn.model != model or (known is not None and known.last_use_s != turn.known_s):
            return ""
        if now - turn.at_s > UNREPORTED_S and not self.fleet.where(turn.request_id):
            return ""
        node = self.fleet.nodes.get(node_of(turn.node))
        lost = node is None or not node.store_here or all(device.dead for device in node.devices)
        return "" if lost else node_of(turn.node)

    def cached_tokens(self, session: SessionKey) -> int:
        """Tokens of the session's newest manifest; 0: not known."""
        known = self.directory.get(session)
        return known.tokens if known else 0

    def last_model(self, session: SessionKey) -> str:
        """The model of the session's last turn, else of its cache, else the only registered one; empty: unknown."""
        known = self.directory.get(session)
        only = self._models[0] if len(self._models) == 1 else ""
        return self.explained.last_model(session) or (known.model if known is not None else "") or only


def seed_of(session: SessionKey) -> int:
    """64 bits that depend on the session only."""
    return int.from_bytes(blake3(str(session).encode()).digest(8), "little")
