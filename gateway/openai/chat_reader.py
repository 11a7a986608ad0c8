"""Reads an engine's answer to a chat, whole or as chunks, as what Upbeat's own engine would have said."""

from __future__ import annotations

import secrets
from typing import Any

from contracts.errors import InvalidRequest, RequestError, Unavailable, from_wire
from contracts.request import FinishReason, Output, TokenLogprob, ToolCallDelta
from gateway.core.reasoning import ReasoningReader, SaidLogprobs
from gateway.openai.responses import Choice, Usage

_MOST_TOKENS = 1 << 40
#: Calls of one answer.
_MOST_CALLS = 1024


class ChatReader:
    """One answer's first choice so far. thoughts: whether they are kept. usage: as far as the engine has said."""

    def __init__(self, *, thoughts: bool, splits: bool) -> None:
        """splits: text between `<think>` and `</think>` is a thought."""
        self.choice, self.usage = Choice(0), Usage(0, 0, 0)
        self._thoughts = thoughts
        self._reader = ReasoningReader(False) if splits else None
        self._said_logprobs = SaidLogprobs()

    def chunk(self, value: dict[str, Any]) -> list[tuple[Output, str]]:
        """What a chunk adds: outputs and their thoughts. Raises RequestError for a chunk that is an error."""
        if value.get("error") is not None:
            raise error_of(value, 500)
        self._counts(value.get("usage"))
        gained = []
        for choice in _objects(value.get("choices")):
            if choice.get("index", 0) == 0:
                gained += self._said(_object(choice.get("delta")), choice)
                self.choice.logprobs.clear()  # only a whole answer says them again
        return gained

    def whole(self, value: dict[str, Any]) -> None:
        """Read a whole answer. Raises RequestError for one that is none."""
        choices = _objects(value.get("choices"))
        if not choices:
            raise Unavailable("the engine's answer cannot be read; try again")
        self._counts(value.get("usage"))
        self._said(_object(choices[0].get("message")), choices[0] | {"finish_reason": _end(choices[0])})

    def _said(self, said: dict[str, Any], choice: dict[str, Any]) -> list[tuple[Output, str]]:
        ended = _end(choice) if choice.get("finish_reason") is not None else None
        thought, text = _text(said.get("reasoning_content")) or _text(said.get("reasoning")), _text(said.get("content"))
        logprobs = [_logprob(one) for one in _objects(_object(choice.get("logprobs")).get("content"))]
        if thought:
            self._reader = None  # the engine splits them
            logprobs = logprobs if text else []
        elif self._reader is not None:
            before = self._reader.state
            thought, text = self._reader.push(text, last=ended is not None)
            logprobs = self._said_logprobs.of(before, self._reader.state, text, logprobs)
        deltas = [self._called(call, i) for i, call in enumerate(_objects(said.get("tool_calls")))]
        output = Output("", text, [], logprobs=logprobs or None, finish_reason=ended, tool_calls=deltas or None)
        self._keep(output, thought if self._thoughts else "", choice)
        return [(output, thought if self._thoughts else "")]

    def _keep(self, output: Output, thought: str, choice: dict[str, Any]) -> None:
        made = self.choice
        made.text.append(output.text)
        made.logprobs += output.logprobs or ()
        if thought:
            made.reasoning.append(thought)
        if output.tool_calls:
            made.called(output.tool_calls)
        made.finish_reason = output.finish_reason or made.finish_reason
        if isinstance(choice.get("stop_reason"), str):
            made.stop = choice["stop_reason"]

    def _called(self, call: dict[str, Any], place: int) -> ToolCallDelta:
        """New parts of a call. Positions come in order."""
        function = _object(call.get("function"))
        index = call.get("index", place)
        if type(index) is not int or not 0 <= index <= min(len(self.choice.calls) + place, _MOST_CALLS):
            raise Unavailable("the engine's answer has calls without an order; try again")
        known = self.choice.calls[index].id if index < len(self.choice.calls) else ""
        return ToolCallDelta(
            index,
            known or _text(call.get("id")) or f"call_{secrets.token_hex(12)}",
            _text(function.get("name")),
            _text(function.get("arguments")),
        )

    def _counts(self, usage: Any) -> None:
        if not isinstance(usage, dict):
            return
        cached = _object(usage.get("prompt_tokens_details")).get("cached_tokens")
        thought = _object(usage.get("completion_tokens_details")).get("reasoning_tokens")
        prompt = _count(usage.get("prompt_tokens"))
        self.usage = Usage(prompt, _count(usage.get("completion_tokens")), min(_count(cached), prompt), _count(thought))
        self.choice.completion_tokens = self.usage.completion_tokens


def error_of(value: Any, status: int) -> RequestError:
    """An engine's error, in OpenAI's envelope or vLLM's older form."""
    inside = _object(_object(value).get("error")) or _object(value)
    code = inside.get("code")
    status = code if type(code) is int and 400 <= code <= 599 else status
    message = _text(inside.get("message")) or "the engine failed without saying why"
    param = _text(inside.get("param")) or None
    if status < 500 and status not in (401, 403):  # the gateway's credentials are not the caller's
        error = from_wire(status, message, param, code if isinstance(code, str) else None)
        return error if error.status == status else InvalidRequest(message, param=param)
    return Unavailable(message)


def _end(choice: dict[str, Any]) -> FinishReason:
    return "length" if choice.get("finish_reason") == "length" else "stop"


def _logprob(one: dict[str, Any]) -> TokenLogprob:
    top = [(_bytes(t), _number(t.get("logprob"))) for t in _objects(one.get("top_logprobs"))]
    return TokenLogprob(_bytes(one), _number(one.get("logprob")), top)


def _bytes(one: dict[str, Any]) -> bytes:
    spelled = one.get("bytes")
    if isinstance(spelled, list) and all(type(b) is int and 0 <= b < 256 for b in spelled):
        return bytes(spelled)
    return _text(one.get("token")).encode("utf-8", "replace")


def _number(value: Any) -> float:
    return float(value) if type(value) in (int, float) else -9999.0


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < _MOST_TOKENS else 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
