"""The `kv_hints` envelope that vLLM, SGLang and Dynamo agree on: a protocol version, and actions, each with an id, a
type and a payload.

Decides what each action does here and what the answer says. Actions are hints: `accepted` does not mean that bytes have
moved. The format of results is not standardised, so the words are ours: `accepted`; `rejected`: too many hints;
`unsupported`: known but not done; `ignored`: unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from contracts.advisory import DEFAULT_TTL_S, MAX_TTL_S, Advisory
from contracts.errors import InvalidRequest
from contracts.ids import check_session_id

MAX_ACTIONS = 64
#: Envelopes of this major version are understood.
MAJOR = "0"
#: Action type -> its meaning here.
ACTIONS: dict[str, Literal["advise", "withdraw"]] = {
    "kv.prefetch": "advise",
    "kv.retain": "advise",
    "kv.pin": "advise",
    "kv.demote": "withdraw",
    "kv.deref": "withdraw",
    "kv.release": "withdraw",
    "kv.evict": "withdraw",
}
#: Action type -> why it is not done.
NOT_DONE = {
    "kv.fetch": "the scheduler chooses where a cache is read from",
    "kv.share": "the scheduler chooses which node gets a cache",
}
#: Payload fields for the time to live, in order of precedence.
TTL_NAMES = ("ttl_seconds", "ttl_s", "duration")
_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class HintAction:
    """A hint, or its withdrawal, for the scheduler. after: send it when the answer has ended, else at once.

    session_id: None: the request's session. position: its index in the envelope, if it comes from one.
    """

    verb: Literal["advise", "withdraw"]
    after: bool
    session_id: str | None = None
    ttl_s: float = DEFAULT_TTL_S
    position: int | None = None


@dataclass(frozen=True, slots=True)
class HintEnvelope:
    """A decoded envelope. results: one per action, in order. actions: of the accepted ones."""

    protocol_version: str
    message_id: str | None
    results: tuple[dict[str, str], ...]
    actions: tuple[HintAction, ...]

    def answer(self, rejected: bool = False) -> dict[str, Any]:
        """The answer's `kv_hints`. rejected: the hints exceed the caller's limit, so none was sent."""
        results = [
            {**r, "status": "rejected", "reason": "more hints than this key may send"}
            if rejected and r["status"] == "accepted"
            else r
            for r in self.results
        ]
        named = {} if self.message_id is None else {"message_id": self.message_id}
        return {"protocol_version": self.protocol_version, **named, "results": results}


def read_envelope(value: Any, path: str) -> HintEnvelope:
    """The decoded envelope. Raises InvalidRequest naming the field that is missing or wrong."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} must be an object", param=path, code="invalid_type")
    version = _text(value, "protocol_version", path)
    message_id = None if value.get("message_id") is None else _text(value, "message_id", path)
    actions = value.get("actions")
    if not isinstance(actions, list) or len(actions) > MAX_ACTIONS:
        raise InvalidRequest(f"{path}.actions must be a list of at most {MAX_ACTIONS} actions", param=f"{path}.actions")
    results, accepted = [], []
    for i, action in enumerate(actions):
        at = f"{path}.actions[{i}]"
        if not isinstance(action, dict):
            raise InvalidRequest(f"{at} must be an object", param=at, code="invalid_type")
        result = {name: _text(action, name, at) for name in ("action_id", "action_type")}
        payload = {} if action.get("payload") is None else action["payload"]
        if not isinstance(payload, dict):
            raise InvalidRequest(f"{at}.payload must be an object", param=f"{at}.payload", code="invalid_type")
        kind = result["action_type"]
        if version.partition(".")[0] != MAJOR:
            results.append(
                {**result, "status": "unsupported", "reason": f"this server understands protocol_version {MAJOR}.x"}
            )
        elif kind in NOT_DONE:
            results.append({**result, "status": "unsupported", "reason": NOT_DONE[kind]})
        elif kind not in ACTIONS:
            results.append({**result, "status": "ignored", "reason": "unknown action_type"})
        else:
            results.append({**result, "status": "accepted"})
            accepted.append(_action(kind, payload, f"{at}.payload", i))
    return HintEnvelope(version, message_id, tuple(results), tuple(accepted))


def _action(kind: str, payload: dict[str, Any], path: str, position: int) -> HintAction:
    session_id, ttl_s = payload.get("session_id"), DEFAULT_TTL_S
    if session_id is not None:
        check_session_id(session_id, f"{path}.session_id")
    for name in TTL_NAMES:
        if (given := payload.get(name)) is not None:
            if type(given) not in (int, float) or not 0 <= given <= MAX_TTL_S:
                raise InvalidRequest(
                    f"{path}.{name} must be a number of seconds from 0 to {MAX_TTL_S:g}", param=f"{path}.{name}"
                )
            ttl_s = float(given)
            break
    return HintAction(ACTIONS[kind], after=kind != "kv.prefetch", session_id=session_id, ttl_s=ttl_s, position=position)


def _text(data: dict[str, Any], name: str, path: str) -> str:
    value = data.get(name)
    if not isinstance(value, str) or not 1 <= len(value) <= _NAME_CHARS or not value.isprintable():
        raise InvalidRequest(f"{path}.{name} must be a string of 1 to {_NAME_CHARS} characters", param=f"{path}.{name}")
    return value


def due(
    actions: Iterable[HintAction], own: str, model: str, priority: int, *, after: bool
) -> tuple[list[Advisory], list[str]]:
    """Hints to send at once, or with `after`, after the answer: advisories, and sessions whose hint is withdrawn. own:
    the request's session.

    Each session is named once: withdrawn if any action says so, else advised for the longest time to live. Actions on
    the request's own session wait for the answer, because the request itself already loads its cache.
    """
    longest: dict[str, float] = {}
    withdrawn: dict[str, None] = {}
    for action in actions:
        session_id = action.session_id or own
        if after is not (action.after or session_id == own):
            continue
        if action.verb == "withdraw":
            withdrawn[session_id] = None
        elif action.ttl_s > 0:
            longest[session_id] = max(action.ttl_s, longest.get(session_id, 0.0))
    advisories = [
        Advisory(s, model, priority=priority, ttl_s=ttl_s) for s, ttl_s in longest.items() if s not in withdrawn
    ]
    return advisories, list(withdrawn)


def count(actions: Sequence[HintAction], own: str) -> int:
    """Number of sessions that the actions name."""
    return len({action.session_id or own for action in actions})
