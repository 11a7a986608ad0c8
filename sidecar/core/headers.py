"""Which of a caller's headers the server gets beside ours, and which of the server's go back."""

from __future__ import annotations

from collections.abc import Iterable

from contracts.errors import InvalidRequest

#: Of one connection, not of a message.
_HOP = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    "upgrade expect".split()
)
#: Credentials, and what is ours to say: the body is JSON that we have changed, and the answer is not to be compressed.
_OURS = frozenset("authorization cookie host content-type content-length content-encoding accept-encoding".split())
#: The gateway frames the answer anew, and names itself.
_NOT_BACK = _HOP | {"content-length", "server", "date", "set-cookie"}
MOST, LONGEST = 64, 8000


def up(headers: Iterable[tuple[str, str]], request_id: str, key: str, priority: int | None) -> dict[str, str]:
    """The request's headers. vLLM reads a request's id, priority, session and data-parallel rank from `X-` headers, so
    none of a caller's passes. key: the server's; empty: it has none. priority: None: it does not schedule by it.

    Raises InvalidRequest for too many headers, or a value that is no text of a header.
    """
    passed: dict[str, str] = {}
    for name, value in headers:
        lower = name.lower()
        if lower in _HOP or lower in _OURS or lower.startswith("x-"):
            continue
        good = lower.isascii() and lower.replace("-", "").replace("_", "").isalnum()
        if not good or not (value.isascii() and value.isprintable()) or len(name) + len(value) > LONGEST:
            raise InvalidRequest(f"the header {name[:60]!r} is not printable ASCII, or too long", param=name[:60])
        passed[lower] = value
    if len(passed) > MOST:
        raise InvalidRequest(f"the request has {len(passed)} headers; {MOST} at most")
    passed["content-type"], passed["accept-encoding"], passed["x-request-id"] = (
        "application/json",
        "identity",
        request_id,
    )
    if key:
        passed["authorization"] = f"Bearer {key}"
    if priority is not None:
        passed["x-vllm-priority"] = str(priority)
    return passed


def down(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The answer's headers for the gateway."""
    return [(name.lower(), value) for name, value in headers if name.lower() not in _NOT_BACK]
