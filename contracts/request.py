"""A generation request from gateway to worker, and the events that come back with each step.

Sent as msgpack in frames (`contracts.frames`); field names are the keys on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from contracts.ids import SessionKey

FinishReason = Literal["stop", "length", "cancelled"]
ToolChoice = Literal["none", "auto", "required"]


@dataclass(slots=True)
class Sampling:
    """How the next token is chosen. `temperature` 0 is greedy; then only limits, penalties and biases apply. `seed`
    makes a request reproducible in any batch; None: a random one."""

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
    #: Above 1, tokens of the prompt and of the answer become less likely; 1: off.
    repetition_penalty: float = 1.0
    #: Tokens to generate before one that ends the answer may be chosen.
    min_tokens: int = 0
    #: Further tokens that end the answer.
    stop_token_ids: list[int] = field(default_factory=list)
    #: Whether the answer includes the stop string or stop token that ended it.
    include_stop: bool = False
    #: Whether special tokens have no text.
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] = field(default_factory=dict)
    #: None: no logprobs; 0 to 20: of the chosen token and this many alternatives.
    logprobs: int | None = None


@dataclass(slots=True)
class ToolUse:
    """The functions that an answer may or must call.

    tools: JSON text, OpenAI's list. name: the function that must be called; None: any. parallel: an answer may have
    several calls.
    """

    tools: str
    choice: ToolChoice = "auto"
    name: str | None = None
    parallel: bool = True


@dataclass(slots=True)
class GenerateRequest:
    """One generation.

    Exactly one of `messages` (chat), `prompt` (text) and `prompt_tokens` is set.

    - resume_tokens: tokens that a failed worker has generated already; the answer continues after them.
    - source_nodes: nodes that hold the session's cache according to the scheduler, best first; a hint for the kvstore.
    - kept_tokens: tokens of the session that are cached, according to the scheduler; subtracted from its length while
      it waits for admission.
    - json_schema: JSON text of a schema that the answer must satisfy. regex: must match the whole answer; excludes
      json_schema and tool_use. form_field: the caller's field that json_schema or regex came from; empty:
      `response_format`.
    - tool_use, template_kwargs (JSON text, `contracts.template_kwargs`): only with `messages`.
    - group: equal for all choices of one prompt; while one computes the prompt's KV, later ones wait for it. choice:
      number within the group.
    - expected_tokens: the caller's estimate of the answer's length; None: the average. Not a limit.
    - alone: the request may have killed an engine; until its first new token, no other sequence shares its steps.
    - packed: large fields, already encoded as msgpack by a helper; the worker finds them decoded in their fields.
    - weight: its tenant's, among tenants that compete for the device at the same priority.
    - cache_salt: the scope of its KV within the tenant (`gateway.core.scopes`); enters its chunk keys.
    - adapter: the name of a LoRA adapter of `model`; empty: none.
    - trace: its trace (`contracts.trace_context`); empty: it is not traced.
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
    cache_salt: str = ""
    adapter: str = ""
    trace: str = ""

    @property
    def session(self) -> SessionKey:
        """The session within its tenant."""
        return SessionKey(self.tenant, self.session_id)


@dataclass(slots=True)
class TokenLogprob:
    """A token's bytes (possibly part of a character), its log probability, and the best alternatives `(bytes,
    logprob)`. Special tokens have the bytes of their spelling."""

    token: bytes
    logprob: float
    top: list[tuple[bytes, float]] = field(default_factory=list)


@dataclass(slots=True)
class ToolCallDelta:
    """New text of a tool call: `id` and `name` in its first delta only; a piece of `arguments`, JSON text."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Accepted:
    """The request is valid and will run. Sent before any output. thinking: the prompt ends within the assistant's
    reasoning, so the answer begins there."""

    request_id: str
    prompt_tokens: int
    thinking: bool = False


@dataclass(slots=True)
class Output:
    """The result of one engine step for one request.

    text: new text, complete characters only, without tool calls. tokens: new token ids, including those whose text is
    still held back. logprobs: one per token of the answer; the token that ends it has none. cached_tokens: prompt
    tokens whose KV was not computed; valid from the first output on. times: seconds by `contracts.turn_times.Phase`; up
    to the first token, sent with it, and from there on, sent with the last. stop: the stop string that ended the
    answer.
    """

    request_id: str
    text: str
    tokens: list[int]
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    tool_calls: list[ToolCallDelta] | None = None
    times: dict[str, float] | None = None
    stop: str = ""


@dataclass(slots=True)
class Failed:
    """The request failed; `error` is made by `contracts.errors.to_wire`."""

    request_id: str
    error: list[Any]
