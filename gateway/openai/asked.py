"""Turns the body of a request for text, or for a tokenizer, into what the routes work with.

Pure, so small bodies are decoded on the event loop and large ones in another process (`gateway.decoding`). Prompts that
cannot fit the model's context are refused before validation. A body for an engine with HTTP of its own is not validated
here (`gateway.core.relay_bodies`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

from contracts.context import ContextBound, text_bytes
from contracts.errors import InvalidRequest
from contracts.models import ModelWire
from contracts.request import Sampling, ToolUse
from gateway.core.admission import parse_json
from gateway.core.implicit import History, of_messages, of_prompt, with_calls
from gateway.core.relay_bodies import Relayed, relayed
from gateway.core.relay_routes import OwnKind, is_relayed
from gateway.core.scopes import scope_of, user_of
from gateway.core.spellings import Spelled, read
from gateway.core.usage import estimated_tokens
from gateway.openai.forms import Form
from gateway.openai.parameters import REFUSED_OF_COMPLETIONS, validate
from gateway.openai.requests import ChatRequest, CompletionRequest, Generation
from gateway.openai.thinking import ReasoningGoes
from gateway.openai.token_requests import TOKEN_KINDS, TokenKind, TokensAsked, ask_tokens
from gateway.openai.token_requests import check_context as check_token_context

TextKind = Literal["chat", "completion"]
Kind = TextKind | TokenKind | OwnKind
#: Choices of all prompts of a completion, at most.
MAX_ALL_CHOICES = 64
#: Tool calls in all messages of a chat, at most.
MAX_ALL_CALLS = 8192


@dataclass(slots=True)
class Told:
    """The context of a body. named: a header names the session. headers: those with other systems' hints. bounds:
    context bounds of the known models. served: the default model of routes where naming one is optional. wires: how
    requests reach the known models; empty where all of them have Upbeat's own engine. per_user: the tenant's users
    share no KV (`core.scopes`)."""

    tenant: str
    named: bool
    headers: Mapping[str, str]
    bounds: Mapping[str, ContextBound]
    served: str = ""
    wires: Mapping[str, ModelWire] = field(default_factory=dict)
    per_user: bool = False


@dataclass(slots=True)
class Prompt:
    """One prompt: exactly one of messages, prompt and prompt_tokens is set, or in `packed` as msgpack. history: set
    when nothing names the session. estimate: estimated tokens."""

    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    prompt_tokens: list[int] | None = None
    packed: dict[str, bytes] = field(default_factory=dict)
    history: History | None = None
    estimate: int = 1

    @property
    def is_text(self) -> bool:
        """Whether the prompt is plain text."""
        return self.prompt is not None or "prompt" in self.packed

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed prompt."""
        return sum(map(len, self.packed.values()))


@dataclass(slots=True)
class Asked:
    """A valid request for text. n: choices per prompt. sampling: of all choices, with the caller's seed. said: other
    systems' hints. user: see `core.scopes.user_of`. cache_salt: the caller's, or empty."""

    model: str
    sampling: Sampling
    said: Spelled
    prompts: list[Prompt] = field(default_factory=list)
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    priority: int | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    form: Form | None = None
    tool_use: ToolUse | None = None
    template_kwargs: str | None = None
    reasoning: ReasoningGoes = "text"
    user: str = ""
    cache_salt: str = ""


@overload
def ask(kind: TextKind, body: bytes, told: Told) -> Asked | Relayed: ...
@overload
def ask(kind: TokenKind, body: bytes, told: Told) -> TokensAsked | Relayed: ...
@overload
def ask(kind: OwnKind, body: bytes, told: Told) -> Relayed: ...
@overload
def ask(kind: Kind, body: bytes, told: Told) -> Asked | TokensAsked | Relayed: ...
def ask(kind: Kind, body: bytes, told: Told) -> Asked | TokensAsked | Relayed:
    """The request in `body`. Raises InvalidRequest naming the first field that is wrong."""
    data = parse_json(body)
    if is_relayed(kind, data, told.wires, told.served):
        return relayed(kind, data, told.tenant, told.headers, named=told.named, per_user=told.per_user)
    if kind == "tokenize" or kind == "detokenize":
        check_context(kind, data, len(body), told)
        return ask_tokens(kind, data)
    assert kind == "chat" or kind == "completion"
    if kind == "chat":
        return asked_of_chat(data, len(body), told)
    check_context(kind, data, len(body), told)
    return _completion(data, told)


