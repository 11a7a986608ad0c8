"""Decides which routes are relayed, that is passed through unchanged, to an engine with HTTP of its own
(`contracts.models.ModelWire.HTTP`).

The list is complete: no other route of an engine can be reached through the gateway. An engine's own routes for
responses and for Anthropic's messages are not in it: the gateway translates those into chats, for engines of every kind
(`gateway.translating`). An engine's routes for its operator (LoRA adapters, profiles, sleeping, metrics) are not in it
either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from contracts.errors import InvalidRequest, RequestError
from contracts.models import ModelWire

#: Routes that only engines with HTTP of their own have.
OwnKind = Literal["embeddings"]
OWN_KINDS: tuple[OwnKind, ...] = get_args(OwnKind)
RelayKind = Literal["chat", "completion", "tokenize", "detokenize"] | OwnKind


class Api(NamedTuple):
    """A route. turn: it answers a turn of a session with text; a call of another route belongs to no session. counted:
    its prompt counts toward a tenant's tokens."""

    path: str
    turn: bool
    counted: bool


APIS: dict[RelayKind, Api] = {
    "chat": Api("/v1/chat/completions", turn=True, counted=True),
    "completion": Api("/v1/completions", turn=True, counted=True),
    "embeddings": Api("/v1/embeddings", turn=False, counted=True),
    "tokenize": Api("/tokenize", turn=False, counted=False),
    "detokenize": Api("/detokenize", turn=False, counted=False),
}
_NATIVE = ", ".join(f"POST {api.path}" for kind, api in APIS.items() if kind not in OWN_KINDS)
_ANTHROPIC = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def is_anthropic(path: str) -> bool:
    """Whether the route has Anthropic's format, also for keys and errors."""
    return path == _ANTHROPIC or path.startswith(f"{_ANTHROPIC}/")


def error_body(error: RequestError, path: str) -> dict[str, Any]:
    """The body of an error on this route, in OpenAI's or Anthropic's form."""
    return anthropic_error(error) if is_anthropic(path) else dict(error.envelope())


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """An error in Anthropic's form, which has a type by status. `param` and `code` are ours."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    inside = {"type": kind, "message": error.message, "param": error.param, "code": error.code}
    return {"type": "error", "error": inside, "request_id": None}


def is_relayed(kind: RelayKind, data: Any, wires: Mapping[str, ModelWire], served: str) -> bool:
    """Whether a decoded body goes to an engine's HTTP. wires: of all known models; empty: no model has HTTP of its own.
    served: the model of a body for a tokenizer that names none. Raises InvalidRequest when the model has no such
    route.

    A body without a known model counts as relayed: what follows refuses it for its model, whatever its other fields
    are."""
    model = data.get("model") if isinstance(data, dict) else None
    if model is None and kind in ("tokenize", "detokenize"):
        model = served
    wire = wires.get(model) if isinstance(model, str) else None
    if kind not in OWN_KINDS:
        return bool(wires) and wire is not ModelWire.FRAMES
    if wire is ModelWire.FRAMES:
        raise InvalidRequest(
            f"the model {model!r} has no POST {APIS[kind].path}; use {_NATIVE}, or a model whose engine is vllm",
            param="model",
            code="unsupported_operation",
        )
    return True
