"""The `kv_hints` envelope that vLLM, SGLang and Dynamo agree on: a protocol version, and actions, each with an id, a type and a payload.

Decides what Upbeat does about each action, and what it answers. An action is a wish and no order: the answer says that it was accepted,
never that bytes have moved. Nobody has fixed how results are told, so the words are ours: `accepted`; `rejected`, there are too many hints;
`unsupported`, we know the action and do not do it; `ignored`, we do not know it.
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
#: Action type -> what it is here.
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
#: How a payload may say for how long, in order.
TTL_NAMES = ("ttl_seconds", "ttl_s", "duration")
_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class Wish:
    """Something to tell the scheduler: a session is about to speak, or it is not. after: when the answer has ended, else at once.

    session_id: None is the request's own. action: its place in the envelope, when it comes from one.
    """

    verb: Literal["advise", "withdraw"]
    after: bool
    session_id: str | None = None
    ttl_s: float = DEFAULT_TTL_S
    action: int | None = None


@dataclass(frozen=True, slots=True)
class Wishes:
    """An envelope that was read. results: one an action, in order; `wishes` are those of the accepted ones."""

    protocol_version: str
    message_id: str | None
    results: tuple[dict[str, str], ...]
    wishes: tuple[Wish, ...]

    def answer(self, rejected: bool = False) -> dict[str, Any]:
        """What the caller is told. rejected: the caller's hints are over the limit, so none was taken."""
        results = [
            {**r, "status": "rejected", "reason": "more hints than this key may send"} if rejected and r["status"] == "accepted" else r
            for r in self.results
        ]
        named = {} if self.message_id is None else {"message_id": self.message_id}
        return {"protocol_version": self.protocol_version, **named, "results": results}


def read_envelope(value: Any, path: str) -> Wishes:
    """The envelope. Raises InvalidRequest naming the field that is missing or wrong."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} must be an object", param=path, code="invalid_type")
    version = _text(value, "protocol_version", path)
    message_id = None if value.get("message_id") is None else _text(value, "message_id", path)
    actions = value.get("actions")
    if not isinstance(actions, list) or len(actions) > MAX_ACTIONS:
        raise InvalidRequest(f"{path}.actions must be a list of at most {MAX_ACTIONS} actions", param=f"{path}.actions")
    results, wishes = [], []
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
            results.append({**result, "status": "unsupported", "reason": f"this server understands protocol_version {MAJOR}.x"})
        elif kind in NOT_DONE:
            results.append({**result, "status": "unsupported", "reason": NOT_DONE[kind]})
        elif kind not in ACTIONS:
            results.append({**result, "status": "ignored", "reason": "unknown action_type"})
        else:
            results.append({**result, "status": "accepted"})
            wishes.append(_wish(kind, payload, f"{at}.payload", i))
    return Wishes(version, message_id, tuple(results), tuple(wishes))


def _wish(kind: str, payload: dict[str, Any], path: str, action: int) -> Wish:
    session_id, ttl_s = payload.get("session_id"), DEFAULT_TTL_S
    if session_id is not None:
        check_session_id(session_id, f"{path}.session_id")
    for name in TTL_NAMES:
        if (given := payload.get(name)) is not None:
            if type(given) not in (int, float) or not 0 <= given <= MAX_TTL_S:
                raise InvalidRequest(f"{path}.{name} must be a number of seconds from 0 to {MAX_TTL_S:g}", param=f"{path}.{name}")
            ttl_s = float(given)
            break
    return Wish(ACTIONS[kind], after=kind != "kv.prefetch", session_id=session_id, ttl_s=ttl_s, action=action)


def _text(data: dict[str, Any], name: str, path: str) -> str:
    value = data.get(name)
    if not isinstance(value, str) or not 1 <= len(value) <= _NAME_CHARS or not value.isprintable():
        raise InvalidRequest(f"{path}.{name} must be a string of 1 to {_NAME_CHARS} characters", param=f"{path}.{name}")
    return value


def due(wishes: Iterable[Wish], own: str, model: str, priority: int, *, after: bool) -> tuple[list[Advisory], list[str]]:
    """What is told at once, or after the answer: advisories, then sessions whose hint is taken back. own: the request's session.

    A session is told of once: taken back when anything says so, else for as long as the longest wish wants. What would bring the request's
    own session up at once does so after the answer: the request itself is here.
    """
    longest: dict[str, float] = {}
    withdrawn: dict[str, None] = {}
    for wish in wishes:
        session_id = wish.session_id or own
        if after is not (wish.after or session_id == own):
            continue
        if wish.verb == "withdraw":
            withdrawn[session_id] = None
        elif wish.ttl_s > 0:
            longest[session_id] = max(wish.ttl_s, longest.get(session_id, 0.0))
    advisories = [Advisory(s, model, priority=priority, ttl_s=ttl_s) for s, ttl_s in longest.items() if s not in withdrawn]
    return advisories, list(withdrawn)


def count(wishes: Sequence[Wish], own: str) -> int:
    """Of how many sessions something is told."""
    return len({wish.session_id or own for wish in wishes})
