"""Hints inside a request for text (`gateway.core.spellings`): some are sent at once, the others after the answer."""

from __future__ import annotations

import secrets
from typing import Any

from aiohttp import web

from contracts.advisory import Advisory
from contracts.convert import advisory_to_wire
from contracts.v1 import common_pb2
from contracts.v1 import scheduler_pb2 as pb
from gateway import metrics
from gateway.core import kv_hints
from gateway.core.admission import Caller
from gateway.core.spellings import Spelled
from gateway.parts import PARTS

#: Seconds for which a session counts as about to go on after its answer has called tools.
RESULT_S = 60.0


class InlineHints:
    """The inline hints of one request. They count against the caller's hint limit when the request begins; over the
    limit they are dropped and the request continues.

    results: the answer's `kv_hints`; None when the request has none.
    """

    def __init__(
        self, request: web.Request, caller: Caller, said: Spelled, session_id: str, model: str, priority: int
    ) -> None:
        self._parts, self._remote, self._caller = request.app[PARTS], request.remote, caller
        self._session_id, self._model, self._priority = session_id, model, priority
        self._actions = said.actions
        rejected = False
        if self._actions:
            hints = kv_hints.count(self._actions, session_id)
            rejected = bool(self._parts.limits.take(caller.tenant, hints, self._parts.clock.now()))
            if rejected:
                metrics.HINTS.labels("advisory", "limited").inc(hints)
                self._actions = ()
        self.results: dict[str, Any] | None = said.envelope.answer(rejected) if said.envelope is not None else None

    def tell(self, *, after: bool) -> None:
        """Send the hints that are due at once, or those due after the answer."""
        if not self._actions:
            return
        advisories, withdrawn = kv_hints.due(self._actions, self._session_id, self._model, self._priority, after=after)
        tenant, hints = self._caller.tenant, self._parts.hints
        caller = self._parts.callers.digest(self._remote)
        hints.advise([advisory_to_wire(a, tenant, f"adv-{secrets.token_hex(12)}", caller=caller) for a in advisories])
        for session_id in withdrawn:
            hints.invalidate(pb.InvalidateRequest(session=common_pb2.Session(tenant=tenant, session_id=session_id)))


def expect_result(request: web.Request, caller: Caller, session_id: str, model: str, priority: int = 0) -> None:
    """Hint that a session goes on soon: its answer has called tools, whose results come back. Counts against the
    caller's hint limit; over it, nothing is sent."""
    parts = request.app[PARTS]
    if parts.limits.take(caller.tenant, 1, parts.clock.now()):
        metrics.HINTS.labels("advisory", "limited").inc()
        return
    advisory = Advisory(session_id, model, priority=caller.priority(priority), ttl_s=RESULT_S)
    address = parts.callers.digest(request.remote)
    wire = advisory_to_wire(advisory, caller.tenant, f"adv-{secrets.token_hex(12)}", caller=address)
    parts.hints.advise([wire])
