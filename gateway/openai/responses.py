"""Response bodies of chats and completions, whole or as stream chunks, behind one interface (`Shape`)."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from contracts.request import TokenLogprob, ToolCallDelta
from gateway.encoded_arrays import EncodedArray

Body = dict[str, Any]


@dataclass(slots=True)
class Choice:
    """One choice so far. completion_tokens: tokens that the worker generated. logprobs: one per token if requested.
    gathered: earlier ones, encoded, by field. calls: its function calls with their arguments so far. reasoning: the
    text of its thought. stop: the stop string that ended it. ended: nothing follows."""

    index: int
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    gathered: dict[str, EncodedArray] = field(default_factory=dict)
    completion_tokens: int = 0
    finish_reason: str = "stop"
    calls: list[ToolCallDelta] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    reasoning_tokens: int = 0
    stop: str = ""
    ended: bool = False

    def called(self, deltas: Sequence[ToolCallDelta]) -> None:
        """Add new parts of its calls."""
        for delta in deltas:
            if delta.index == len(self.calls):
                self.calls.append(ToolCallDelta(delta.index))
            call = self.calls[delta.index]
            call.id, call.name = call.id or delta.id, call.name or delta.name
            call.arguments += delta.arguments

    def gather(self, arrays: Body) -> int:
        """Its logprobs are encoded as these arrays, which go on from those before. Returns their bytes."""
        self.logprobs = []
        return sum(self.gathered.setdefault(name, EncodedArray()).add(values) for name, values in arrays.items())

    @property
    def ended_by(self) -> str:
        """OpenAI's finish reason."""
        return "tool_calls" if self.calls and self.finish_reason == "stop" else self.finish_reason


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request. cached_tokens: prompt tokens whose KV was not computed. reasoning_tokens: completion tokens
    of thoughts."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0

    def body(self) -> Body:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens, "audio_tokens": 0},
        }


class Shape(Protocol):
    """One route's bodies. A delta's logprobs are None when not requested."""

    def opening(self, index: int) -> Body | None:
        """The chunk before any text, if this route has one."""
        ...

    def delta(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, calls: Sequence[ToolCallDelta] = ()
    ) -> Body:
        """A chunk of new text, or of new parts of calls."""
        ...

    def thought(self, index: int, text: str) -> Body:
        """A chunk of a thought."""
        ...

    def closing(self, index: int, finish_reason: str) -> Body:
        """A choice's last chunk."""
        ...

    def usage(self, usage: Usage) -> Body:
        """The chunk of `stream_options.include_usage`."""
        ...

    def gather(self, choice: Choice) -> int:
        """Encode the choice's logprobs and take them from it. Returns the bytes that they take then."""
        ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Body:
        """The body of a request that does not stream; of lists of logprobs it has what `sse.encoded` reads."""
        ...


@dataclass(slots=True)
class _Head:
    """The common fields of all bodies. created_s: seconds since the epoch."""

    id: str
    model: str
    created_s: int
    include_usage: bool = False
    with_logprobs: bool = False

    def _body(self, kind: str, choices: list[Body], **more: Any) -> Body:
        body = {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}
        return body | {"system_fingerprint": None, "choices": choices} | more

    def _chunk(self, kind: str, choices: list[Body]) -> Body:
        # With include_usage, all of OpenAI's chunks have the field; it is null except in the last.
        return self._body(kind, choices, **({"usage": None} if self.include_usage else {}))


