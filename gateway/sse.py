"""Server-sent events: what a stream of chunks looks like on the wire."""

from __future__ import annotations

import json
from typing import Any

from contracts.errors import RequestError

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Proxies such as nginx would collect the tokens otherwise.
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"


def event(body: Any) -> bytes:
    """One event holding `body` as JSON on one line."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"


def failure(error: RequestError) -> bytes:
    """The event that ends a stream which cannot go on."""
    return event(error.envelope())
