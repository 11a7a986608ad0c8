"""One kept connection to the server. Decides what a response means for the hints that were posted, not what is queued.

Uses `http.client`: one request at a time, from one thread, with small JSON bodies.
"""

from __future__ import annotations

import enum
import http.client
import json
import ssl
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from upbeat.version import VERSION

_READ_BYTES = 64 * 1024
_STALE = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError, http.client.CannotSendRequest)


class Verdict(enum.Enum):
    """Outcome of a post."""

    ARRIVED = "arrived"
    #: Retry after a pause.
    LATER = "later"
    #: At least one hint is invalid; others may be valid.
    REFUSED = "refused"
    #: The server accepts no hint from us (unknown key, or no such route): drop them, and pause.
    UNWELCOME = "unwelcome"


#: Exceptions to: 5xx LATER, 4xx REFUSED, 3xx UNWELCOME.
_BY_STATUS = {
    429: Verdict.LATER,
    408: Verdict.LATER,
    401: Verdict.UNWELCOME,
    403: Verdict.UNWELCOME,
    404: Verdict.UNWELCOME,
    405: Verdict.UNWELCOME,
}


@dataclass(frozen=True)
class Answer:
    """The outcome of a post. retry_after_s: from the response, or None."""

    verdict: Verdict
    detail: str = ""
    retry_after_s: float | None = None


class Transport(Protocol):
    """Posts JSON. Never raises."""

    def post(self, path: str, body: dict[str, Any]) -> Answer:
        """Post `body` to the route and classify the response."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def verdict_of(status: int) -> Verdict:
    """What an HTTP status means."""
    if 200 <= status < 300:
        return Verdict.ARRIVED
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if 300 <= status < 400:
        return Verdict.UNWELCOME
    return Verdict.LATER if status >= 500 else Verdict.REFUSED


class HttpTransport:
    """HTTP/1.1 to `base_url`. Not thread-safe: the sender has one thread."""

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float) -> None:
        parts = urlsplit(base_url)
        self._https, self._host, self._port, self._prefix = (
            parts.scheme == "https",
            parts.hostname or "",
            parts.port,
            parts.path,
        )
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", "User-Agent": f"upbeat-sdk/{VERSION}"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._tls: ssl.SSLContext | None = None
        self._connection: http.client.HTTPConnection | None = None

    def post(self, path: str, body: dict[str, Any]) -> Answer:
        """Post `body`. Reconnects once if the server has closed the kept connection."""
        data = json.dumps(body, separators=(",", ":")).encode()
        kept = self._connection is not None
        try:
            try:
                return self._exchange(path, data)
            except _STALE:
                self.close()
                if not kept:
                    raise
                return self._exchange(path, data)
        except (OSError, http.client.HTTPException, ValueError) as e:
            self.close()
            return Answer(Verdict.LATER, f"{type(e).__name__}: {e}"[:200])

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _exchange(self, path: str, data: bytes) -> Answer:
        if self._connection is None:
            self._connection = self._connect()
        self._connection.request("POST", self._prefix + path, body=data, headers=self._headers)
        with self._connection.getresponse() as response:
            said = response.read(_READ_BYTES)
            done = response.isclosed()
        if not done or response.will_close:
            self.close()
        verdict = verdict_of(response.status)
        if verdict is Verdict.ARRIVED:
            return Answer(verdict)
        return Answer(
            verdict,
            f"HTTP {response.status} {_message(said)}".strip()[:200],
            _seconds(response.headers.get("Retry-After")),
        )

    def _connect(self) -> http.client.HTTPConnection:
        if not self._https:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        self._tls = self._tls or ssl.create_default_context()
        return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=self._tls)


def _message(said: bytes) -> str:
    """The message of an error envelope, or an empty string."""
    try:
        error = json.loads(said)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return ""
    return error if isinstance(error, str) else ""


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After in seconds; None for its date form."""
    try:
        seconds = float(retry_after) if retry_after is not None else -1.0
    except ValueError:
        return None
    return seconds if 0.0 <= seconds < float("inf") else None
