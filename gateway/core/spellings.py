"""Reads other systems' hints: headers that name a session, and body fields.

Decides which session id and hints a request states (`Spelled`). Not here: the precedence of sources of session ids
(`gateway.sessions`), the value of a hint. The table for users is docs/hints.md; a test compares it with the tables
here.

A known field with an invalid value is refused. Unknown fields within these extensions, and actions of unknown types,
are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from contracts.advisory import MAX_TTL_S
from contracts.errors import InvalidRequest
from contracts.ids import check_session_id
from gateway.core.kv_hints import HintAction, HintEnvelope, read_envelope

#: Request headers that name a session, in order of precedence: ours, chat UIs', agents', proxies'.
HEADERS = (
    "X-Session-Id",
    "X-Upbeat-Session",
    "X-OpenWebUI-Chat-Id",
    "X-Conversation-Id",
    "X-Dynamo-Session-Id",
    "X-Claude-Code-Session-Id",
    "X-Session-Affinity",
    "X-Opencode-Session",
    "X-Chat-Id",
    "X-Thread-Id",
    "Thread-Id",
    "thread_id",
    "Session-Id",
    "session_id",
    "conversation_id",
    "X-LiteLLM-Session-Id",
)
#: Header -> the header that names a thread within the session of the first.
THREADS = {"X-Claude-Code-Session-Id": "X-Claude-Code-Agent-Id"}
#: Headers that say more than a session.
FINAL, PRIORITY = "X-Dynamo-Session-Final", "X-Dynamo-Request-Priority"

#: Default times to live in seconds that differ from ours.
SESSION_CONTROL_S = 300.0
AGENT_HINT_S = 300.0
_DURATION = re.compile(r"([0-9]{1,7})(ms|s|m|h)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_MAX_EDITS = 64
_LARGE = 1e9


def _integer(low: int, high: int) -> Callable[[Any, str], int]:
    def check(value: Any, path: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise InvalidRequest(f"{path} must be an integer from {low} to {high}", param=path)
        return value

    return check


def _number(value: Any, path: str) -> float:
    if type(value) not in (int, float) or not -_LARGE <= value <= _LARGE:
        raise InvalidRequest(f"{path} must be a number of at most {_LARGE:g}", param=path)
    return float(value)


def _seconds(value: Any, path: str) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MAX_TTL_S:
        raise InvalidRequest(f"{path} must be a number of seconds from 0 to {MAX_TTL_S:g}", param=path)
    return float(value)


def _duration(value: Any, path: str) -> float:
    if not isinstance(value, str):
        return _seconds(value, path)
    parsed = _DURATION.fullmatch(value)
    if parsed is None:
        raise InvalidRequest(f"{path} must be a duration such as 5m, 1h or 300s, or a number of seconds", param=path)
    return _seconds(int(parsed[1]) * _UNITS[parsed[2] or "s"], path)


def _boolean(value: Any, path: str) -> bool:
    if type(value) is not bool:
        raise InvalidRequest(f"{path} must be true or false", param=path)
    return value


def _one_of(*values: str) -> Callable[[Any, str], str]:
    def check(value: Any, path: str) -> str:
        if value not in values:
            raise InvalidRequest(f"{path} must be one of {', '.join(values)}", param=path)
        return str(value)

    return check


def _edits(value: Any, path: str) -> list[str]:
    """The types of vLLM's context edits. Their block ranges are checked and have no effect."""
    if not isinstance(value, list) or len(value) > _MAX_EDITS:
        raise InvalidRequest(f"{path} must be a list of at most {_MAX_EDITS} edits", param=path)
    types = []
    for i, edit in enumerate(value):
        at = f"{path}[{i}]"
        if not isinstance(edit, dict):
            raise InvalidRequest(f"{at} must be an object with a type", param=at)
        types.append(_one_of("offload", "prefetch", "evict")(edit.get("type"), f"{at}.type"))
        for name in ("block_start", "block_end"):
            if edit.get(name) is not None:
                _integer(0, 1 << 40)(edit[name], f"{at}.{name}")
    return types


#: Body fields by path, with the check of their value. Null counts as absent.
FIELDS: dict[str, Callable[[Any, str], Any]] = {
    "nvext.agent_hints.priority": _integer(-(1 << 31), (1 << 31) - 1),
    "nvext.agent_hints.strict_priority": _integer(0, (1 << 32) - 1),
    "nvext.agent_hints.latency_sensitivity": _number,
    "nvext.agent_hints.osl": _integer(0, (1 << 32) - 1),
    "nvext.agent_hints.speculative_prefill": _boolean,
    "nvext.session_control.session_id": check_session_id,
    "nvext.session_control.action": _one_of("open", "bind", "close"),
    "nvext.session_control.timeout": _seconds,
    "nvext.cache_control.type": _one_of("ephemeral"),
    "nvext.cache_control.ttl": _duration,
    "agent_hint.session_id": check_session_id,
    "agent_hint.parent_session_id": check_session_id,
    "agent_hint.cache_control.type": _one_of("ephemeral"),
    "agent_hint.cache_control.ttl": _seconds,
    "agent_hint.cache_control.block_offset": _integer(0, 1 << 40),
    "agent_hint.context_management.manage_request": _boolean,
    "agent_hint.context_management.edits": _edits,
    "litellm_session_id": check_session_id,
    "litellm_metadata.session_id": check_session_id,
    "kv_hints": read_envelope,
}
#: Fields that name the request's session, in order of precedence.
SESSION_FIELDS = (
    "nvext.session_control.session_id",
    "agent_hint.session_id",
    "litellm_session_id",
    "litellm_metadata.session_id",
)
#: Fields that are checked and have no effect; docs/hints.md says why.
WITHOUT_EFFECT = (
    "nvext.agent_hints.strict_priority",
    "agent_hint.parent_session_id",
    "agent_hint.cache_control.block_offset",
    "agent_hint.context_management.manage_request",
)
#: The objects on the paths of `FIELDS`.
_PARENTS = frozenset(path[:i] for path in FIELDS for i, c in enumerate(path) if c == ".")
#: The top-level body fields of `FIELDS`.
ROOTS = frozenset(path.partition(".")[0] for path in FIELDS)


