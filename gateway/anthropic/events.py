"""The events of a streamed message, in Anthropic's order, and the message that they build up to.

`message_start`, then each block: start, deltas, stop; last `message_delta` with the reason and the usage, and
`message_stop`. The first event waits for the first output, which tells how much of the prompt was cached.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from contracts.errors import RequestError
from contracts.request import ToolCallDelta
from gateway import sse
from gateway.answering import Gain
from gateway.core.relay_routes import anthropic_error
from gateway.openai.responses import Choice, Usage

Body = dict[str, Any]
#: Clients send a thought back with its signature. Nobody reads either again.
_SIGNATURE = "unsigned"


class MessageAnswer:
    """One message. Invariant: at most the last block is open."""

    said_logprobs = True
    kept_bytes = 0

    def __init__(self, message_id: str, model: str) -> None:
        self._id, self._model = message_id, model
        self._begun = False
        self._blocks = 0
        #: Of the open block: its type, and the position of its call.
        self._open = ""
        self._position = -1

    # ---- a stream ----------------------------------------------------------------------------------------------
    def opened(self, index: int) -> bytes:
        return b""

    def grown(self, index: int, gained: Sequence[Gain], usage: Callable[[], Usage]) -> bytes:
        made = [self._start(usage())] if not self._begun and any(_says(gain) for gain in gained) else []
        for output, thought in gained:
            if thought:
                made.append(self._opens("thinking", {"thinking": "", "signature": ""}))
                made.append(self._delta("thinking_delta", thinking=thought))
            if output.text:
                made.append(self._opens("text", {"text": ""}))
                made.append(self._delta("text_delta", text=output.text))
            made += [self._call(delta) for delta in output.tool_calls or ()]
        return b"".join(made)

    def closed(self, choice: Choice, more: Body) -> bytes:
        return self._closes()

    def ended(self, choices: Sequence[Choice], usage: Usage, comment: bytes) -> bytes:
        made = b"" if self._begun else self._start(usage)
        reason, stop = _ended_by(choices[0])
        delta = {"stop_reason": reason, "stop_sequence": stop}
        made += comment + _event("message_delta", delta=delta, usage=usage_body(usage))
        return made + _event("message_stop")

    def failed(self, error: RequestError) -> bytes:
        return b"event: error\n" + sse.event(anthropic_error(error))

    def _start(self, usage: Usage) -> bytes:
        self._begun = True
        message = self._message([], None, None, usage_body(usage) | {"output_tokens": 0})
        return _event("message_start", message=message)

    def _opens(self, kind: str, body: Body, position: int = -1) -> bytes:
        if self._open == kind and self._position == position:
            return b""
        made = self._closes()
        self._open, self._position = kind, position
        self._blocks += 1
        return made + _event("content_block_start", index=self._blocks - 1, content_block={"type": kind} | body)

    def _call(self, delta: ToolCallDelta) -> bytes:
        begun = self._open == "tool_use" and self._position == delta.index
        body = {"id": delta.id, "name": delta.name, "input": {}}
        made = b"" if begun else self._opens("tool_use", body, delta.index)
        return made + (self._delta("input_json_delta", partial_json=delta.arguments) if delta.arguments else b"")

    def _closes(self) -> bytes:
        if not self._open:
            return b""
        made = self._delta("signature_delta", signature=_SIGNATURE) if self._open == "thinking" else b""
        self._open, self._position = "", -1
        return made + _event("content_block_stop", index=self._blocks - 1)

    def _delta(self, kind: str, **fields: Any) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta={"type": kind} | fields)

    # ---- a whole answer ----------------------------------------------------------------------------------------
    def gather(self, choice: Choice) -> None:
        choice.logprobs = []

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Body:
        choice = choices[0]
        blocks: list[Body] = []
        if choice.reasoning:
            thought = "".join(choice.reasoning)
            blocks.append({"type": "thinking", "thinking": thought, "signature": _SIGNATURE})
        if text := "".join(choice.text):
            blocks.append({"type": "text", "text": text})
        for call in choice.calls:
            use = {"id": call.id, "name": call.name, "input": arguments_of(call)}
            blocks.append({"type": "tool_use"} | use)
        return self._message(blocks, *_ended_by(choice), usage_body(usage))

    def _message(self, content: list[Body], reason: str | None, stop: str | None, usage: Body) -> Body:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }


def arguments_of(call: ToolCallDelta) -> Body:
    """A call's arguments as an object; empty where `max_tokens` cut their text off."""
    try:
        found = json.loads(call.arguments or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def usage_body(usage: Usage) -> Body:
    """The usage of a message, in which cached tokens stand beside the others."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _ended_by(choice: Choice) -> tuple[str, str | None]:
    """The reason for the end, and the stop sequence that was met."""
    if choice.finish_reason == "length":
        return "max_tokens", None
    if choice.calls:
        return "tool_use", None
    return ("stop_sequence", choice.stop) if choice.stop else ("end_turn", None)


def _says(gain: Gain) -> bool:
    output, thought = gain
    return bool(thought or output.text or output.tool_calls)


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\n" + sse.event({"type": kind} | fields)
