"""A request's id, in every service's log lines about it, and in `X-Request-Id` of its answer.

A turn has an id of its own, which no other has. A caller's `X-Request-Id` is put behind it if it is sane, and is then
what the answer's header says: `chatcmpl-0f3a…/theirs`. It is never the id alone: two callers may send the same one.
"""

from __future__ import annotations

import re
import secrets

from aiohttp import web

HEADER = "X-Request-Id"
#: What a caller may say; anything else is ignored.
_SANE = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_ID = web.RequestKey("request_id", str)


def labelled(request: web.Request, own: str) -> str:
    """The id of this request's turn. own: unique. Also makes it the id for `shown_id`."""
    theirs = _theirs(request)
    request[_ID] = made = f"{own}/{theirs}" if theirs else own
    return made


def shown(request_id: str) -> str:
    """What callers see of an id: their own, if they have sent one."""
    return request_id.partition("/")[2] or request_id


def id_of(request: web.Request) -> str:
    """The request's id for logs. One that has no turn (yet) gets one."""
    found = request.get(_ID)
    return found if found is not None else labelled(request, f"req-{secrets.token_hex(12)}")


def _theirs(request: web.Request) -> str:
    said = request.headers.get(HEADER)
    return said if said is not None and _SANE.fullmatch(said) else ""
