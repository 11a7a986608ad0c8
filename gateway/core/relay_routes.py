"""Decides which routes are relayed, that is passed through unchanged, to an engine with HTTP of its own
(`contracts.models.ModelWire.HTTP`).

The list is complete: no other route of an engine can be reached through the gateway. Responses that an engine stores
(`GET /v1/responses/{id}`) are not in it: they lie in the memory of one server, while a session's turns move between
servers. An engine's routes for its operator (LoRA adapters, profiles, sleeping, metrics) are not in it either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from contracts.errors import InvalidRequest, RequestError
from contracts.models import ModelWire

#: Routes that only engines with HTTP of their own have.
OwnKind = Literal["responses", "messages", "count_tokens", "embeddings"]
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
    "responses": Api("/v1/responses", turn=True, counted=True),
    "messages": Api("/v1/messages", turn=True, counted=True),
    "count_tokens": Api("/v1/messages/count_tokens", turn=False, counted=False),
    "embeddings": Api("/v1/embeddings", turn=False, counted=True),
    "tokenize": Api("/tokenize", turn=False, counted=False),
    "detokenize": Api("/detokenize", turn=False, counted=False),
}
_NATIVE = ", ".join(f"POST {api.path}" for kind, api in APIS.items() if kind not in OWN_KINDS)
_ANTHROPIC = "/v1/messages"


def is_anthropic(path: str) -> bool:
    """Whether the route has Anthropic's format, also for keys and errors."""
    return path == _ANTHROPIC or path.startswith(f"{_ANTHROPIC}/")


def error_body(error: RequestError, path: str) -> dict[str, Any]:
    """The body of an error on this route: OpenAI's envelope, in which Anthropic's clients need a type."""
    return {"type": "error", **error.envelope()} if is_anthropic(path) else dict(error.envelope())


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
