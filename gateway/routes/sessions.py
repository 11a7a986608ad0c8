"""`GET /v1/sessions`, `GET` and `DELETE /v1/sessions/{id}`, `GET /v1/sessions/{id}/placement`: a tenant's sessions, for
server keys."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from contracts.convert import session_from_wire
from contracts.errors import InvalidRequest, NotFound, Unavailable
from contracts.ids import check_session_id
from contracts.turn_times import checked
from contracts.v1 import common_pb2
from contracts.v1 import scheduler_pb2 as pb
from gateway import sse
from gateway.encoded_arrays import EncodedArray
from gateway.fleet import AT_A_TIME
from gateway.intake import charge_queries, server_caller_of
from gateway.parts import PARTS

DEFAULT_LIMIT = 100
MAX_LIMIT = 1_000
#: So many that are asked for count as one more query.
SESSIONS_A_QUERY = 50
#: Most recently used first; or by id, which is stable while pages are read.
ORDERS = ("last_use", "id")
#: The scheduler waits ten seconds for the nodes, so wait longer.
ERASE_TIMEOUT_S = 15.0


async def index(request: web.Request) -> web.Response:
    """A page of the sessions that some node holds, as OpenAI's list: `?limit=`, `?after=`, `?order=`."""
    caller = server_caller_of(request, counted=False)
    text, order, after = (
        request.query.get("limit", str(DEFAULT_LIMIT)),
        request.query.get("order", ORDERS[0]),
        request.query.get("after", ""),
    )
    limit = int(text[:9]) if text.isascii() and text.isdigit() else 0
    charge_queries(request, caller, 1 + min(limit, MAX_LIMIT) // SESSIONS_A_QUERY)
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidRequest(f"limit must be an integer from 1 to {MAX_LIMIT}", param="limit")
    if order not in ORDERS:
        raise InvalidRequest(f"order must be one of {', '.join(ORDERS)}", param="order")
    if after:
        check_session_id(after, "after")
    wanted = pb.ListSessionsRequest(tenant=caller.tenant, limit=limit, after=after, by_id=order == "id")
    found = await request.app[PARTS].fleet.sessions(wanted)
    if found is None:
        remedy = "begin anew, or list with order=id, where every id has a place"
        raise InvalidRequest(f"after: no node holds a session {after!r} any more; {remedy}", param="after")
    page, more = found
    data = EncodedArray()
    for at in range(0, len(page), AT_A_TIME):
        data.add([_summary(s) for s in page[at : at + AT_A_TIME]])
        await asyncio.sleep(0)
    ids = [page[at].session.session_id for at in (0, -1)] if page else [None, None]
    body = sse.encoded({"object": "list", "data": data, "first_id": ids[0], "last_id": ids[1], "has_more": more})
    return web.Response(body=body, content_type="application/json", charset="utf-8")


async def show(request: web.Request) -> web.Response:
    """A session's cache: tokens, layers and bytes per node and tier; or the state of its erasure per node."""
    caller = server_caller_of(request)
    session = _session(request, caller.tenant)
    reply = await request.app[PARTS].fleet.call(
        "GetSession", pb.GetSessionRequest(session=session), session=session_from_wire(session)
    )
    if not reply.known:
        raise _unknown(session.session_id)
    if reply.erasing:
        return web.json_response(
            {
                "id": session.session_id,
                "object": "session",
                "status": "erasing",
                "nodes": [_node(n) for n in reply.erasures],
            }
        )
    body = _summary(reply.summary) | {"id": session.session_id, "status": "kept"}
    return web.json_response(
        body | {"nodes": [{"node": n.node, "tiers": [_tier(t) for t in n.tiers]} for n in reply.nodes]}
    )


async def placement(request: web.Request) -> web.Response:
    """Why the session's last turns and hints were placed where they were, latest first, with the best nodes' scores by
    term."""
    caller = server_caller_of(request)
    session = _session(request, caller.tenant)
    # From its scheduler, from stand-ins, and from its workflow's scheduler.
    replies = await request.app[PARTS].fleet.call_all(
        "Explain", pb.ExplainRequest(session=session), session_from_wire(session)
    )
    made = sorted((d for reply in replies for d in reply.decisions), key=lambda d: d.ago_s)
    if not made:
        raise NotFound(
            f"no decision is remembered for a session {session.session_id!r}",
            param="session_id",
            code="placement_not_found",
        )
    decisions = [_decision(d) for d in made]
    return web.json_response({"id": session.session_id, "object": "session.placement", "decisions": decisions})


async def erase(request: web.Request) -> web.Response:
    """Erase a session from every tier of every node, and report whether every node has confirmed."""
    caller = server_caller_of(request)
    session = _session(request, caller.tenant)
    await request.app[PARTS].responses.forget(caller.tenant, session.session_id)
    wanted, parts = pb.EraseSessionRequest(session=session), request.app[PARTS]
    async with parts.erasing[caller.tenant]:
        reply = await parts.fleet.call("EraseSession", wanted, ERASE_TIMEOUT_S, session_from_wire(session))
    if not reply.known:
        raise _unknown(session.session_id)
    if not reply.taken:
        raise Unavailable("no node could record the erasure durably, so it has not begun; send it again")
    nodes = [_node(n) for n in reply.erasures]
    deleted = {"id": session.session_id, "object": "session.deleted", "deleted": True}
    return web.json_response(deleted | {"verified": reply.verified, "nodes": nodes})


def _session(request: web.Request, tenant: str) -> Any:
    return common_pb2.Session(
        tenant=tenant, session_id=check_session_id(request.match_info["session_id"], "session_id")
    )


def _unknown(session_id: str) -> NotFound:
    return NotFound(f"no node holds a session {session_id!r}", param="session_id", code="session_not_found")


def _node(n: Any) -> dict[str, Any]:
    return {"node": n.node, "answered": n.answered, "verified": n.verified, "left": {t.tier: t.chunks for t in n.left}}


def _summary(s: Any) -> dict[str, Any]:
    return {
        "id": s.session.session_id,
        "object": "session",
        "model": s.model,
        "tokens": s.tokens,
        "last_use_s": s.last_use_s,
        "node": s.node or None,
        "held_by": list(s.held_by),
    }


def _decision(d: Any) -> dict[str, Any]:
    return {
        "what": d.what,
        "ago_s": d.ago_s,
        "node": d.node,
        "request_id": d.request_id or None,
        "hinted": d.hinted,
        "prefetched_node": d.prefetched_node or None,
        "prefetched_s": d.prefetched_s if d.prefetched_node else None,
        "moves": d.moves,
        "pin_node": d.pin_node or None,
        "taken": d.taken,
        "avoided_nodes": d.avoided,
        "source_nodes": list(d.source_nodes),
        "worth": d.worth or None,
        "until_first_s": checked(d.until_first_s) or None,
        "after_s": checked(d.after_s) or None,
        "scores": [
            {"node": s.node, "sum": sum(s.terms.values()), "terms": dict(sorted(s.terms.items()))} for s in d.scores
        ],
    }


def _tier(t: Any) -> dict[str, Any]:
    return {
        "tier": t.tier,
        "tokens": t.tokens,
        "layers": sum(1 for chunks in t.layer_chunks if chunks),
        "layer_chunks": list(t.layer_chunks),
        "bytes": t.bytes,
    }
