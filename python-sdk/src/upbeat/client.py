"""The clients. Methods that give hints return at once and never raise; only constructors raise.

Both clients send from a background thread (`sender.py`), not from the event loop: a busy loop would delay a hint past
its use, and one client can serve several loops.
"""

from __future__ import annotations

import asyncio
import os
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from upbeat.hints import DEFAULT_TTL_S, Advisory, BadHint, Invalidation
from upbeat.names import Hop, is_name
from upbeat.sender import Counters, Sender
from upbeat.speaking import Speaker, enter, leave
from upbeat.transport import HttpTransport, Transport


class ConfigurationError(ValueError):
    """A client cannot be constructed. The message names the argument and the remedy."""


class HintClient:
    """Base of both clients: gives hints. Not constructed directly."""

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        queue_limit: int = 1024,
        timeout_s: float = 5.0,
        exit_timeout_s: float = 1.0,
    ) -> None:
        """base_url: the gateway, with or without `/v1`; default UPBEAT_BASE_URL. api_key: default UPBEAT_API_KEY, else
        none.

        queue_limit: most hints that wait; above it the oldest is dropped. timeout_s: of one request to the server, in
        the background. exit_timeout_s: longest wait for unsent hints at interpreter exit. Raises ConfigurationError.
        """
        url, key = gateway_of(base_url, api_key)
        if isinstance(queue_limit, bool) or not isinstance(queue_limit, int) or not 1 <= queue_limit <= 65_536:
            raise ConfigurationError(f"queue_limit must be an integer from 1 to 65536; got {queue_limit!r}")
        _check_number("timeout_s", timeout_s, 0.05, 300.0)
        _check_number("exit_timeout_s", exit_timeout_s, 0.0, 60.0)
        self.base_url = url

        def connect() -> Transport:
            return HttpTransport(url, key, timeout_s)

        self._sender = Sender(connect, queue_limit, exit_timeout_s)

    def advise(
        self,
        session_id: str,
        *,
        model_id: str | None = None,
        expected_arrival: float | None = None,
        ordered: bool = False,
        priority: int = 0,
        ttl_s: float = DEFAULT_TTL_S,
    ) -> None:
        """This session is about to send a request. Arguments: `Advisory`. Invalid ones are counted, not raised."""
        try:
            self._sender.put(Advisory(session_id, model_id, expected_arrival, ordered, priority, ttl_s))
        except BadHint as e:
            self._sender.invalid(e.argument, e)
        except Exception as e:
            self._sender.invalid("advise", e)

    def invalidate(self, session_id: str | None = None, *, advisory_id: str | None = None) -> None:
        """Withdraw the hints of a session, or one advisory. Exactly one of the two."""
        try:
            self._sender.put(Invalidation(session_id, advisory_id))
        except BadHint as e:
            self._sender.invalid(e.argument, e)
        except Exception as e:
            self._sender.invalid("invalidate", e)

    def hop(
        self,
        workflow: str,
        agent: str,
        run: str,
        *,
        model_id: str | None = None,
        expected_arrival: float | None = None,
        priority: int = 0,
    ) -> Hop:
        """Advise the session of this agent in this run, which asks next. Returns the hop; its request must carry
        `headers`."""
        try:
            hop = Hop(workflow, agent, run)
        except Exception as e:
            self._sender.invalid("hop", f"workflow, agent and run must be strings: {e}")
            return Hop(*(part if isinstance(part, str) else type(part).__name__ for part in (workflow, agent, run)))
        self.advise(hop.session_id, model_id=model_id, expected_arrival=expected_arrival, priority=priority)
        return hop

    def invalid(self, argument: str, why: object) -> None:
        """For hooks: count an argument that is no hint; log the first one of each `argument`."""
        self._sender.invalid(argument, why)

    @property
    def counters(self) -> Counters:
        """Numbers of hints by outcome, so far."""
        return self._sender.counters


class Turn:
    """The block around one turn of a session: advises on entry, and withdraws on an exception before the request.

    Works with `with` and `async with`. The request counts as sent once `headers()` was read, it left through
    `event_hooks`, or `requested()` was called.
    """

    def __init__(self, client: HintClient, session_id: str, hint: dict[str, Any]) -> None:
        self._client, self.session_id, self._hint = client, session_id, hint
        self._requested = False
        self._token: Any = None

    def headers(self) -> dict[str, str]:
        """Headers that the request must carry. Marks the request as sent."""
        self._requested = True
        return self._headers()

    def requested(self) -> None:
        """Mark the request as sent."""
        self._requested = True

    def __enter__(self) -> Turn:
        self._client.advise(self.session_id, **self._hint)
        if headers := self._headers():
            self._token = enter(Speaker(self.session_id, headers, self.requested))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            leave(self._token)
        if kind is not None and not self._requested:
            self._client.invalidate(self.session_id)

    def _headers(self) -> dict[str, str]:
        """Empty if the id is illegal: with it the server would refuse the whole request."""
        return {"X-Session-Id": self.session_id} if is_name(self.session_id) else {}

    async def __aenter__(self) -> Turn:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


