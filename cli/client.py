"""Calls to a running gateway, and one line for each way in which they fail."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

TIMEOUT_S = 10.0


class CallFailed(Exception):
    """The gateway did not answer, or refused. The message says which and what to do."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer; `data` is its decoded JSON, or its text where it is not JSON."""

    status: int
    data: Any


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway at `url`, called with `key` if there is one."""

    url: str
    key: str | None = None

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """One call, whatever its status. Raises CallFailed when nobody answers."""
        sent = {"accept": "application/json", **(headers or {})}
        if self.key:
            sent["authorization"] = f"Bearer {self.key}"
        data = None
        if body is not None:
            data, sent["content-type"] = json.dumps(body).encode(), "application/json"
        try:
            request = urllib.request.Request(self.url.rstrip("/") + path, data=data, headers=sent, method=method)
            try:
                with _direct.open(request, timeout=TIMEOUT_S) as response:
                    return Answer(response.status, _decoded(response.read()))
            except urllib.error.HTTPError as e:
                return Answer(e.code, _decoded(e.read()))
        except (OSError, ValueError) as e:
            reason = getattr(e, "reason", e)
            raise CallFailed(f"nothing answers at {self.url} ({reason}); start a stack with `upbeat up`, or give --url") from e

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """The decoded answer of a call that must succeed. Raises CallFailed with the gateway's own words otherwise."""
        answer = self.ask(method, path, body, headers)
        if answer.status >= 400:
            raise CallFailed(f"{self.url} answered {answer.status}: {error_message(answer.data)}{_remedy(answer.status, self.key)}")
        return answer.data


def session_path(session_id: str) -> str:
    """The route of one session."""
    return f"/v1/sessions/{quote(session_id, safe='')}"


def error_message(data: Any) -> str:
    """What an error envelope says; the answer itself when it is none."""
    try:
        return str(data["error"]["message"])
    except (KeyError, TypeError):
        return str(data)[:200]


#: The gateway is near: no proxy that the environment names stands in between.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")


def _remedy(status: int, key: str | None) -> str:
    if status not in (401, 403):
        return ""
    return "; give a server key with --key or UPBEAT_API_KEY" if key is None else "; the given key has no right to this"
