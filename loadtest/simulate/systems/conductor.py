"""Runs a simulated system: shows it the nodes, and carries out its placements, migrations and decisions on KV.

Live migration as in Llumnix: the KV is copied while the request goes on decoding; it moves when the copy is complete.
The few tokens decoded meanwhile are not copied here.
"""

from __future__ import annotations

from loadtest.simulate.events import Events
from loadtest.simulate.request import Request
from loadtest.simulate.systems.contract import Active, Migration, Paused, System, View
from loadtest.simulate.systems.node import OtherNode
from loadtest.simulate.systems.running import Running

#: Requests with fewer tokens left do not migrate.
_LEAST_LEFT_TOKENS = 32


class Conductor:
    """See the module. migrated: number of requests moved; given_up: of those that ended before their copy was
    complete."""

    def __init__(self, events: Events, system: System, nodes: dict[str, OtherNode]) -> None:
        self._events, self._system, self._nodes = events, system, nodes
        self._moving: set[str] = set()
        self.migrated = self.given_up = 0
        if system.migrates_every_s:
            self._look()

    def place(self, request: Request) -> tuple[str, tuple[str, ...]]:
        """(node for a turn, other nodes to fetch its KV from)."""
        node = self._system.place(request.session, request.group, self._events.now, self._views())
        return node, tuple(name for name in self._system.sources(request.session) if name != node)

    def keep(self, node: OtherNode, sequence: Running) -> frozenset[str]:
        """The tiers of its node that keep an ended turn's KV."""
        request, kind = sequence.request, node.kind
        tokens = request.prompt_tokens + request.answer_tokens
        bytes_ = tokens * node.token_bytes
        paused = Paused(
            request.session,
            tokens,
            kind.costs.prefill_s(tokens, 0),
            bytes_ / kind.dram_bytes_per_s,
            sum(s.context_tokens for s in node.outstanding.values() if s.admitted),
            node.token_bytes,
        )
        return self._system.ended(paused, node.name, self._events.now)

    def _views(self) -> list[View]:
        return [
            View(n.name, len(n.outstanding), n.running, n.hbm.capacity_bytes, n.hbm.in_use_bytes, n.queued_bytes)
            for n in self._nodes.values()
        ]

    def _look(self) -> None:
        self._events.at(self._events.now + self._system.migrates_every_s, self._look)
        for node in self._nodes.values():
            node.engine.catch_up()
        active = {
            name: [_active(s) for s in node.outstanding.values() if self._able(s)] for name, node in self._nodes.items()
        }
        for migration in self._system.migrations(self._views(), active):
            self._begin(migration)

    def _able(self, s: Running) -> bool:
        left = s.request.answer_tokens - s.generated
        return s.decoding_from >= 0 and left >= _LEAST_LEFT_TOKENS and s.request.request_id not in self._moving

    def _begin(self, migration: Migration) -> None:
        source, target = self._nodes[migration.source], self._nodes[migration.target]
        sequence = source.outstanding[migration.request_id]
        if not target.expect(sequence.need_bytes):
            return
        self._moving.add(migration.request_id)

        def gone(there: bool) -> None:
            self._moving.discard(migration.request_id)
            if there:
                self.migrated += 1
                source.hand_over(sequence)
                target.receive(sequence)
            else:
                self.given_up += 1
                target.unexpect(sequence.need_bytes)

        def copied() -> None:
            if migration.request_id in source.outstanding:
                source.engine.leave(sequence, gone)
            else:
                gone(False)

        target.link.send(float(sequence.context_tokens * source.token_bytes), (0, sequence.request.priority), copied)


def _active(s: Running) -> Active:
    return Active(s.request.request_id, s.need_bytes, s.request.priority)
