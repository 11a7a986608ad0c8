"""The headers of an answer that say which session, node and request it belongs to."""

from __future__ import annotations

from gateway.core.admission import Caller
from gateway.generate import Progress
from gateway.intake import NODE_HEADER
from gateway.request_ids import HEADER, shown

MAX_WHY_CHARS = 1024


def turn_headers(caller: Caller, session_id: str | None, request_id: str, progress: Progress) -> dict[str, str]:
    """The headers. session_id: None for a call that belongs to no session."""
    headers = {} if session_id is None else {"X-Session-Id": session_id}
    headers |= {NODE_HEADER: progress.node, HEADER: shown(request_id)}
    if caller.server:  # scores reveal other tenants' load
        why = progress.why[:MAX_WHY_CHARS]
        headers["X-Upbeat-Why"] = (
            why if why.isascii() and why.isprintable() else "".join(c if " " <= c <= "~" else " " for c in why)
        )
    return headers
