"""Reads an engine's answer as it passes: the tokens it used, when its first output came and when its last, and the
assistant's turn, by which an unnamed session is recognised later.

An answer that does not state its tokens (a stream without `include_usage`) is counted by its length: an event is a
token, or more if it has more text than tokens usually have. So a caller gains little by asking for few, long events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from gateway.core.relay_events import data_of
from gateway.core.relay_routes import RelayKind

#: Larger events are not decoded, because that would hold up all other requests; they count as text.
MOST_EVENT_BYTES = 1 << 20
#: Text that is kept of an answer, for its history.
MOST_KEPT_BYTES = 4 << 20
_MOST_TOKENS = 1 << 40
#: More bytes of text per event than this are several tokens.
_BYTES_AN_EVENT = 6


@dataclass(slots=True)
class Stated:
    """The tokens that an answer states. cached_tokens: those of the prompt whose KV was not computed."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class Reading:
    """What is known of one answer. kind: of its route. keeps: its text is needed.

    stated: None until the answer states it. events, text_bytes: number of events with data, and length of the generated
    text in them. spoken: it has output. ended: it is complete. text, calls: the assistant's turn, of the first choice;
    calls are name and arguments."""

    kind: RelayKind
    keeps: bool = False
    stated: Stated | None = None
    events: int = 0
    text_bytes: int = 0
    spoken: bool = False
    ended: bool = False
    text: list[str] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)
    kept_bytes: int = 0

    def push(self, events: bytes) -> None:
        """Read whole events of a stream."""
        for data in data_of(events):
            if data == b"[DONE]":
                self.ended = True
                continue
            self.events += 1
            if len(data) > MOST_EVENT_BYTES:
                self.unread(len(data))
                continue
            value = _decoded(data)
            if value is not None and self.kind in _EVENTS:
                _EVENTS[self.kind](self, value)

    def unread(self, length: int) -> None:
        """Count a part of an answer that is too long to be decoded."""
        self.spoken = True
        self.text_bytes += length

    def whole(self, body: bytes) -> None:
        """Read an answer in one body."""
        value = _decoded(body)
        self.spoken = self.ended = True
        if value is not None:
            _states(self, value.get("usage"))
            if self.kind in _WHOLE:
                _WHOLE[self.kind](self, value)

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer, as stated or estimated."""
        if self.stated is not None:
            return self.stated.completion_tokens
        return max(self.events, -(-self.text_bytes // _BYTES_AN_EVENT))

    def prompt_tokens(self, estimate: int) -> int:
        """Tokens of the prompt, as stated; else the estimate."""
        return self.stated.prompt_tokens if self.stated is not None else estimate

    @property
    def turn(self) -> str | None:
        """The assistant's text; None: it is not known."""
        return "".join(self.text) if self.ended and self.kept_bytes <= MOST_KEPT_BYTES else None

    def said(self, text: Any, *, first: bool = True) -> None:
        """Generated text. first: of the first choice."""
        if not isinstance(text, str) or not text:
            return
        self.spoken = True
        self.text_bytes += len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        if first and self.room(text):
            self.text.append(text)

    def counted(self, text: Any) -> None:
        """Generated text that is not part of the assistant's turn: reasoning, or text that comes again."""
        self.said(text, first=False)

    def call(self, position: int, name: Any = None, arguments: Any = None) -> None:
        """The call at `position` gains a name and more arguments."""
        self.spoken = True
        if not self.keeps or not 0 <= position <= len(self.calls):
            return
        if position == len(self.calls):
            self.calls.append(["", ""])
        for place, more in enumerate((name, arguments)):
            if isinstance(more, str) and self.room(more):
                self.calls[position][place] += more

    def room(self, text: str) -> bool:
        """Whether this text is kept too."""
        if self.keeps:
            self.kept_bytes += len(text)
        return self.keeps and self.kept_bytes <= MOST_KEPT_BYTES


def _decoded(data: bytes) -> dict[str, Any] | None:
    try:
        value = from_json(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _states(reading: Reading, usage: Any) -> None:
    if not isinstance(usage, dict) or "prompt_tokens" not in usage:
        return
    stated = reading.stated = reading.stated or Stated()
    details = usage.get("prompt_tokens_details")
    stated.prompt_tokens = _count(usage["prompt_tokens"])
    stated.completion_tokens = _count(usage.get("completion_tokens"))
    stated.cached_tokens = _count(details.get("cached_tokens")) if isinstance(details, dict) else 0


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < _MOST_TOKENS else 0


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# ---- events of a stream ----------------------------------------------------------------------------------------------
def _chat_event(reading: Reading, value: dict[str, Any]) -> None:
    for choice in _objects(value.get("choices")):
        delta, first = _object(choice.get("delta")), choice.get("index") == 0
        reading.said(delta.get("content"), first=first)
        reading.counted(delta.get("reasoning") or delta.get("reasoning_content"))
        for call in _objects(delta.get("tool_calls")):
            function = _object(call.get("function"))
            if first and isinstance(position := call.get("index"), int):
                reading.call(position, function.get("name"), function.get("arguments"))
            reading.counted(function.get("arguments"))
    _states(reading, value.get("usage"))


def _completion_event(reading: Reading, value: dict[str, Any]) -> None:
    for choice in _objects(value.get("choices")):
        reading.said(choice.get("text"), first=choice.get("index") == 0)
    _states(reading, value.get("usage"))


# ---- whole answers ---------------------------------------------------------------------------------------------------
def _chat_whole(reading: Reading, value: dict[str, Any]) -> None:
    for choice in _objects(value.get("choices")):
        message, first = _object(choice.get("message")), choice.get("index") == 0
        reading.said(message.get("content"), first=first)
        reading.counted(message.get("reasoning") or message.get("reasoning_content"))
        for position, call in enumerate(_objects(message.get("tool_calls"))):
            function = _object(call.get("function"))
            reading.counted(function.get("arguments"))
            if first:
                reading.call(position, function.get("name"), function.get("arguments"))


_EVENTS: dict[RelayKind, Callable[[Reading, dict[str, Any]], None]] = {
    "chat": _chat_event,
    "completion": _completion_event,
}
_WHOLE: dict[RelayKind, Callable[[Reading, dict[str, Any]], None]] = {
    "chat": _chat_whole,
    "completion": _completion_event,
}
