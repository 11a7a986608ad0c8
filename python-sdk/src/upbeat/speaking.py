"""The speaker of a task or thread: the session (and hop) whose requests it sends, and their headers.

Kept in context variables, so that concurrent tasks and threads do not mix. `event_hooks()` adds the headers in an HTTP
client of httpx's kind, which every model library for OpenAI's API accepts.
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
    """A session that is about to send a request. on_request: called when one leaves through `event_hooks`. hop: its
    agent and run, or None.

    over: it sends no more requests. A framework may end a call in another task than the one that began it, where the
    context variable cannot be reset; so every reader checks `over`.
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
    """The speaker of this task or thread, or None."""
    speaker = _speaker.get()
    return speaker if speaker is not None and not speaker.over else None


def current_session() -> str | None:
    """The session of the current speaker, or None."""
    speaker = current_speaker()
    return speaker.session_id if speaker is not None else None


def current_hop() -> Hop | None:
    """The hop of the current speaker, or None."""
    speaker = current_speaker()
    return speaker.hop if speaker is not None else None


def current_run() -> str | None:
    """The run that `in_run` names, or None."""
    return _run.get()


@contextmanager
def in_run(run: str) -> Iterator[str]:
    """Code in the block belongs to this run (a job, a conversation), in any framework. Yields the run's legal name."""
    legal = name_of(str(run))
    token = _run.set(legal)
    try:
        yield legal
    finally:
        _run.reset(token)


@contextmanager
def speaking(speaker: Speaker) -> Iterator[Speaker]:
    """Requests in the block are sent as this speaker."""
    token = enter(speaker)
    try:
        yield speaker
    finally:
        leave(token)


def enter(speaker: Speaker) -> Token[Speaker | None]:
    """Like `speaking`, for context managers that are classes. Pass the token to `leave`."""
    return _speaker.set(speaker)


def leave(token: Token[Speaker | None]) -> None:
    """Undo `enter`. Ignores a token of another context (an `async` block that another task leaves)."""
    with suppress(ValueError):
        _speaker.reset(token)


@contextmanager
def speaking_as(hop: Hop) -> Iterator[Hop]:
    """Requests in the block are sent as this hop."""
    with speaking(speaker_of(hop)):
        yield hop


class Speakers:
    """Speakers begun in one callback and ended in another. Above MAX_SPEAKERS the oldest is ended.

    Every step is one operation on a dict, so no lock is needed.
    """

    def __init__(self) -> None:
        self._speakers: dict[Hashable, Speaker] = {}

    def begin(self, key: Hashable, hop: Hop, on_request: Callable[[], None] | None = None) -> None:
        """Requests of this context are sent as this hop until `over(key)`."""
        speaker = self._speakers.setdefault(key, Speaker(hop.session_id, hop.headers, on_request, hop))
        _speaker.set(speaker)
        while len(self._speakers) > MAX_SPEAKERS:
            self.over(next(iter(self._speakers)))

    def over(self, key: Hashable) -> None:
        """End the speaker of `key`, if there is one."""
        speaker = self._speakers.pop(key, None)
        if speaker is not None:
            speaker.over = True


def speaker_of(hop: Hop) -> Speaker:
    """A speaker for this hop."""
    return Speaker(hop.session_id, hop.headers, hop=hop)


def name_request(request: Any) -> None:
    """Add the speaker's headers to an httpx request; headers that the caller set stay."""
    speaker = current_speaker()
    if speaker is None:
        return
    for name, value in speaker.headers.items():
        if name not in request.headers:
            request.headers[name] = value
    if speaker.on_request is not None:
        speaker.on_request()


async def name_request_async(request: Any) -> None:
    """Like `name_request`, for an asynchronous client."""
    name_request(request)


def event_hooks() -> dict[str, list[Callable[..., Any]]]:
    """For `httpx.Client(event_hooks=...)` and similar clients: requests carry the speaker's headers."""
    return {"request": [name_request]}


def async_event_hooks() -> dict[str, list[Callable[..., Any]]]:
    """Like `event_hooks`, for `httpx.AsyncClient(event_hooks=...)` and similar clients."""
    return {"request": [name_request_async]}
