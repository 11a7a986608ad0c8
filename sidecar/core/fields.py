"""Which fields the sidecar adds to a request, and how they enter its body without reading it.

They are put behind the caller's fields: of equal names, vLLM's JSON parser takes the last. So no caller's field
replaces one of ours, whatever a gateway lets through.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from contracts.errors import InvalidRequest, NotFound
from contracts.kv import tenant_salt
from sidecar.core.routes import PATHS, Route

_SPACE = re.compile(rb"[ \t\r\n]*")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/@+-]{1,256}")


@dataclass(frozen=True, slots=True)
class Asked:
    """Whose request it is. cache_salt: the caller's own, empty: none. sources: nodes that may have its KV."""

    request_id: str
    tenant: str
    session_id: str
    priority: int
    sources: Sequence[str]
    cache_salt: str = ""


def check(path: str, routes: dict[str, Route], asked: Asked, several_tenants: bool) -> Route:
    """The route of a request. several_tenants: the deployment has more than one. Raises NotFound for a path that is
    never passed, InvalidRequest for a route that the server does not have, for an id that no header can carry, and for
    a route on which tenants cannot be kept apart."""
    if path not in PATHS:
        raise NotFound(f"{path[:100]!r} is not passed to a vLLM server; it is one of {', '.join(PATHS)}")
    route = routes.get(path)
    if route is None:
        raise InvalidRequest(
            f"this model's vLLM server has no POST {path}; ask a model that has it",
            param="model",
            code="unsupported_operation",
        )
    if not _REQUEST_ID.fullmatch(asked.request_id):
        raise InvalidRequest(f"request_id must match {_REQUEST_ID.pattern}", param="request_id")
    if route.computes and not route.cache_salt and several_tenants:
        raise InvalidRequest(
            f"this vLLM server's POST {path} has no cache_salt, so that one tenant's prompts would speed up another's: "
            "it is not served in a deployment of several tenants; use another route, or a newer vLLM",
            code="unsupported_operation",
        )
    return route


def added(route: Route, asked: Asked, secret: bytes, *, transfers: bool, prioritises: bool) -> dict[str, Any]:
    """The fields of ours that the route reads. secret: the cluster's. transfers: the server has the connector.
    prioritises: it schedules by priority."""
    fields: dict[str, Any] = {}
    if route.kv_transfer_params and transfers:
        said: dict[str, Any] = {"tenant": asked.tenant, "priority": asked.priority, "sources": list(asked.sources)}
        if asked.session_id:
            said["session"] = asked.session_id
        fields["kv_transfer_params"] = {"upbeat": said}
    if route.cache_salt:
        fields["cache_salt"] = salt_of(secret, asked.tenant, asked.cache_salt)
    if route.priority and prioritises:
        fields["priority"] = asked.priority
    if route.request_id:
        fields["request_id"] = asked.request_id
    return fields


def salt_of(secret: bytes, tenant: str, own: str) -> str:
    """vLLM's `cache_salt` for a tenant's requests with its own salt: equal on every node, and secret, as whoever knows
    it could time another tenant's cache."""
    body = tenant_salt(secret, tenant) + own.encode("utf-8", "surrogatepass")
    return blake3(body, derive_key_context="upbeat 2026 cache salt of vLLM").hexdigest()


def spliced(body: bytes, fields: dict[str, Any]) -> bytes:
    """The JSON object `body` with `fields` behind its own. Raises InvalidRequest when it does not begin and end as an
    object in UTF-8."""
    begin, end = _end_of_space(body, 0), len(body)
    while end > begin and body[end - 1 : end] in (b" ", b"\t", b"\r", b"\n"):
        end -= 1
    if end - begin < 2 or body[begin : begin + 1] != b"{" or body[end - 1 : end] != b"}":
        raise InvalidRequest("the body must be a JSON object in UTF-8")
    if not fields:
        return body
    ours = json.dumps(fields).encode()[1:]
    separator = b"" if _end_of_space(body, begin + 1) == end - 1 else b","
    return b"".join((memoryview(body)[: end - 1], separator, ours))


def _end_of_space(body: bytes, at: int) -> int:
    found = _SPACE.match(body, at)
    return found.end() if found is not None else at
