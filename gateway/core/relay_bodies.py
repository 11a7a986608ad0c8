"""Decides what of a body reaches an engine with HTTP of its own: all of it, except for what the gateway answers for.

- Taken out: fields that say whose KV is used and where it comes from, how urgent the request is and what it is called.
  The worker sets these. A worker that trusted a caller's would read another tenant's KV or jump the queue. The same
  names within `vllm_xargs` are taken out too: vLLM merges them with the fields.
- Taken out: our own hint fields and those of other stacks (`core.spellings`), which the gateway acts on.
- Everything else passes, known or not. The body is decoded and written again, so a field that occurs twice has one
  value for the gateway and for the engine: the last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from contracts import ranges
from contracts.errors import InvalidRequest
from gateway.core import conversations
from gateway.core.implicit import History
from gateway.core.relay_routes import APIS, RelayKind
from gateway.core.scopes import MOST_SALT_CHARS, scope_of, user_of
from gateway.core.spellings import NOTHING, ROOTS, Spelled
from gateway.core.spellings import read as read_hints

#: Fields that name KV or the request. session_id is the gateway's: the engine gets no name of a session from a caller.
_OWNED = frozenset({"kv_transfer_params", "ec_transfer_params", "cache_salt", "priority", "request_id", "session_id"})
TAKEN_OUT = _OWNED | ROOTS
TAKEN_OUT_OF_XARGS = _OWNED | {"kv_cache_report_mode"}
_MOST_NAME_CHARS, _MOST_KEY_CHARS = 512, 4096
#: What vLLM reads as true.
_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})


@dataclass(slots=True)
class Relayed:
    """A body for an engine's HTTP. body: for the engine. digest: of what the engine is asked, by tenant. model: empty:
    the served one. streams: an answer in events is asked for. cache_salt: the caller's, or empty. user: see
    `core.scopes.user_of`. history: of a turn that names no session. estimate: tokens of the prompt. The other fields
    are as in `gateway.openai.asked.Asked`."""

    kind: RelayKind
    model: str
    body: bytes
    digest: bytes
    streams: bool = False
    said: Spelled = NOTHING
    priority: int | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str = ""
    user: str = ""
    history: History | None = None
    estimate: int = 0


def relayed(
    kind: RelayKind, data: Any, tenant: str, headers: Mapping[str, str], *, named: bool, per_user: bool = False
) -> Relayed:
    """The request in a decoded body, which is mutated. headers: those with hints. named: a header names the session.
    per_user: see `core.scopes`. Raises InvalidRequest naming the field that is missing or wrong."""
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be a JSON object")
    api = APIS[kind]
    made = Relayed(kind, _model(kind, data), b"", b"")
    made.priority = _priority(data.get("priority"))
    made.cache_salt = _text(data, "cache_salt", MOST_SALT_CHARS) or ""
    made.user = user_of(data) if per_user else ""
    if api.turn:
        made.said = read_hints(data, headers)
        made.session_id = _text(data, "session_id", _MOST_KEY_CHARS, empty=True)
        made.prompt_cache_key = _text(data, "prompt_cache_key", _MOST_KEY_CHARS, empty=True)
        named = named or made.session_id is not None or made.said.session_id is not None or bool(made.prompt_cache_key)
        made.streams = _is_true(data.get("stream"))
    said = conversations.read(kind, data)
    made.estimate = said.estimate if api.counted else 0
    if api.turn and not named:
        scope = scope_of(made.user, made.cache_salt, per_user=per_user)
        made.history = said.history(tenant, made.model, scope)
    _take_out(data)
    made.body = _written(data)
    made.digest = blake3(json.dumps([tenant, kind, made.model]).encode() + b"\0" + made.body).digest()
    return made


def _model(kind: RelayKind, data: dict[str, Any]) -> str:
    model = data.get("model")
    if model is None and kind in ("tokenize", "detokenize"):
        return ""
    if model is None:
        raise InvalidRequest("model is required", param="model", code="missing_required_parameter")
    if not isinstance(model, str) or not 1 <= len(model) <= _MOST_NAME_CHARS:
        raise InvalidRequest(
            f"model must be a string of 1 to {_MOST_NAME_CHARS} characters", param="model", code="invalid_type"
        )
    return model


def _priority(value: Any) -> int | None:
    """Within the range of priorities here, which is smaller than the engine's."""
    if value is None:
        return None
    if type(value) is not int:
        raise InvalidRequest("priority must be an integer; lower is more urgent", param="priority", code="invalid_type")
    low, high = ranges.PRIORITY
    return max(low, min(high, value))


def _text(data: dict[str, Any], name: str, most_chars: int, *, empty: bool = False) -> str | None:
    value = data.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > most_chars or not (value or empty):
        least = 0 if empty else 1
        raise InvalidRequest(f"{name} must be a string of {least} to {most_chars} characters", param=name)
    if not empty and any("\ud800" <= c <= "\udfff" for c in value):
        raise InvalidRequest(f"{name} holds half of a surrogate pair; send whole characters", param=name)
    return value


def _is_true(value: Any) -> bool:
    return value in (1, True) or (isinstance(value, str) and value.lower() in _TRUE)


def _take_out(data: dict[str, Any]) -> None:
    for name in TAKEN_OUT & data.keys():
        del data[name]
    if isinstance(further := data.get("vllm_xargs"), dict):
        for name in TAKEN_OUT_OF_XARGS & further.keys():
            del further[name]


def _written(data: dict[str, Any]) -> bytes:
    """Compact JSON. Integers keep all digits, other numbers their value. Raises InvalidRequest for a number that JSON
    cannot hold."""
    try:
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        raise InvalidRequest(
            "the body holds a number that is not finite or has too many digits", code="invalid_json"
        ) from None
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return json.dumps(data, separators=(",", ":")).encode()
