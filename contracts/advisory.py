"""Advisories (hints): fields, limits and their JSON form (SYMPHONY, figure 7 and section 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contracts.errors import InvalidRequest
from contracts.ids import check_session_id

#: Seconds after its expected arrival for which an advisory keeps its rank.
DEFAULT_TTL_S = 60.0
#: Upper limit of `ttl_s` and `expected_arrival`, in seconds.
MAX_TTL_S = 86_400.0
MAX_ADVISORIES = 256
_SESSION_ALONE = {"session_id"}
_FIELDS = {"session_id", "model_id", "expected_arrival", "ordered", "priority", "ttl_s", "token"}


@dataclass(frozen=True, slots=True)
class Advisory:
    """A session is about to send a request. Carries no text.

    expected_arrival_s: seconds from now; None: unknown.
    ordered: the caller's requests will arrive in the order of its list of advisories.
    priority: lower is more urgent.
    ttl_s: seconds after the expected arrival until the prefetched KV loses its rank (it is not dropped).
    """

    session_id: str
    model_id: str | None = None
    expected_arrival_s: float | None = None
    ordered: bool = False
    priority: int = 0
    ttl_s: float = DEFAULT_TTL_S

    @property
    def lifetime_s(self) -> float:
        """Seconds from its arrival until the advisory expires."""
        return (self.expected_arrival_s or 0.0) + self.ttl_s


def parse_advisory(data: Any, where: str = "") -> Advisory:
    """An Advisory from decoded JSON. Raises InvalidRequest naming the field, prefixed with `where`."""
    if not isinstance(data, dict):
        raise InvalidRequest(f"{where or 'body'} must be an object with session_id", param=where or None)
    dot = f"{where}." if where else ""
    if data.keys() == _SESSION_ALONE:  # fast path: web pages send this with every keystroke
        return Advisory(check_session_id(data["session_id"], f"{dot}session_id"))
    for name in data:
        if name not in _FIELDS:
            shown = f"{dot}{str(name)[:80]}"
            raise InvalidRequest(
                f"unknown field {shown}; known: {', '.join(sorted(_FIELDS))}", param=shown, code="unknown_parameter"
            )
    if "session_id" not in data:
        raise InvalidRequest(
            f"{dot}session_id is required", param=f"{dot}session_id", code="missing_required_parameter"
        )
    return Advisory(
        session_id=check_session_id(data["session_id"], f"{dot}session_id"),
        model_id=_optional_text(data, "model_id", dot),
        expected_arrival_s=_seconds(data, "expected_arrival", dot),
        ordered=_boolean(data, "ordered", dot),
        priority=_priority(data, dot),
        ttl_s=_seconds(data, "ttl_s", dot) if data.get("ttl_s") is not None else DEFAULT_TTL_S,  # type: ignore[arg-type]
    )


def parse_advisories(data: Any) -> list[Advisory]:
    """One advisory object, or `{"advisories": [...]}` with 1 to MAX_ADVISORIES of them."""
    if not isinstance(data, dict) or "advisories" not in data:
        return [parse_advisory(data)]
    unknown = set(data) - {"advisories", "token"}
    if unknown:
        name = sorted(unknown)[0][:80]
        raise InvalidRequest(f"unknown field {name} beside advisories", param=name, code="unknown_parameter")
    many = data["advisories"]
    if not isinstance(many, list) or not 1 <= len(many) <= MAX_ADVISORIES:
        raise InvalidRequest(f"advisories must be a list of 1 to {MAX_ADVISORIES} objects", param="advisories")
    return [parse_advisory(item, f"advisories[{i}]") for i, item in enumerate(many)]


def _optional_text(data: dict[str, Any], name: str, dot: str) -> str | None:
    value = data.get(name)
    if value is not None and (not isinstance(value, str) or not 1 <= len(value) <= 256 or not value.isprintable()):
        raise InvalidRequest(
            f"{dot}{name} must be a string of 1 to 256 printable characters or null", param=f"{dot}{name}"
        )
    return value


def _seconds(data: dict[str, Any], name: str, dot: str) -> float | None:
    value = data.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TTL_S:
        raise InvalidRequest(f"{dot}{name} must be a number of seconds from 0 to 86400, or null", param=f"{dot}{name}")
    return float(value)


def _boolean(data: dict[str, Any], name: str, dot: str) -> bool:
    value = data.get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{dot}{name} must be true or false", param=f"{dot}{name}")
    return value


def _priority(data: dict[str, Any], dot: str) -> int:
    value = data.get("priority", 0)
    if isinstance(value, bool) or not isinstance(value, int) or not -1000 <= value <= 1000:
        raise InvalidRequest(
            f"{dot}priority must be an integer from -1000 to 1000 (lower is more urgent)", param=f"{dot}priority"
        )
    return value
