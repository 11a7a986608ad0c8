"""W3C trace context: what a request says of its trace, checked, and how services tell each other.

A caller's `traceparent` that is not exactly as the standard has it is ignored, as the standard asks; so is a bad
`tracestate`. `baggage` is never read. Between services a context is one text: the traceparent and, after a space, the
tracestate. Only traced requests carry one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

#: Longest tracestate that is kept, in characters, and its most members: the standard's figures.
MOST_STATE, MOST_MEMBERS = 512, 32
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[ -~]{0,200})?")
_KEY = r"(?:[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
_VALUE = r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_MEMBER = re.compile(f"({_KEY})={_VALUE}")
_SAMPLED = 0x01


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span's place in its trace. trace_id: 32 hex digits; span_id: 16; state: the tracestate, or empty."""

    trace_id: str
    span_id: str
    sampled: bool = True
    state: str = ""

    @property
    def traceparent(self) -> str:
        """The header's value."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"

    @property
    def headers(self) -> list[tuple[str, str]]:
        """Both headers, or the first if there is no state."""
        return [("traceparent", self.traceparent), *([("tracestate", self.state)] if self.state else [])]

    def to_wire(self) -> str:
        """The text for another service."""
        return f"{self.traceparent} {self.state}".rstrip()


def from_headers(parents: Sequence[str], states: Sequence[str]) -> TraceContext | None:
    """The context of a request with these values of its headers `traceparent` and `tracestate`; None: it has none, or
    one that is to be ignored."""
    if len(parents) != 1:
        return None
    found = _PARENT.fullmatch(parents[0].strip(" \t"))
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), checked_state(",".join(states)))


def checked_state(state: str) -> str:
    """The tracestate without spaces between members, and without last members beyond `MOST_STATE`; empty if it is not
    as the standard has it."""
    if len(state) > 16 * MOST_STATE:
        return ""
    members = [member for part in state.split(",") if (member := part.strip(" \t"))]
    found = [_MEMBER.fullmatch(member) for member in members]
    keys = {match[1] for match in found if match is not None}
    if len(keys) != len(members) or len(members) > MOST_MEMBERS:  # a bad member, or a key twice
        return ""
    while sum(map(len, members)) + len(members) - 1 > MOST_STATE:
        members.pop()
    return ",".join(members)


def from_wire(text: object) -> TraceContext | None:
    """The context that another service has told; None if it is empty or not valid."""
    if not text or not isinstance(text, str):
        return None
    parent, _, state = text.partition(" ")
    return from_headers([parent], [state] if state else [])
