"""Who is speaking: the session (and hop) on whose behalf this task or thread runs, and its headers on every model request.

Kept in context variables, so that tasks and threads which frameworks start do not mix. `event_hooks()` gives them to an HTTP
client: all model libraries for OpenAI's API take one of httpx's kind, which is why one seam serves every framework.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

from upbeat.names import Hop, name_of


@dataclass(frozen=True)
class Speaker:
    """A session that is about to ask. on_request: told when a request of it leaves through `event_hooks`. hop: its place in a workflow."""

    session_id: str
    headers: dict[str, str] = field(default_factory=dict)
    on_request: Callable[[], None] | None = None
    hop: Hop | None = None


_speaker: ContextVar[Speaker | None] = ContextVar("upbeat_speaker", default=None)
_run: ContextVar[str | None] = ContextVar("upbeat_run", default=None)


def current_session() -> str | None:
    """The session on whose behalf this code runs, or None."""
    speaker = _speaker.get()
    return speaker.session_id if speaker is not None else None


def current_hop() -> Hop | None:
    """The hop on whose behalf this code runs, or None."""
    speaker = _speaker.get()
    return speaker.hop if speaker is not None else None


def current_run() -> str | None:
    """The run that `in_run` names, or None."""
    return _run.get()


@contextmanager
def in_run(run: str) -> Iterator[str]:
    """Everything inside belongs to this run (a job, a conversation), whatever framework executes it. Gives the legal name."""
    legal = name_of(run)
    token = _run.set(legal)
    try:
        yield legal
    finally:
        _run.reset(token)


@contextmanager
def speaking(speaker: Speaker) -> Iterator[Speaker]:
    """Requests inside are this speaker's."""
    token = begin(speaker)
    try:
        yield speaker
    finally:
        end(token)


@contextmanager
def speaking_as(hop: Hop) -> Iterator[Hop]:
    """Requests inside are this hop's."""
    with speaking(speaker_of(hop)):
        yield hop


def speaker_of(hop: Hop) -> Speaker:
    """The speaker that a hop is."""
    return Speaker(hop.session_id, hop.headers, hop=hop)


def begin(speaker: Speaker | None) -> Token[Speaker | None]:
    """Requests from here on are this speaker's (nobody's when None). For callbacks that have no block; `end` takes the token."""
    return _speaker.set(speaker)


def end(token: Token[Speaker | None]) -> None:
    """Undo `begin`. A token of another context (a framework ended the call elsewhere) is only forgotten."""
    with suppress(ValueError):
        _speaker.reset(token)


def name_request(request: Any) -> None:
    """Put the speaker's headers on an httpx request; what the caller set himself stays."""
    speaker = _speaker.get()
    if speaker is None:
        return
    for name, value in speaker.headers.items():
        if name not in request.headers:
            request.headers[name] = value
    if speaker.on_request is not None:
        speaker.on_request()


async def name_request_async(request: Any) -> None:
    """As `name_request`, for an asynchronous client."""
    name_request(request)


def event_hooks() -> dict[str, list[Callable[..., Any]]]:
    """For `httpx.Client(event_hooks=...)` and its like: requests carry the speaker's headers."""
    return {"request": [name_request]}


def async_event_hooks() -> dict[str, list[Callable[..., Any]]]:
    """For `httpx.AsyncClient(event_hooks=...)` and its like."""
    return {"request": [name_request_async]}
