"""`POST /v1/advisory`, `POST /v1/invalidate`: answered at once, sent to the scheduler in the background.

The answer is the same whether or not the session exists. Bodies may be `text/plain` with the credential in `token`, so
that browsers need no preflight. Browser tokens are valid on these routes only.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import replace

from aiohttp import web

from contracts.advisory import parse_advisories
from contracts.convert import advisory_to_wire
from contracts.errors import Forbidden, InvalidRequest
from contracts.ids import SessionKey, check_session_id
from contracts.v1 import common_pb2
from contracts.v1 import scheduler_pb2 as pb
from gateway import sse
from gateway.allowance import Limited
from gateway.intake import Hinter, pinned_node, read_hint
from gateway.parts import PARTS
from gateway.request_ids import id_of
from gateway.responses.ids import is_response_id
from gateway.timing import ARRIVED_S
from gateway.tracing import trace_hints
from runtime import telemetry

log = telemetry.logger("gateway.advisory")
_INVALIDATE_FIELDS = {"session_id", "advisory_id", "token"}


async def advise(request: web.Request) -> web.Response:
    """One advisory or a batch."""
    parts = request.app[PARTS]
    data, hinter = await read_hint(request)
    caller = hinter.caller
    advisories = parse_advisories(data)
    for i, advisory in enumerate(advisories):
        hinter.check_session(
            advisory.session_id, f"advisories[{i}].session_id" if "advisories" in data else "session_id"
        )
    pin = pinned_node(request, caller, parts)
    _limit(request, hinter, len(advisories))
    named = [await _session(request, caller.tenant, advisory.session_id) for advisory in advisories]
    accepted, wire = [], []
    address = parts.callers.digest(request.remote)
    trace = trace_hints(request, caller.tenant, request[ARRIVED_S])
    wired = trace.context.to_wire() if trace is not None else ""
    for advisory, session_id in zip(advisories, named, strict=True):
        advisory_id = f"adv-{secrets.token_hex(12)}"
        priority = caller.priority(advisory.priority)
        clamped = advisory
        if (priority, session_id) != (advisory.priority, advisory.session_id):
            clamped = replace(advisory, priority=priority, session_id=session_id)
        wire.append(advisory_to_wire(clamped, caller.tenant, advisory_id, pin, address, wired))
        accepted.append({"advisory_id": advisory_id, "session_id": advisory.session_id, "status": "accepted"})
    parts.hints.advise(wire)
    ids = [advisory.advisory_id for advisory in wire]
    if log.is_enabled_for(logging.DEBUG):
        log.debug("advised", request=id_of(request), advisories=ids)
    if trace is not None:
        trace.end(id_of(request), ids, [SessionKey(caller.tenant, name) for name in named], parts.clock.now())
    body = sse.encoded({"advisories": accepted} if "advisories" in data else accepted[0])
    return web.Response(status=202, body=body, headers={"Content-Type": "application/json; charset=utf-8"})


async def invalidate(request: web.Request) -> web.Response:
    """Withdraw a session's hints, or one advisory."""
    parts = request.app[PARTS]
    data, hinter = await read_hint(request)
    caller = hinter.caller
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be an object with session_id or advisory_id")
    for name in data:
        if name not in _INVALIDATE_FIELDS:
            raise InvalidRequest(
                f"unknown field {name[:80]}; known: session_id, advisory_id", param=name[:80], code="unknown_parameter"
            )
    given = [name for name in ("session_id", "advisory_id") if data.get(name) is not None]
    if len(given) != 1:
        code = "invalid_value" if given else "missing_required_parameter"
        raise InvalidRequest("give either session_id or advisory_id", param="session_id", code=code)
    value = check_session_id(data[given[0]], given[0])
    if hinter.grant is not None and given[0] != "session_id":
        # The gateway does not know the session of an advisory id.
        raise Forbidden(
            "a browser token withdraws hints by session_id", param="advisory_id", code="client_secret_scope"
        )
    hinter.check_session(value, given[0])
    _limit(request, hinter, 1)
    session_id, advisory_id = "", value
    if given[0] == "session_id":
        session_id, advisory_id = await _session(request, caller.tenant, value), ""
    parts.hints.invalidate(
        pb.InvalidateRequest(
            session=common_pb2.Session(tenant=caller.tenant, session_id=session_id), advisory_id=advisory_id
        )
    )
    return web.json_response({given[0]: value, "status": "accepted"}, status=202)


async def _session(request: web.Request, tenant: str, name: str) -> str:
    """The session that a hint names: by its id, or by the id of one of its responses."""
    if not is_response_id(name):
        return name
    return await request.app[PARTS].responses.session(tenant, name) or name


def _limit(request: web.Request, hinter: Hinter, hints: int) -> None:
    parts = request.app[PARTS]
    if hinter.grant is not None:
        wait_s = parts.browser_limits.take(hinter.token, hints, parts.clock.now())
        if wait_s:
            raise Limited("too many hints with one browser token", min(wait_s, 60.0))
    wait_s = parts.limits.take(hinter.caller.tenant, hints, parts.clock.now())
    if wait_s:
        raise Limited(f"more than {parts.limits.per_s:g} hints a second; try again in {wait_s:.1f} s", wait_s)