class AdvisoryClient(HintClient):
    """Hints from synchronous code. `with AdvisoryClient(url) as client:` closes it at the end."""

    def session(self, session_id: str, **hint: Any) -> Turn:
        """The block of one turn (`Turn`). hint: arguments of `advise`."""
        return Turn(self, session_id, _known(self, hint))

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until all hints are sent. False after `timeout_s`."""
        return self._sender.flush(timeout_s)

    def close(self, timeout_s: float = 1.0) -> bool:
        """Send waiting hints and end; later ones are dropped and counted. True if all were sent in time."""
        return self._sender.close(timeout_s)

    def __enter__(self) -> AdvisoryClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncAdvisoryClient(HintClient):
    """Hints from asynchronous code: only `flush` and `close` are awaited."""

    def session(self, session_id: str, **hint: Any) -> Turn:
        """The block of one turn (`Turn`), with `async with` or `with`. hint: arguments of `advise`."""
        return Turn(self, session_id, _known(self, hint))

    async def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until all hints are sent, without blocking the loop. False after `timeout_s`."""
        return await asyncio.to_thread(self._sender.flush, timeout_s)

    async def close(self, timeout_s: float = 1.0) -> bool:
        """Send waiting hints and end; later ones are dropped and counted. True if all were sent in time."""
        return await asyncio.to_thread(self._sender.close, timeout_s)

    async def __aenter__(self) -> AsyncAdvisoryClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


_HINT_ARGUMENTS = frozenset({"model_id", "expected_arrival", "ordered", "priority", "ttl_s"})


def _known(client: HintClient, hint: dict[str, Any]) -> dict[str, Any]:
    """The arguments that `advise` has; others are counted and left out, so that a hook never stops its host."""
    for name in sorted(set(hint) - _HINT_ARGUMENTS):
        client.invalid(name, f"{name} is no argument of a hint; known: {', '.join(sorted(_HINT_ARGUMENTS))}")
    return {name: value for name, value in hint.items() if name in _HINT_ARGUMENTS}


def gateway_of(base_url: str | None = None, api_key: str | None = None) -> tuple[str, str | None]:
    """The gateway's address without `/v1`, and the key or None; by default from UPBEAT_BASE_URL and UPBEAT_API_KEY.
    Raises ConfigurationError."""
    url = _checked_url(base_url if base_url is not None else os.environ.get("UPBEAT_BASE_URL"))
    return url, _checked_key(api_key if api_key is not None else os.environ.get("UPBEAT_API_KEY"))


def _checked_url(url: object) -> str:
    if url is None or url == "":
        raise ConfigurationError(
            "base_url is missing: give the gateway's address, as http://127.0.0.1:8080, or set UPBEAT_BASE_URL"
        )
    if not isinstance(url, str):
        raise ConfigurationError(f"base_url must be a string, as http://127.0.0.1:8080; got a {type(url).__name__}")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError as e:
        raise ConfigurationError(f"base_url {url!r} is no address: {e}") from None
    if not usable or parts.query or parts.fragment:
        raise ConfigurationError(
            f"base_url {url!r} must be http or https with a host and no query, as http://127.0.0.1:8080"
        )
    if parts.username is not None or parts.password is not None:
        raise ConfigurationError("base_url must not hold a user or password: give the key as api_key")
    if any(not 32 < ord(c) < 127 for c in url):
        raise ConfigurationError(f"base_url {url!r} has a space or another character that no address has")
    return url.rstrip("/").removesuffix("/v1")


def _checked_key(key: object) -> str | None:
    if key is None or key == "":
        return None
    if not isinstance(key, str) or any(not 32 < ord(c) < 127 for c in key):
        raise ConfigurationError("api_key must be a string of printable ASCII without spaces")
    return key


def _check_number(argument: str, value: object, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ConfigurationError(f"{argument} must be a number of seconds from {least:g} to {most:g}; got {value!r}")
