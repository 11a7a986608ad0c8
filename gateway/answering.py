"""An answer's bytes as its choices grow: events of a stream, or a body. One small object a request, for one API.

`Chunks` is that of chats and completions; `gateway.responses.events` and `gateway.anthropic.events` have the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from contracts.errors import RequestError
from contracts.request import Output
from gateway import sse
from gateway.openai.responses import Choice, Shape, Usage

#: An output without its thought, and the thought.
Gain = tuple[Output, str]


class Answering(Protocol):
    """One request's answer. Choices are told in order: opened, grown any number of times, closed. said_logprobs: tokens
    of a thought have none."""

    said_logprobs: bool

    @property
    def kept_bytes(self) -> int:
        """Bytes of the logprobs that it keeps."""
        ...

    def gather(self, choice: Choice) -> None:
        """Encode the choice's logprobs, of an answer that does not stream, and take them from it."""
        ...

    def opened(self, index: int) -> bytes:
        """Events at a choice's beginning, before any output."""
        ...

    def grown(self, index: int, gained: Sequence[Gain], usage: Callable[[], Usage]) -> bytes:
        """Events for new outputs. usage: of the request so far."""
        ...

    def closed(self, choice: Choice, more: dict[str, Any]) -> bytes:
        """Events at a choice's end. more: further fields, of the first choice."""
        ...

    def ended(self, choices: Sequence[Choice], usage: Usage, comment: bytes) -> bytes:
        """The last events. comment: goes before the very last one."""
        ...

    def failed(self, error: RequestError) -> bytes:
        """The last events of a stream that breaks off."""
        ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The body of a request that does not stream."""
        ...


class Chunks:
    """Chunks of OpenAI's older routes. include_usage: the stream ends with a chunk of usage."""

    said_logprobs = False

    def __init__(self, shape: Shape, *, include_usage: bool) -> None:
        self._shape, self._include_usage = shape, include_usage
        #: By choice: events of plain text, whose surroundings are encoded once.
        self._plain: dict[int, sse.TextEvents] = {}
        self.kept_bytes = 0

    def gather(self, choice: Choice) -> None:
        self.kept_bytes += self._shape.gather(choice)

    def opened(self, index: int) -> bytes:
        opening = self._shape.opening(index)
        return b"" if opening is None else sse.event(opening)

    def grown(self, index: int, gained: Sequence[Gain], usage: Callable[[], Usage]) -> bytes:
        made = []
        for o, thought in gained:
            if thought:
                made.append(sse.event(self._shape.thought(index, thought)))
            if o.logprobs or o.tool_calls:
                made.append(sse.event(self._shape.delta(index, o.text, o.logprobs, o.tool_calls or ())))
            elif o.text:
                if (plain := self._plain.get(index)) is None:
                    plain = self._plain[index] = sse.TextEvents(lambda text: self._shape.delta(index, text, None))
                made.append(plain.event(o.text))
        return b"".join(made)

    def closed(self, choice: Choice, more: dict[str, Any]) -> bytes:
        return sse.event(self._shape.closing(choice.index, choice.ended_by) | more)

    def ended(self, choices: Sequence[Choice], usage: Usage, comment: bytes) -> bytes:
        last = sse.event(self._shape.usage(usage)) if self._include_usage else b""
        return last + comment + sse.DONE

    def failed(self, error: RequestError) -> bytes:
        return sse.failure(error)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        return self._shape.whole(choices, usage)
