"""`POST /v1/client_secrets`: a browser token for one session, or for sessions with a common id prefix. Needs a server
key.

The format follows OpenAI's ephemeral keys: `expires_after`, `value`, `expires_at`.
"""

from __future__ import annotations

import re
from typing import Any

from aiohttp import web

from contracts.errors import InvalidRequest
from contracts.ids import check_session_id
from gateway.core.browser_tokens import DEFAULT_LIFE_S, MAX_LIFE_S, MIN_LIFE_S, Grant
from gateway.intake import check_json_type, read_json, server_caller_of
from gateway.parts import PARTS

_FIELDS = {"session_id", "session_prefix", "expires_after", "origin"}
#: The form of browsers' Origin header.
_ORIGIN = re.compile(r"https?://([a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])(:[0-9]{1,5})?")
#: The most urgent priority of a token's hints, whatever its key may use.
_MAX_PRIORITY = 0


async def create(request: web.Request) -> web.Response:
    """Sign a token; nothing is stored."""
    caller = server_caller_of(request, counted=False)
    parts = request.app[PARTS]
    check_json_type(request)
    data = await read_json(request, caller.tenant)
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be an object with session_id or session_prefix")
    for name in data:
        if name not in _FIELDS:
            known = ", ".join(sorted(_FIELDS))
            raise InvalidRequest(
                f"unknown field {name[:80]}; known: {known}", param=name[:80], code="unknown_parameter"
            )
    given = [name for name in ("session_id", "session_prefix") if data.get(name) is not None]
    if len(given) != 1:
        code = "invalid_value" if given else "missing_required_parameter"
        raise InvalidRequest("give either session_id or session_prefix", param="session_id", code=code)
    session = check_session_id(data[given[0]], given[0])
    grant = Grant(
        tenant=caller.tenant,
        session=session,
        prefix=given[0] == "session_prefix",
        max_priority=caller.priority(_MAX_PRIORITY),
        origin=_origin(data.get("origin")),
        ends_s=int(parts.clock.wall()) + _life_s(data.get("expires_after")),
    )
    body = {
        "object": "client_secret",
        "value": parts.browser_tokens.sign(grant),
        "expires_at": grant.ends_s,
        given[0]: session,
        "origin": grant.origin or None,
        "permissions": ["advise", "invalidate"],
    }
    return web.json_response(body, headers={"Cache-Control": "no-store"})


def _life_s(value: Any) -> int:
    if value is None:
        return DEFAULT_LIFE_S
    if (
        not isinstance(value, dict)
        or set(value) - {"anchor", "seconds"}
        or value.get("anchor", "created_at") != "created_at"
    ):
        raise InvalidRequest('expires_after must be {"anchor": "created_at", "seconds": ...}', param="expires_after")
    seconds = value.get("seconds", DEFAULT_LIFE_S)
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not MIN_LIFE_S <= seconds <= MAX_LIFE_S:
        raise InvalidRequest(
            f"expires_after.seconds must be an integer from {MIN_LIFE_S} to {MAX_LIFE_S}",
            param="expires_after.seconds",
            code="invalid_value",
        )
    return seconds


def _origin(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or not _ORIGIN.fullmatch(value):
        raise InvalidRequest(
            "origin must be a page's origin as browsers send it, in lower case and without a path: https://chat.example.org",
            param="origin",
        )
    return value
