"""`GET /v1/sessions/{id}/events`: a stream of where a session's cache is, at each change. For server keys; the
playground draws it."""

from __future__ import annotations

from aiohttp import web

from contracts.ids import SessionKey, check_session_id
from gateway import sse, watching
from gateway.allowance import Limited
from gateway.intake import server_caller_of
from gateway.parts import PARTS

#: A stream ends after this time; clients reconnect.
LIFE_S = 900.0
#: Tells browsers to reconnect after 1,000 ms.
_RETRY = b"retry: 1000\n\n"
#: `Retry-After` when there are too many streams, in seconds.
_RETRY_S = 10.0
_BEAT = b": still here\n\n"


async def follow(request: web.Request) -> web.StreamResponse:
    """A stream of snapshots, at most five a second. An unknown session has `known: false`."""
    caller, parts = server_caller_of(request), request.app[PARTS]
    session = SessionKey(caller.tenant, check_session_id(request.match_info["session_id"], "session_id"))
    ends_s = parts.clock.now() + LIFE_S
    if parts.watches.is_full(caller.tenant):
        most = watching.MAX_TENANT_STREAMS
        raise Limited(
            f"too many sessions are watched; at most {most} streams at a time", _RETRY_S, code="too_many_streams"
        )
    async with parts.watches.pictures(session) as pictures:
        response = web.StreamResponse(headers=sse.HEADERS)
        await response.prepare(request)
        await response.write(_RETRY)
        async for picture in pictures:
            await response.write(_BEAT if picture is None else sse.event(picture.body(session.session_id)))
            if parts.draining or parts.clock.now() >= ends_s:
                break
        await pictures.aclose()
    await response.write_eof()
    return response