@dataclass(frozen=True, slots=True)
class Spelled:
    """Hints of a request in other systems' words. session_id: of the first field of `SESSION_FIELDS` that is present.

    priority: in our order (lower is more urgent), not yet limited to the caller's. expected_tokens: expected length of
    the answer. actions: for the scheduler. envelope: the `kv_hints`, whose results belong into the answer.
    """

    session_id: str | None = None
    priority: int | None = None
    expected_tokens: int | None = None
    actions: tuple[HintAction, ...] = ()
    envelope: HintEnvelope | None = None


NOTHING = Spelled()


def read(body: Mapping[str, Any], headers: Mapping[str, str]) -> Spelled:
    """The hints of a request. Raises InvalidRequest naming the field or header that is wrong."""
    said = _values(body) if not ROOTS.isdisjoint(body) else {}
    final, urgency = headers.get(FINAL), headers.get(PRIORITY)
    if not said and final is None and urgency is None:
        return NOTHING
    actions = [*_dynamo(said), *_vllm(said)]
    if final is not None and _flag(final, FINAL):
        actions.append(HintAction("withdraw", after=True))
    envelope: HintEnvelope | None = said.get("kv_hints")
    if envelope is not None:
        actions += envelope.actions
    return Spelled(
        session_id=next((said[path] for path in SESSION_FIELDS if path in said), None),
        priority=_priority(said, urgency),
        expected_tokens=said.get("nvext.agent_hints.osl") or None,
        actions=tuple(actions),
        envelope=envelope,
    )


def _values(body: Mapping[str, Any]) -> dict[str, Any]:
    """The known fields that are present, checked, by path."""
    found: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        if value is None:
            return
        if path in FIELDS:
            found[path] = FIELDS[path](value, path)
            return
        if not isinstance(value, dict):
            raise InvalidRequest(f"{path} must be an object", param=path, code="invalid_type")
        for name, inner in value.items():
            if (below := f"{path}.{name}") in FIELDS or below in _PARENTS:
                walk(inner, below)

    for root in sorted(ROOTS & body.keys()):
        walk(body[root], root)
    return found


def _dynamo(said: dict[str, Any]) -> list[HintAction]:
    actions = []
    if said.get("nvext.agent_hints.speculative_prefill"):
        actions.append(HintAction("advise", after=True))
    if (ttl_s := said.get("nvext.cache_control.ttl")) is not None:
        actions.append(HintAction("advise", after=True, ttl_s=ttl_s))
    session_id = said.get("nvext.session_control.session_id")
    if session_id is None:
        if any(path.startswith("nvext.session_control.") for path in said):
            path = "nvext.session_control.session_id"
            raise InvalidRequest(f"{path} is required", param=path, code="missing_required_parameter")
    elif said.get("nvext.session_control.action") == "close":
        actions.append(HintAction("withdraw", after=True, session_id=session_id))
    else:
        ttl_s = said.get("nvext.session_control.timeout", SESSION_CONTROL_S)
        actions.append(HintAction("advise", after=True, session_id=session_id, ttl_s=ttl_s))
    return actions


def _vllm(said: dict[str, Any]) -> list[HintAction]:
    actions = []
    session_id = said.get("agent_hint.session_id")
    if any(path.startswith("agent_hint.cache_control.") for path in said):
        ttl_s = said.get("agent_hint.cache_control.ttl", AGENT_HINT_S)
        actions.append(HintAction("advise", after=True, session_id=session_id, ttl_s=ttl_s))
    for kind in said.get("agent_hint.context_management.edits", ()):
        actions.append(
            HintAction("advise" if kind == "prefetch" else "withdraw", after=kind != "prefetch", session_id=session_id)
        )
    return actions


def _priority(said: dict[str, Any], header: str | None) -> int | None:
    """Dynamo's priority, in our order: Dynamo's higher values are more urgent. The header overrides the field, which
    overrides the deprecated field."""
    if header is not None:
        try:
            return _ours(int(header))
        except ValueError:
            raise InvalidRequest(f"{PRIORITY} must be an integer", param=PRIORITY) from None
    if (priority := said.get("nvext.agent_hints.priority")) is not None:
        return _ours(priority)
    if (seconds := said.get("nvext.agent_hints.latency_sensitivity")) is not None:
        return _ours(seconds)
    return None


def _ours(priority: float) -> int:
    return -round(max(-1000, min(1000, priority)))


def _flag(text: str, name: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name} must be true or false", param=name)
    return text.lower() in ("true", "1")


def session_of(headers: Mapping[str, str]) -> str | None:
    """The session that a header names, or None. Other systems' headers without a value are ignored, because chat UIs
    send them for a new chat. Raises InvalidRequest naming the header."""
    for name in HEADERS:
        value = headers.get(name)
        if value is None or (not value and name not in HEADERS[:2]):
            continue
        session_id = check_session_id(value, name)
        thread = headers.get(THREADS[name]) if name in THREADS else None
        return check_session_id(f"{session_id}.{thread}", THREADS[name]) if thread else session_id
    return None
