"""A generation request as the gateway hands it to a worker, and what comes back a step at a time.

They travel as msgpack maps in frames (`contracts.frames`); the field names here are the keys on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from contracts.ids import SessionKey

FinishReason = Literal["stop", "length", "cancelled"]
ToolChoice = Literal["none", "auto", "required"]


@dataclass(slots=True)
class Sampling:
    """How the next token is chosen. `temperature` 0 is greedy; then nothing else in here but the limits, penalties and
    biases matters. `seed` makes a request reproducible whatever shares its batch; None draws one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    #: Above 1, tokens of the prompt and of the answer become less likely; 1 changes nothing.
    repetition_penalty: float = 1.0
    #: Until so many tokens are generated, none that would end the answer is chosen.
    min_tokens: int = 0
    #: Tokens that end the answer as an end-of-text token does.
    stop_token_ids: list[int] = field(default_factory=list)
    #: Whether the answer ends with the stop string or stop token that it met, instead of before it.
    include_stop: bool = False
    #: Whether special tokens have no text.
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] = field(default_factory=dict)
    #: None: no logprobs; 0 to 20: the chosen token's and this many alternatives'.
    logprobs: int | None = None


@dataclass(slots=True)
class ToolUse:
    """The functions that an answer may call, and whether it must.

    tools: JSON text, OpenAI's list. name: the one function that must be called; None: whichever. parallel: several calls may
    come in one answer.
    """

    tools: str
    choice: ToolChoice = "auto"
    name: str | None = None
    parallel: bool = True


@dataclass(slots=True)
class GenerateRequest:
    """One generation.

    Exactly one of `messages` (chat), `prompt` (text) and `prompt_tokens` is set, or in `packed`, where it is msgpack already: what is large
    is packed once, where that holds nobody up. A worker finds it in its field.
    json_schema: JSON text of a schema that the answer must satisfy. regex: what the answer must match as a whole; without
    json_schema and tool_use. form_field: the caller's field that json_schema or regex came from; empty: `response_format`.
    tool_use: only with `messages`.
    group: the same for all choices of one prompt, which share the prompt's KV: while one of them computes it, those that
    came later wait. choice: its number among them.
    resume_tokens: tokens another worker has generated already (it died); they are continued, not repeated.
    source_nodes: nodes that hold this session's cache according to the scheduler, best first: a hint for the kvstore.
    kept_tokens: of the session, cached somewhere according to the scheduler: who waits to be admitted counts as so much shorter.
    expected_tokens: how long its caller expects the answer to be; None: as long as others are. It ends nothing.
    alone: it may have killed an engine: until its first new token, its steps hold no other sequence. It only costs turns.
    template_kwargs: JSON text of variables for the chat template (`contracts.template_kwargs`); only with `messages`.
    weight: of its tenant, among the tenants that want the device at the same priority.
    """

    request_id: str
    tenant: str
    session_id: str
    model: str
    sampling: Sampling
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    prompt_tokens: list[int] | None = None
    priority: int = 0
    resume_tokens: list[int] = field(default_factory=list)
    source_nodes: list[str] = field(default_factory=list)
    kept_tokens: int = 0
    json_schema: str | None = None
    tool_use: ToolUse | None = None
    group: str = ""
    choice: int = 0
    expected_tokens: int | None = None
    alone: bool = False
    packed: dict[str, bytes] = field(default_factory=dict)
    weight: float = 1.0
    template_kwargs: str | None = None
    regex: str | None = None
    form_field: str = ""

    @property
    def session(self) -> SessionKey:
        """The session within its tenant."""
        return SessionKey(self.tenant, self.session_id)


@dataclass(slots=True)
class TokenLogprob:
    """A token's bytes (a token may be a part of a character), its log probability, and the best alternatives
    `(bytes, logprob)`. A special token has the bytes of its spelling."""

    token: bytes
    logprob: float
    top: list[tuple[bytes, float]] = field(default_factory=list)


@dataclass(slots=True)
class ToolCallDelta:
    """What one tool call gained: `id` and `name` with its first delta, empty afterwards; a piece of `arguments`, JSON text."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Accepted:
    """The worker took the request: it is valid, and will run. Sent before any output. thinking: the prompt ends within a thought of the
    assistant's, so that the answer begins there."""

    request_id: str
    prompt_tokens: int
    thinking: bool = False


@dataclass(slots=True)
class Output:
    """What one request gained in one engine step.

    text: new text, complete characters only, without that of tool calls. tokens: new token ids (also those whose text is
    still held back). logprobs: one a token that is part of the answer: what ends it has none.
    cached_tokens: prompt tokens whose KV was not computed; valid from the first output on.
    times: seconds by `contracts.turn_times.Phase`: with the first token where the time until then went, with the last where the time since.
    """

    request_id: str
    text: str
    tokens: list[int]
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    tool_calls: list[ToolCallDelta] | None = None
    times: dict[str, float] | None = None


@dataclass(slots=True)
class Failed:
    """The request ended without a result; `error` is `contracts.errors.to_wire` of what happened."""

    request_id: str
    error: list[Any]