def asked_of_chat(data: Any, length: int, told: Told) -> Asked:
    """The request in a decoded body of a chat, for Upbeat's own engine. length: of its JSON. Raises InvalidRequest
    naming the first field that is wrong."""
    check_context("chat", data, length, told)
    return _chat(data, told)


def check_context(kind: TextKind | TokenKind, data: Any, length: int, told: Told) -> None:
    """Raises InvalidRequest for prompts that are too long, before validation."""
    model = data.get("model") if isinstance(data, dict) else None
    if model is None and kind in TOKEN_KINDS:
        model = told.served
    bound = told.bounds.get(model) if isinstance(model, str) else None
    if bound is None or length < bound.max_tokens:  # a token has at least one byte
        return
    if kind == "tokenize" or kind == "detokenize":
        check_token_context(kind, data, bound)
        return
    if kind == "chat":
        bound.check_messages(data.get("messages"))
        return
    prompt = data.get("prompt")
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    for i, one in enumerate(prompt if several else [prompt]):
        bound.check_prompt(one, f"prompt[{i}]" if several else "prompt")


def _chat(data: Any, told: Told) -> Asked:
    wanted = validate(ChatRequest, data)
    asked = _asked(wanted, data, told)
    asked.logprobs, asked.tool_use, asked.template_kwargs = (
        bool(wanted.logprobs),
        wanted.tool_use,
        wanted.template_kwargs,
    )
    if asked.form is None:  # a form leaves no room for a thought
        asked.reasoning = wanted.reasoning_goes
    messages = [message.plain() for message in wanted.messages]
    calls = [call["function"] for message in messages if "tool_calls" in message for call in message["tool_calls"]]
    if len(calls) > MAX_ALL_CALLS:
        raise InvalidRequest(
            f"messages hold more than {MAX_ALL_CALLS} tool calls; leave the oldest ones out", param="messages"
        )
    texts = [message["content"] for message in messages]
    if calls or asked.tool_use is not None:
        texts += [call["arguments"] for call in calls]
        texts.append(asked.tool_use.tools if asked.tool_use is not None else "")
    history = None
    if not _names_session(asked, told):
        history = of_messages(told.tenant, asked.model, list(map(_said, messages)), _scope(asked, told))
    asked.prompts = [Prompt(messages=messages, history=history, estimate=estimated_tokens(_bytes(texts)))]
    return asked


def _completion(data: Any, told: Told) -> Asked:
    wanted = validate(CompletionRequest, data, REFUSED_OF_COMPLETIONS)
    asked = _asked(wanted, data, told)
    asked.logprobs = wanted.logprobs is not None
    if len(wanted.prompt) * asked.n > MAX_ALL_CHOICES:
        raise InvalidRequest(f"prompt times n must be at most {MAX_ALL_CHOICES} choices", param="n")
    named = _names_session(asked, told)
    for one in wanted.prompt:
        history = None if named else of_prompt(told.tenant, asked.model, one, _scope(asked, told))
        if isinstance(one, str):
            asked.prompts.append(Prompt(prompt=one, history=history, estimate=estimated_tokens(_bytes([one]))))
        else:
            asked.prompts.append(Prompt(prompt_tokens=one, history=history, estimate=estimated_tokens(0, len(one))))
    return asked


def _asked(wanted: Generation, data: Mapping[str, Any], told: Told) -> Asked:
    """The fields of both routes."""
    return Asked(
        model=wanted.model,
        sampling=wanted.sampling(),
        said=read(data, told.headers),
        n=wanted.n or 1,
        stream=bool(wanted.stream),
        include_usage=wanted.include_usage,
        priority=wanted.priority,
        session_id=wanted.session_id,
        prompt_cache_key=wanted.prompt_cache_key,
        form=wanted.form,
        user=user_of(data) if told.per_user else "",
        cache_salt=wanted.cache_salt or "",
    )


def _scope(asked: Asked, told: Told) -> str:
    """The scope of a conversation that names no session."""
    return scope_of(asked.user, asked.cache_salt, per_user=told.per_user)


def _names_session(asked: Asked, told: Told) -> bool:
    """Whether `gateway.sessions.stated` will find a session."""
    return (
        told.named or asked.session_id is not None or asked.said.session_id is not None or bool(asked.prompt_cache_key)
    )


def _bytes(texts: Sequence[str]) -> int:
    return sum(map(text_bytes, texts))


def _said(message: dict[str, Any]) -> dict[str, str]:
    """The message as the history hashes it: an assistant's text includes its calls."""
    called = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return {"role": message["role"], "content": with_calls(message["content"], called)}