class ChatShape(_Head):
    """`/v1/chat/completions`."""

    def opening(self, index: int) -> Body | None:
        return self._delta(index, {"role": "assistant", "content": "", "refusal": None})

    def delta(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, calls: Sequence[ToolCallDelta] = ()
    ) -> Body:
        delta: Body = {"content": text} if text or not calls else {}
        if calls:
            delta["tool_calls"] = [_call_delta(call) for call in calls]
        return self._delta(index, delta, logprobs)

    def thought(self, index: int, text: str) -> Body:
        return self._delta(index, {"reasoning_content": text})

    def closing(self, index: int, finish_reason: str) -> Body:
        return self._delta(index, {}, finish_reason=finish_reason)

    def usage(self, usage: Usage) -> Body:
        return self._body("chat.completion.chunk", [], usage=usage.body())

    def gather(self, choice: Choice) -> int:
        return choice.gather({"content": _chat_logprobs(choice.logprobs)} if self.with_logprobs else {})

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Body:
        return self._body(
            "chat.completion", [self._choice(c) for c in choices], usage=usage.body(), service_tier="default"
        )

    def _choice(self, choice: Choice) -> Body:
        self.gather(choice)
        text = "".join(choice.text)
        message: Body = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
        if choice.reasoning:
            message["reasoning_content"] = "".join(choice.reasoning)
        if choice.calls:
            message["content"] = text or None
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in choice.calls
            ]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": choice.gathered | {"refusal": None} if self.with_logprobs else None,
            "finish_reason": choice.ended_by,
        }

    def _delta(
        self, index: int, delta: Body, logprobs: Sequence[TokenLogprob] | None = None, finish_reason: str | None = None
    ) -> Body:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None if logprobs is None else {"content": _chat_logprobs(logprobs), "refusal": None},
            "finish_reason": finish_reason,
        }
        return self._chunk("chat.completion.chunk", [choice])


class CompletionShape(_Head):
    """`/v1/completions`. Text offsets continue from chunk to chunk, so one shape serves one request."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._offsets: dict[int, _Offsets] = {}

    def opening(self, index: int) -> Body | None:
        return None

    def delta(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, calls: Sequence[ToolCallDelta] = ()
    ) -> Body:
        return self._chunk("text_completion", [self._choice(index, text, logprobs, None)])

    def thought(self, index: int, text: str) -> Body:
        return self.delta(index, text, None)

    def closing(self, index: int, finish_reason: str) -> Body:
        return self._chunk("text_completion", [self._choice(index, "", None, finish_reason)])

    def usage(self, usage: Usage) -> Body:
        return self._body("text_completion", [], usage=usage.body())

    def gather(self, choice: Choice) -> int:
        return choice.gather(self._logprobs(choice.index, choice.logprobs) if self.with_logprobs else {})

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Body:
        for choice in choices:
            self.gather(choice)
        made = [
            self._choice(c.index, "".join(c.text), None, c.finish_reason)
            | ({"logprobs": c.gathered} if self.with_logprobs else {})
            for c in choices
        ]
        return self._body("text_completion", made, usage=usage.body())

    def _choice(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, finish_reason: str | None
    ) -> Body:
        return {
            "text": text,
            "index": index,
            "logprobs": None if logprobs is None else self._logprobs(index, logprobs),
            "finish_reason": finish_reason,
        }

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> Body:
        offsets = self._offsets.setdefault(index, _Offsets())
        return {
            "tokens": [_legacy_token(t.token) for t in logprobs],
            "token_logprobs": [_finite(t.logprob) for t in logprobs],
            # The chosen token is always included, so there may be one more than requested.
            "top_logprobs": [
                {_legacy_token(token): _finite(p) for token, p in (*t.top, (t.token, t.logprob))} for t in logprobs
            ],
            "text_offset": [offsets.next(t.token) for t in logprobs],
        }


class _Offsets:
    """Offsets of tokens in a text, in characters. A token that continues a character has that character's offset."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at = 0

    def next(self, token: bytes) -> int:
        """The offset of the next token."""
        at = self._at
        self._at += len(self._decoder.decode(token))
        return at


def _call_delta(call: ToolCallDelta) -> Body:
    if call.id:
        return {
            "index": call.index,
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
    return {"index": call.index, "function": {"arguments": call.arguments}}


def _chat_logprobs(logprobs: Sequence[TokenLogprob]) -> list[Body]:
    return [
        {**token_body(t.token, t.logprob), "top_logprobs": [token_body(token, p) for token, p in t.top]}
        for t in logprobs
    ]


def token_body(token: bytes, logprob: float) -> Body:
    """A token and its logprob."""
    return {"token": token.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(token)}


def _legacy_token(token: bytes) -> str:
    """A token's text. A part of a character is spelled as OpenAI does, so that spellings are unique."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _finite(logprob: float) -> float:
    # JSON has no infinity; OpenAI uses -9999 for "practically impossible".
    return max(logprob, -9999.0)
