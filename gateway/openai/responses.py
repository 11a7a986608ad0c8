"""Response bodies: a chat's and a completion's, whole or as stream chunks. Both shapes have one interface (`Shape`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from contracts.request import TokenLogprob

Body = dict[str, Any]


@dataclass(slots=True)
class Choice:
    """What one choice has come to. `completion_tokens` counts what the worker generated, `logprobs` one a token when asked for."""

    index: int
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    completion_tokens: int = 0
    finish_reason: str = "stop"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request. `cached_tokens`: prompt tokens whose KV was not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def body(self) -> Body:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
        }


class Shape(Protocol):
    """One route's bodies. A delta's logprobs are None when none were asked for."""

    def opening(self, index: int) -> Body | None:
        """The chunk before any text, if this route has one."""
        ...

    def delta(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> Body:
        """A chunk of new text."""
        ...

    def closing(self, index: int, finish_reason: str) -> Body:
        """A choice's last chunk."""
        ...

    def usage(self, usage: Usage) -> Body:
        """The chunk of `stream_options.include_usage`."""
        ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Body:
        """The body of a request that does not stream."""
        ...


@dataclass(slots=True)
class _Head:
    """What every body begins with. `created_s`: seconds since the epoch."""

    id: str
    model: str
    created_s: int
    include_usage: bool = False
    with_logprobs: bool = False

    def _body(self, kind: str, choices: list[Body], **more: Any) -> Body:
        body = {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}
        return body | {"system_fingerprint": None, "choices": choices} | more

    def _chunk(self, kind: str, choices: list[Body]) -> Body:
        # With include_usage, OpenAI's chunks all have the field, null but in the last.
        return self._body(kind, choices, **({"usage": None} if self.include_usage else {}))


class ChatShape(_Head):
    """`/v1/chat/completions`."""

    def opening(self, index: int) -> Body | None:
        return self._delta(index, {"role": "assistant", "content": "", "refusal": None})

    def delta(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> Body:
        return self._delta(index, {"content": text}, logprobs)

    def closing(self, index: int, finish_reason: str) -> Body:
        return self._delta(index, {}, finish_reason=finish_reason)

    def usage(self, usage: Usage) -> Body:
        return self._body("chat.completion.chunk", [], usage=usage.body())

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Body:
        return self._body("chat.completion", [self._choice(c) for c in choices], usage=usage.body(), service_tier="default")

    def _choice(self, choice: Choice) -> Body:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None, "annotations": []},
            "logprobs": _chat_logprobs(choice.logprobs) if self.with_logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def _delta(self, index: int, delta: Body, logprobs: Sequence[TokenLogprob] | None = None, finish_reason: str | None = None) -> Body:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None if logprobs is None else _chat_logprobs(logprobs),
            "finish_reason": finish_reason,
        }
        return self._chunk("chat.completion.chunk", [choice])


class CompletionShape(_Head):
    """`/v1/completions`. Streamed text offsets go on from chunk to chunk, so one shape serves one request."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        #: Per choice: characters of the tokens whose logprobs were sent.
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> Body | None:
        return None

    def delta(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None) -> Body:
        return self._chunk("text_completion", [self._choice(index, text, logprobs, None)])

    def closing(self, index: int, finish_reason: str) -> Body:
        return self._chunk("text_completion", [self._choice(index, "", None, finish_reason)])

    def usage(self, usage: Usage) -> Body:
        return self._body("text_completion", [], usage=usage.body())

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Body:
        made = [self._choice(c.index, "".join(c.text), c.logprobs if self.with_logprobs else None, c.finish_reason) for c in choices]
        return self._body("text_completion", made, usage=usage.body())

    def _choice(self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, finish_reason: str | None) -> Body:
        return {
            "text": text,
            "index": index,
            "logprobs": None if logprobs is None else self._logprobs(index, logprobs),
            "finish_reason": finish_reason,
        }

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> Body:
        offsets, at = [], self._offsets.get(index, 0)
        for token in logprobs:
            offsets.append(at)
            at += len(token.token)
        self._offsets[index] = at
        return {
            "tokens": [t.token for t in logprobs],
            "token_logprobs": [_finite(t.logprob) for t in logprobs],
            "top_logprobs": [{text: _finite(p) for text, p in t.top} for t in logprobs],
            "text_offset": offsets,
        }


def _chat_logprobs(logprobs: Sequence[TokenLogprob]) -> Body:
    return {
        "content": [{**_token(t.token, t.logprob), "top_logprobs": [_token(text, p) for text, p in t.top]} for t in logprobs],
        "refusal": None,
    }


def _token(text: str, logprob: float) -> Body:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode("utf-8", "replace"))}


def _finite(logprob: float) -> float:
    # JSON has no infinities; OpenAI says -9999 for "practically impossible".
    return max(logprob, -9999.0)
