"""The schemas of `POST /tokenize` and `POST /detokenize`, in vLLM's format: strict, no value is coerced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import msgpack
from pydantic import BaseModel, BeforeValidator, FailFast, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from contracts import token_lists
from contracts.context import ContextBound
from contracts.errors import InvalidRequest
from contracts.template_kwargs import encode_template_kwargs
from gateway.openai.inputs import MAX_MESSAGES, Message, Text
from gateway.openai.parameters import validate
from gateway.openai.tools import MAX_TOOLS, STRICT, Tool, tool_use

TokenKind = Literal["tokenize", "detokenize"]
TOKEN_KINDS: tuple[TokenKind, ...] = ("tokenize", "detokenize")
#: Fields of vLLM's clients that are not supported -> the values without effect (besides null).
REFUSED: dict[str, tuple[Any, ...]] = {"chat_template": (), "mm_processor_kwargs": ({},), "media_io_kwargs": ({},)}


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise PydanticCustomError("tokens_type", "expected a list of token ids")
    for i, token in enumerate(value):
        if type(token) is not int or not 0 <= token < 1 << 31:
            raise PydanticCustomError("token_type", "expected a token id", {"at": f"[{i}]"})
    return value


class _Named(BaseModel):
    """The common field: the model; None: the served one."""

    model_config = STRICT
    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None


class TokenizePrompt(_Named):
    """`POST /tokenize` of a plain prompt."""

    prompt: Text
    add_special_tokens: bool = Field(True, description="also those that the tokenizer puts around a prompt")
    return_token_strs: bool | None = Field(None, description="also say how the vocabulary spells each token")


class TokenizeMessages(_Named):
    """`POST /tokenize` of a chat, rendered by the model's template."""

    messages: Annotated[list[Message], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
    add_generation_prompt: bool = Field(True, description="end with the beginning of an answer")
    continue_final_message: bool = Field(
        False, description="end where the last message does; needs add_generation_prompt to be false"
    )
    add_special_tokens: bool = Field(
        False, description="also those that the tokenizer puts around a prompt; templates write their own"
    )
    return_token_strs: bool | None = Field(None, description="also say how the vocabulary spells each token")
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None


_IDS_SCHEMA = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0},
    "maxItems": token_lists.MOST_TOKENS,
    "description": "at most as many as the model's context holds",
}


class Detokenize(_Named):
    """`POST /detokenize`."""

    tokens: Annotated[list[int], BeforeValidator(_ids), WithJsonSchema(_IDS_SCHEMA)]


@dataclass(slots=True)
class TokensAsked:
    """A request for a tokenizer. model: empty: the served one. prompt, messages, tokens: exactly one is set, as
    msgpack. tools, template_kwargs: JSON text, or empty. The other fields are vLLM's."""

    model: str
    prompt: bytes = b""
    messages: bytes = b""
    tokens: bytes = b""
    tools: str = ""
    template_kwargs: str = ""
    add_special_tokens: bool = False
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    return_token_strs: bool = False

    @property
    def packed_bytes(self) -> int:
        """About how many bytes it holds."""
        return sum(len(value) for f in fields(self) if isinstance(value := getattr(self, f.name), bytes | str))


def check_context(kind: TokenKind, data: Mapping[str, Any], bound: ContextBound) -> None:
    """Raises InvalidRequest for a prompt that fits no context. Called before validation."""
    if kind == "tokenize":
        bound.check_prompt(data["prompt"] if isinstance(data.get("prompt"), str) else None)
        bound.check_messages(data.get("messages"))
    elif isinstance(data.get("tokens"), list):
        token_lists.check_count(data["tokens"], bound.max_tokens)


def ask_tokens(kind: TokenKind, data: Any) -> TokensAsked:
    """The request in a decoded body. Raises InvalidRequest naming the first field that is wrong."""
    if kind == "detokenize":
        wanted = validate(Detokenize, data, REFUSED, ())
        return TokensAsked(wanted.model or "", tokens=msgpack.packb(wanted.tokens))
    if isinstance(data, dict) and "messages" in data:
        if "prompt" in data:
            raise InvalidRequest("prompt and messages cannot both be given; leave one out", param="prompt")
        return _messages(validate(TokenizeMessages, data, REFUSED, ()))
    plain = validate(TokenizePrompt, data, REFUSED, ())
    return TokensAsked(
        plain.model or "",
        prompt=msgpack.packb(plain.prompt),
        add_special_tokens=plain.add_special_tokens,
        return_token_strs=bool(plain.return_token_strs),
    )


def _messages(wanted: TokenizeMessages) -> TokensAsked:
    if wanted.add_generation_prompt and wanted.continue_final_message:
        raise InvalidRequest(
            "continue_final_message needs add_generation_prompt to be false, which is true by default",
            param="continue_final_message",
        )
    try:
        use = tool_use(wanted.tools, None, None)
    except PydanticCustomError as e:
        raise InvalidRequest(f"tools: {e.message()}", param="tools") from None
    return TokensAsked(
        wanted.model or "",
        messages=msgpack.packb([message.plain() for message in wanted.messages]),
        tools=use.tools if use is not None else "",
        template_kwargs=encode_template_kwargs(wanted.chat_template_kwargs or {}) or "",
        add_special_tokens=wanted.add_special_tokens,
        add_generation_prompt=wanted.add_generation_prompt,
        continue_final_message=wanted.continue_final_message,
        return_token_strs=bool(wanted.return_token_strs),
    )
