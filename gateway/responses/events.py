"""The events of a streamed response, in OpenAI's order, and the response object that they build up to.

`created`, `in_progress`, then each item: added, its parts or arguments, done; last `completed`, `incomplete` or
`failed`. Items come one after the other: a thought, the text, calls. Each event has the next `sequence_number`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from contracts.errors import RequestError
from contracts.request import Output, TokenLogprob, ToolCallDelta
from gateway import sse
from gateway.answering import Gain
from gateway.encoded_arrays import EncodedArray
from gateway.openai.responses import Choice, Usage, token_body
from gateway.responses.ids import item_id

Body = dict[str, Any]


class ResponseAnswer:
    """One response. Invariant: at most the last item of `output` is open."""

    said_logprobs = True

    def __init__(
        self, response_id: str, model: str, created_s: float, echo: Body, *, as_summary: bool, with_logprobs: bool
    ) -> None:
        """created_s: seconds since the epoch. echo: fields of the request that the response says again."""
        self.id, self._as_summary, self._with_logprobs = response_id, as_summary, with_logprobs
        # In this order: see `store.Response.shown`.
        head = {"id": response_id, "object": "response", "created_at": int(created_s), "status": "in_progress"}
        head |= {"background": False, "error": None, "incomplete_details": None, "model": model}
        self._head: Body = head | echo | {"usage": None}
        self.output: list[Body] = []
        self._open: _Item | None = None
        #: Of tokens whose text is still to come.
        self._held: list[TokenLogprob] = []
        #: The next text's logprobs, encoded; of a whole answer, those that are gathered.
        self._logprobs = EncodedArray()
        self.kept_bytes = 0
        self._number = 0
        self._begun = self._silent = False

    def response(self, status: str, **more: Any) -> Body:
        """The response object now."""
        return self._head | {"status": status, "output": self.output} | more

    def unstored(self) -> None:
        """The response could not be stored; its last object says so."""
        self._head["store"] = False

    def final(self, choices: Sequence[Choice], usage: Usage, now_s: float | None = None) -> Body:
        """The object of the answer that has ended. now_s: seconds since the epoch."""
        if choices[0].finish_reason == "length":
            details = {"incomplete_details": {"reason": "max_output_tokens"}}
            return self.response("incomplete", usage=usage_body(usage), **details)
        return self.response("completed", usage=usage_body(usage), completed_at=now_s)

    def failure(self, error: RequestError) -> Body:
        """The object of the answer that broke off."""
        return self.response("failed", error=error_of(error))

    # ---- a stream ----------------------------------------------------------------------------------------------
    def opened(self, index: int) -> bytes:
        self._begun = True
        created = self._event("response.created", response=self.response("in_progress"))
        return created + self._event("response.in_progress", response=self.response("in_progress"))

    def grown(self, index: int, gained: Sequence[Gain], usage: Callable[[], Usage]) -> bytes:
        return b"".join([self._take(output, thought) for output, thought in gained])

    def closed(self, choice: Choice, more: Body) -> bytes:
        self._head |= more
        whole = choice.finish_reason != "length"
        made = self._close("completed" if whole else "incomplete")
        if all(item["type"] == "reasoning" for item in self.output):
            made += self._opened_item(self._new_text())
            made += self._close("completed" if whole else "incomplete")
        return made

    def ended(self, choices: Sequence[Choice], usage: Usage, comment: bytes) -> bytes:
        final = self.final(choices, usage)
        return comment + self._event(f"response.{final['status']}", response=final)

    def failed(self, error: RequestError) -> bytes:
        made = b"" if self._begun else self.opened(0)
        return made + self._event("response.failed", response=self.failure(error))

    # ---- a whole answer ----------------------------------------------------------------------------------------
    def gather(self, choice: Choice) -> None:
        if self._with_logprobs:
            self.kept_bytes += self._logprobs.add([_logprob(one) for one in choice.logprobs])
        choice.logprobs = []

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Body:
        choice = choices[0]
        self._silent = True
        self.gather(choice)
        for thought in choice.reasoning:
            self._take(Output(self.id, "", []), thought)
        self._take(Output(self.id, "".join(choice.text), []), "")
        self._take(Output(self.id, "", [], tool_calls=choice.calls), "")
        self.closed(choice, {})
        return self.final(choices, usage)

    # ---- items -------------------------------------------------------------------------------------------------
    def _take(self, output: Output, thought: str) -> bytes:
        made = b""
        if thought:
            if not isinstance(self._open, _Thought):
                made += self._opened_item(_Thought(self._next_id("reasoning"), self._as_summary))
            made += self._grow(thought)
            self._held.clear()
        self._held += output.logprobs or ()
        if output.text:
            if not isinstance(self._open, _Text):
                made += self._opened_item(self._new_text())
            made += self._grow(output.text, self._held)
            self._held = []
        for delta in output.tool_calls or ():
            made += self._call(delta)
        return made

    def _call(self, delta: ToolCallDelta) -> bytes:
        made = b""
        if not isinstance(self._open, _Call) or self._open.position != delta.index:
            made = self._opened_item(_Call(self._next_id("function_call"), delta))
        return made + (self._grow(delta.arguments) if delta.arguments else b"")

    def _opened_item(self, item: _Item) -> bytes:
        made = self._close("completed")
        self._open = item
        self.output.append(item.body)
        added = self._event("response.output_item.added", output_index=self._index, item=item.body)
        return made + added + self._events(item.begins())

    def _grow(self, text: str, logprobs: list[TokenLogprob] | None = None) -> bytes:
        assert self._open is not None
        before = self._open.kept_bytes
        made = self._events([self._open.grows(text, logprobs)])
        self.kept_bytes += self._open.kept_bytes - before
        return made

    def _new_text(self) -> _Text:
        logprobs, self._logprobs = self._logprobs, EncodedArray()
        return _Text(self._next_id("message"), logprobs if self._with_logprobs else None)

    def _close(self, status: str) -> bytes:
        if isinstance(self._open, _Text) and self._held:
            made = self._grow("", self._held)
            self._held = []
        else:
            made = b""
        item, self._open = self._open, None
        if item is None:
            return b""
        made += self._events(item.ends())
        item.body["status"] = status
        return made + self._event("response.output_item.done", output_index=self._index, item=item.body)

    @property
    def _index(self) -> int:
        return len(self.output) - 1

    def _next_id(self, kind: str) -> str:
        return item_id(self.id, kind, len(self.output))

    def _events(self, bodies: Sequence[Body]) -> bytes:
        """Events of the last item."""
        place = {"output_index": self._index, "item_id": self.output[-1]["id"]}
        return b"".join([self._event(body.pop("type"), **place, **body) for body in bodies])

    def _event(self, kind: str, **fields: Any) -> bytes:
        if self._silent:
            return b""
        body = {"type": kind, "sequence_number": self._number} | fields
        self._number += 1
        return b"event: " + kind.encode() + b"\n" + sse.event(body)


class _Item(ABC):
    """An item that grows. body: what is known of it."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self._pieces: list[str] = []

    @property
    def kept_bytes(self) -> int:
        """Bytes of its logprobs."""
        return 0

    @property
    def text(self) -> str:
        """Its text so far."""
        return "".join(self._pieces)

    def begins(self) -> list[Body]:
        """Events after it was added."""
        return []

    @abstractmethod
    def grows(self, text: str, logprobs: list[TokenLogprob] | None) -> Body:
        """The event of more text."""

    @abstractmethod
    def ends(self) -> list[Body]:
        """Events before it is done. Completes the body."""


