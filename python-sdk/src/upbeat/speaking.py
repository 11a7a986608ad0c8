"""Who is speaking: the session (and hop) on whose behalf this task or thread runs, and its headers on every model request.

Kept in context variables, so that tasks and threads which frameworks start do not mix. `event_hooks()` gives them to an HTTP
client: all model libraries for OpenAI's API take one of httpx's kind, which is why one seam serves every framework.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

from upbeat.names import Hop, name_of


@dataclass
class Speaker:
    """A session that is about to ask. on_request: told when a request of it leaves through `event_hooks`. hop: its place in a workflow.

    over: it will ask no more. Frameworks say that a call ended in another task than the one in which it began, where no context
    variable can be put back; so whoever still has this speaker must see it here.
    """

    session_id: str
    headers: dict[str, str] = field(default_factory=dict)
    on_request: Callable[[], None] | None = None
    hop: Hop | None = None
    over: bool = False


MAX_SPEAKERS = 10_000
_speaker: ContextVar[Speaker | None] = ContextVar("upbeat_speaker", default=None)
_run: ContextVar[str | None] = ContextVar("upbeat_run", default=None)


def current_speaker() -> Speaker | None:
    """Who speaks here, or None."""
    speaker = _speaker.get()
    return speaker if speaker is not None and not speaker.over else None


def current_session() -> str | None:
    """The session on whose behalf this code runs, or None."""
    speaker = current_speaker()
    return speaker.session_id if speaker is not None else None


def current_hop() -> Hop | None:
    """The hop on whose behalf this code runs, or None."""
    speaker = current_speaker()
    return speaker.hop if speaker is not None else None


def current_run() -> str | None:
    """The run that `in_run` names, or None."""
    return _run.get()


@contextmanager
def in_run(run: str) -> Iterator[str]:
    """Everything inside belongs to this run (a job, a conversation), whatever framework executes it. Gives the legal name."""
    legal = name_of(str(run))
    token = _run.set(legal)
    try:
        yield legal
    finally:
        _run.reset(token)


@contextmanager
def speaking(speaker: Speaker) -> Iterator[Speaker]:
    """Requests inside are this speaker's."""
    token = enter(speaker)
    try:
        yield speaker
    finally:
        leave(token)


def enter(speaker: Speaker) -> Token[Speaker | None]:
    """As `speaking`, for blocks that are classes: `leave` takes the token."""
    return _speaker.set(speaker)


def leave(token: Token[Speaker | None]) -> None:
    """Undo `enter`. A token of another context (an `async` block that was left by another task) is only forgotten."""
    with suppress(ValueError):
        _speaker.reset(token)


@contextmanager
def speaking_as(hop: Hop) -> Iterator[Hop]:
    """Requests inside are this hop's."""
    with speaking(speaker_of(hop)):
        yield hop


class Speakers:
    """Who began to speak in callbacks, until another callback says that it is over. Bounded: the one that began first is over then.

    Every step is one operation on a dict, so that no lock is needed.
    """

    def __init__(self) -> None:
        self._speakers: dict[Hashable, Speaker] = {}

    def begin(self, key: Hashable, hop: Hop, on_request: Callable[[], None] | None = None) -> None:
        """Requests from here on are this hop's, until `over(key)`."""
        speaker = self._speakers.setdefault(key, Speaker(hop.session_id, hop.headers, on_request, hop))
        _speaker.set(speaker)
        while len(self._speakers) > MAX_SPEAKERS:
            self.over(next(iter(self._speakers)))

    def over(self, key: Hashable) -> None:
        """It asks no more."""
        speaker = self._speakers.pop(key, None)
        if speaker is not None:
            speaker.over = True


def speaker_of(hop: Hop) -> Speaker:
    """The speaker that a hop is."""
    return Speaker(hop.session_id, hop.headers, hop=hop)


def name_request(request: Any) -> None:
    """Put the speaker's headers on an httpx request; what the caller set himself stays."""
    speaker = current_speaker()
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
