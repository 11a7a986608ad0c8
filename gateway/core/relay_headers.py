"""Decides which headers of a caller an engine sees, and which of an engine's headers a caller sees.

Both are short lists. A caller must not reach what engines read from headers: vLLM takes a request's id, priority,
session and data-parallel rank from some. Credentials stay in the gateway. The body is JSON written by the gateway, so
its type is always the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from contracts.errors import InvalidRequest

#: Headers of a caller that pass, in lower case.
UP = frozenset({"accept", "anthropic-version", "anthropic-beta", "openai-beta"})
#: Headers of an engine that pass beside the type, as callers see them. vLLM describes binary embeddings in `metadata`.
_DOWN = {"retry-after": "Retry-After", "metadata": "Metadata"}
_TYPE = "Content-Type"
_JSON, EVENTS, _OTHER = "application/json", "text/event-stream", "application/octet-stream"
#: Types that pass. A page must not be able to make its visitor's browser show an engine's answer as a page.
_TYPES = frozenset({_JSON, EVENTS, _OTHER, "text/plain"})


def up(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The headers for the engine, in lower case. Raises InvalidRequest for a value that is not plain ASCII."""
    passed = [("content-type", _JSON)]
    for name, value in headers:
        if name.lower() in UP:
            if not (value.isascii() and value.isprintable()):
                raise InvalidRequest(f"{name} must be printable ASCII", param=name)
            passed.append((name.lower(), value))
    return passed


def down(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The headers for the caller. A value that is not plain ASCII is dropped."""
    passed = {_TYPE: _OTHER}
    for name, value in headers:
        if not (value.isascii() and value.isprintable()):
            continue
        if name.lower() == "content-type":
            passed[_TYPE] = value if essence(value) in _TYPES else _OTHER
        elif name.lower() in _DOWN:
            passed[_DOWN[name.lower()]] = value
    return passed


def essence(content_type: str) -> str:
    """The type without parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


def is_events(passed: dict[str, str]) -> bool:
    """Whether these headers, of `down`, are those of server-sent events."""
    return essence(passed[_TYPE]) == EVENTS
