"""Calls to a running gateway, with a one-line error and an exit status for each kind of failure."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import quote

from contracts.errors import ConfigError

TIMEOUT_S = 10.0


#: Exit statuses (docs/cli.md). 2 is wrong usage or a wrong setting, 130 Ctrl-C.
FINE, FAILED, USAGE, NOBODY, REFUSED_KEY, UNKNOWN = range(6)
#: Exit status by HTTP status; others are FAILED.
_MEANS = {401: REFUSED_KEY, 403: REFUSED_KEY, 404: UNKNOWN}


class CallFailed(Exception):
    """The gateway did not answer, or refused. The message has the remedy; `status` is the program's exit status."""

    def __init__(self, message: str, status: int = FAILED) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer. data: decoded JSON, or else the text."""

    status: int
    data: Any


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway at `url`, called with `key` if there is one. verified: an HTTPS gateway must have a certificate for its
    name from an authority that this system trusts, or that SSL_CERT_FILE names."""

    url: str
    key: str | None = None
    timeout_s: float = TIMEOUT_S
    verified: bool = True

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """The answer of one call, whatever its status. Raises CallFailed if none comes, ConfigError for a bad URL."""
        if not self.url.lower().startswith(("http://", "https://")):
            raise ConfigError(f"--url {self.url!r} is no address of a gateway; give one such as http://127.0.0.1:8080")
        sent = {"accept": "application/json", **(headers or {})}
        if self.key:
            sent["authorization"] = f"Bearer {self.key}"
        data = None
        if body is not None:
            data, sent["content-type"] = json.dumps(body).encode(), "application/json"
        try:
            request = urllib.request.Request(self.url.rstrip("/") + path, data=data, headers=sent, method=method)
            try:
                with _direct(self.verified).open(request, timeout=self.timeout_s) as response:
                    return Answer(response.status, _decoded(response.read()))
            except urllib.error.HTTPError as e:
                return Answer(e.code, _decoded(e.read()))
        except (OSError, ValueError) as e:
            reason = getattr(e, "reason", e)
            remedy = "start a stack with `upbeat up`, or say where one runs with --url or UPBEAT_URL"
            if isinstance(reason, ssl.SSLCertVerificationError):
                remedy = "give the name that its certificate has, and its authority's file in SSL_CERT_FILE"
            raise CallFailed(f"nothing answers at {self.url} ({reason}); {remedy}", NOBODY) from e

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """The decoded answer of a call. Raises CallFailed, with the gateway's message, unless it succeeds."""
        answer = self.ask(method, path, body, headers)
        if not isinstance(answer.data, dict):
            raise CallFailed(
                f"what answers at {self.url} is no Upbeat gateway (status {answer.status}, no JSON); give its "
                "address with --url",
                NOBODY,
            )
        if answer.status >= 400:
            said = f"{self.url} answered {answer.status}: {error_message(answer.data)}"
            raise CallFailed(said + _remedy(answer.status, self.key, path), _MEANS.get(answer.status, FAILED))
        return answer.data


def session_path(session_id: str) -> str:
    """The route of one session."""
    return f"/v1/sessions/{quote(session_id, safe='')}"


def model_path(name: str) -> str:
    """The route of why a model's weights moved."""
    return f"/v1/models/{quote(name, safe='')}/placement"


def session_pages(gateway: Gateway) -> Iterator[dict[str, Any]]:
    """All sessions by id, page by page. A session that exists throughout is in exactly one page."""
    after = ""
    while True:
        page = gateway.call("GET", f"/v1/sessions?order=id&limit=1000&after={quote(after, safe='')}")
        yield page
        if not page.get("has_more") or not page.get("last_id"):
            return
        after = page["last_id"]


def error_message(data: Any) -> str:
    """The message of an error answer, or the start of the answer if it has none."""
    try:
        return str(data["error"]["message"])
    except (KeyError, TypeError):
        return str(data)[:200]


@cache
def _direct(verified: bool) -> urllib.request.OpenerDirector:
    """Ignores the proxies of the environment."""
    context = None if verified else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if context is not None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    https = urllib.request.HTTPSHandler(context=context)
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), https)


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")


def _remedy(status: int, key: str | None, path: str) -> str:
    """What to do about a refusal, as the end of a sentence; empty if nothing is known."""
    if status == 401:
        what = (
            "give a server key with --key or UPBEAT_API_KEY (`upbeat up` prints the one that it made)"
            if key is None
            else "the given key is not known there; give another with --key or UPBEAT_API_KEY"
        )
        return "; " + what
    if status == 403:
        return "; the given key has no right to this; give a server key"
    if status == 404:
        group = path.split("/")[2].partition("?")[0] if path.startswith("/v1/") else ""
        lists = {"sessions": "upbeat sessions", "workflows": "upbeat workflows list"}
        return f"; `{lists[group]}` lists those that are known" if group in lists else ""
    if status in (429, 503):
        return "; try again in a moment"
    return ""