class _Text(_Item):
    def __init__(self, id_: str, logprobs: EncodedArray | None) -> None:
        """logprobs: of its text, which may be still to come; None: they are not wanted."""
        super().__init__({"id": id_, "type": "message", "status": "in_progress", "role": "assistant", "content": []})
        self._logprobs = logprobs

    @property
    def kept_bytes(self) -> int:
        return 0 if self._logprobs is None else self._logprobs.bytes_

    def _part(self) -> Body:
        logprobs = EncodedArray() if self._logprobs is None else self._logprobs
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": logprobs}

    def begins(self) -> list[Body]:
        return [{"type": "response.content_part.added", "content_index": 0, "part": self._part()}]

    def grows(self, text: str, logprobs: list[TokenLogprob] | None) -> Body:
        self._pieces.append(text)
        made = [] if self._logprobs is None else [_logprob(one) for one in logprobs or ()]
        if self._logprobs is not None:
            self._logprobs.add(made)
        return {"type": "response.output_text.delta", "content_index": 0, "delta": text, "logprobs": made}

    def ends(self) -> list[Body]:
        part = self._part()
        self.body["content"] = [part]
        done = {"content_index": 0, "text": part["text"], "logprobs": part["logprobs"]}
        return [
            {"type": "response.output_text.done"} | done,
            {"type": "response.content_part.done", "content_index": 0, "part": part},
        ]


class _Thought(_Item):
    """As it is, or as a summary, which more clients show."""

    def __init__(self, id_: str, as_summary: bool) -> None:
        super().__init__({"id": id_, "type": "reasoning", "status": "in_progress", "summary": []})
        self._as_summary = as_summary

    def _part(self) -> Body:
        return {"type": "summary_text" if self._as_summary else "reasoning_text", "text": self.text}

    @property
    def _place(self) -> Body:
        return {"summary_index" if self._as_summary else "content_index": 0}

    def begins(self) -> list[Body]:
        kind = "reasoning_summary_part" if self._as_summary else "content_part"
        return [{"type": f"response.{kind}.added", "part": self._part()} | self._place]

    def grows(self, text: str, logprobs: list[TokenLogprob] | None) -> Body:
        self._pieces.append(text)
        kind = "reasoning_summary_text" if self._as_summary else "reasoning_text"
        return {"type": f"response.{kind}.delta", "delta": text} | self._place

    def ends(self) -> list[Body]:
        part = self._part()
        self.body["summary" if self._as_summary else "content"] = [part]
        kinds = ("reasoning_summary_text", "reasoning_summary_part")
        if not self._as_summary:
            kinds = ("reasoning_text", "content_part")
        return [
            {"type": f"response.{kinds[0]}.done", "text": part["text"]} | self._place,
            {"type": f"response.{kinds[1]}.done", "part": part} | self._place,
        ]


class _Call(_Item):
    def __init__(self, id_: str, delta: ToolCallDelta) -> None:
        called = {"call_id": delta.id, "name": delta.name, "arguments": ""}
        super().__init__({"id": id_, "type": "function_call", "status": "in_progress"} | called)
        self.position = delta.index

    def grows(self, text: str, logprobs: list[TokenLogprob] | None) -> Body:
        self._pieces.append(text)
        return {"type": "response.function_call_arguments.delta", "delta": text}

    def ends(self) -> list[Body]:
        self.body["arguments"] = self.text
        done = {"type": "response.function_call_arguments.done", "name": self.body["name"]}
        return [done | {"arguments": self.body["arguments"]}]


def usage_body(usage: Usage) -> Body:
    """The usage of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def error_of(error: RequestError) -> Body:
    """The error of a response that failed."""
    code = {429: "rate_limit_exceeded", 400: "invalid_prompt"}.get(error.status, "server_error")
    return {"code": code, "message": error.message}


def _logprob(one: TokenLogprob) -> Body:
    return {**token_body(one.token, one.logprob), "top_logprobs": [token_body(t, p) for t, p in one.top]}
