"""A generation request as the gateway hands it to a worker, and what comes back a step at a time.

They travel as msgpack maps in frames (`contracts.frames`); the field names here are the keys on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from contracts.ids import SessionKey

FinishReason = Literal["stop", "length", "cancelled"]


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
    logit_bias: dict[int, float] = field(default_factory=dict)
    #: None: no logprobs; 0 to 20: the chosen token's and this many alternatives'.
    logprobs: int | None = None


@dataclass(slots=True)
class GenerateRequest:
    """One generation.

    Exactly one of `messages` (chat), `prompt` (text) and `prompt_tokens` is set.
    resume_tokens: tokens another worker has generated already (it died); they are continued, not repeated.
    source_nodes: nodes that hold this session's cache according to the scheduler, best first: a hint for the kvstore.
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

    @property
    def session(self) -> SessionKey:
        """The session within its tenant."""
        return SessionKey(self.tenant, self.session_id)


@dataclass(slots=True)
class TokenLogprob:
    """A token's text, its log probability, and the best alternatives `(text, logprob)`."""

    token: str
    logprob: float
    top: list[tuple[str, float]] = field(default_factory=list)


@dataclass(slots=True)
class Accepted:
    """The worker took the request: it is valid, and will run. Sent before any output."""

    request_id: str
    prompt_tokens: int


@dataclass(slots=True)
class Output:
    """What one request gained in one engine step.

    text: new text, complete characters only. tokens: new token ids (also those whose text is still held back).
    cached_tokens: prompt tokens whose KV was not computed; valid from the first output on.
    """

    request_id: str
    text: str
    tokens: list[int]
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Failed:
    """The request ended without a result; `error` is `contracts.errors.to_wire` of what happened."""

    request_id: str
    error: list[Any]
