"""The schema of `POST /v1/messages` and `/v1/messages/count_tokens`. Strict: no value is coerced.

Fields of the Messages API are declared here; fields of chats that work here too are checked there.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, FailFast, Field, Tag, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from gateway.core.spellings import ROOTS
from gateway.openai.inputs import MAX_MESSAGES, Ignored, Text, utf8
from gateway.openai.parameters import HARMLESS
from gateway.openai.requests import TokenCount
from gateway.openai.thinking import Effort
from gateway.openai.tools import MAX_TOOLS, STRICT, JsonSchema, Name, Parameters
from gateway.responses.items import Lenient, OrText
from gateway.responses.requests import EXTRAS

#: Fields with any value, without effect on the text.
IGNORED = (HARMLESS - {"metadata"}) | {
    "anthropic_version", "anthropic_beta", "betas", "billing_policy", "diagnostics", "inference_geo", "speed",
    "user_profile_id", "workspace_id",
}  # fmt: skip
#: Field -> the values without effect, besides null.
REFUSED: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "compaction": (),
    "fallbacks": ([],),
    "fallback_credit_token": (),
    "thread": (),
}
MAX_BLOCKS = 16_384
_Id = Annotated[str, Field(min_length=1, max_length=256)]
_SESSION = re.compile(r"_session_([0-9A-Za-z-]{8,64})$")
_SESSION_ID = re.compile(r"[0-9A-Za-z-]{8,64}")


# ---- content ---------------------------------------------------------------------------------------------------------
class TextBlock(Lenient):
    """Text."""

    type: Literal["text"]
    text: Text
    cache_control: Ignored = None
    citations: Ignored = None


class ImageBlock(Lenient):
    """An image, which only some models on vLLM read."""

    type: Literal["image"]
    source: dict[str, Any]
    cache_control: Ignored = None

    @property
    def url(self) -> str:
        """Its address, or its data as one."""
        source = self.source
        if source.get("type") == "url":
            return str(source.get("url"))
        return f"data:{source.get('media_type')};base64,{source.get('data')}"


class ThinkingBlock(Lenient):
    """A thought of an earlier answer. The model does not read it again."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: Ignored = None
    signature: Ignored = None
    data: Ignored = None
    cache_control: Ignored = None


class UseBlock(Lenient):
    """A function that the model called. input: its arguments."""

    type: Literal["tool_use"]
    id: _Id
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: dict[str, Any]
    cache_control: Ignored = None
    caller: Ignored = None

    @model_validator(mode="after")
    def _spellable(self) -> UseBlock:
        try:
            utf8(spelled(self.input), ".input")
        except ValueError:
            raise PydanticCustomError("number", "holds a number that JSON cannot spell", {"at": ".input"}) from None
        return self


class ResultBlock(Lenient):
    """What a called function returned."""

    type: Literal["tool_result"]
    tool_use_id: _Id
    content: Annotated[
        list[ResultPart], BeforeValidator(lambda v: _blocks(v)), OrText(), Field(max_length=MAX_BLOCKS)
    ] = Field(default_factory=list)
    is_error: bool | None = None
    cache_control: Ignored = None


_TYPES = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _blocks(value: Any) -> Any:
    """Content as a list of blocks. Raises PydanticCustomError, by name, for blocks that are not supported."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "expected a string or a list of blocks")
    for i, block in enumerate(value):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            raise PydanticCustomError("block_type", "expected an object with a type", {"at": f"[{i}]"})
        if kind not in _TYPES:
            what = f"blocks of the type {kind[:60]!r} are not supported by this server"
            raise PydanticCustomError("unsupported_parameter", "{what}", {"at": f"[{i}].type", "what": what})
    return value


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "[thinking]" if kind == "redacted_thinking" else f"[{kind}]"


ResultPart = Annotated[
    Annotated[TextBlock, Tag("[text]")] | Annotated[ImageBlock, Tag("[image]")], Discriminator(_kind)
]
Block = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[ImageBlock, Tag("[image]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[UseBlock, Tag("[tool_use]")]
    | Annotated[ResultBlock, Tag("[tool_result]")],
    Discriminator(_kind),
]
ResultBlock.model_rebuild()


class AnthropicMessage(Lenient):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[list[Block], Field(max_length=MAX_BLOCKS)], BeforeValidator(_blocks), OrText()]

    @model_validator(mode="after")
    def _whose(self) -> AnthropicMessage:
        for i, block in enumerate(self.content):
            wanted = {"tool_use": "assistant", "tool_result": "user"}.get(block.type)
            if wanted is not None and self.role != wanted:
                what = f"only messages of the {wanted} have blocks of the type {block.type!r}"
                raise PydanticCustomError("block_role", "{what}", {"at": f".content[{i}].type", "what": what})
        return self


def spelled(arguments: Any) -> str:
    """A call's arguments as JSON text, as models write it."""
    return json.dumps(arguments, ensure_ascii=False, allow_nan=False)


# ---- tools and options -----------------------------------------------------------------------------------------------
class AnthropicTool(Lenient):
    """A function that the model may call. Its schema is enforced."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: Parameters
    strict: bool | None = None
    cache_control: Ignored = None
    defer_loading: Ignored = None
    allowed_callers: Ignored = None
    eager_input_streaming: Ignored = None
    input_examples: Ignored = None


def _tools(value: Any) -> Any:
    """Raises PydanticCustomError, by name, for tools that only Anthropic's models and servers know."""
    if isinstance(value, list):
        for i, tool in enumerate(value):
            kind = tool.get("type") if isinstance(tool, dict) else None
            if isinstance(kind, str) and kind != "custom":
                what = (
                    f"the tool {kind[:60]!r} is not supported by this server; give tools with a name, a description "
                    "and an input_schema, and run them yourself"
                )
                raise PydanticCustomError("unsupported_parameter", "{what}", {"at": f"[{i}].type", "what": what})
    return value


class AnthropicChoice(Lenient):
    """Which tools may or must be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _both_or_none(self) -> AnthropicChoice:
        if (self.type == "tool") != (self.name is not None):
            raise PydanticCustomError("tool_choice", "name and the type tool come together", {"at": ".name"})
        return self


class AnthropicThinking(Lenient):
    """Whether the model is to think. The budget is not enforced."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Lenient):
    """The form of the answer."""

    type: Literal["json_schema"]
    json_schema: Annotated[JsonSchema, Field(alias="schema")]


class OutputConfig(Lenient):
    """How much the model is to do, and the form of its answer."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class AnthropicMetadata(Lenient):
    """user_id: some clients name their session in it (`session_in`)."""

    user_id: Annotated[str, Field(max_length=4096)] | None = None


def _stops(value: Any) -> Any:
    if value is not None and not isinstance(value, list):
        raise PydanticCustomError("stop_type", "expected a list of strings")
    return value or None


def _edits(value: Any) -> None:
    """Thoughts are never read again, so clearing them changes nothing."""
    edits = value.get("edits") if isinstance(value, dict) else value
    for i, edit in enumerate(edits if isinstance(edits, list) else []):
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not isinstance(kind, str) or not kind.startswith("clear_thinking_"):
            raise PydanticCustomError(
                "unsupported_parameter",
                "is not supported by this server, which leaves conversations as they are",
                {"at": f".edits[{i}].type"},
            )
    if value is not None and not isinstance(value, dict):
        raise PydanticCustomError("edits_type", "expected an object with edits")


_FREE = {"type": ["object", "null"]}


class CountRequest(BaseModel):
    """`POST /v1/messages/count_tokens`."""

    model_config = STRICT
    model: Annotated[str, Field(min_length=1, max_length=512)]
    messages: Annotated[list[AnthropicMessage], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Annotated[list[TextBlock], BeforeValidator(_blocks), OrText()] = []
    tools: Annotated[Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None, BeforeValidator(_tools)] = None
    tool_choice: AnthropicChoice | None = None
    thinking: AnthropicThinking | None = None
    output_config: OutputConfig | None = None
    context_management: Annotated[None, BeforeValidator(_edits), WithJsonSchema(_FREE)] = None


class MessageRequest(CountRequest):
    """`POST /v1/messages`."""

    max_tokens: TokenCount
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop_sequences: Annotated[list[Any] | None, BeforeValidator(_stops)] = None
    stream: bool | None = None
    metadata: AnthropicMetadata | None = None
    prompt_cache_key: Annotated[str, Field(max_length=4096)] | None = None

    @model_validator(mode="after")
    def _turn(self) -> MessageRequest:
        if self.messages[-1].role == "assistant":
            raise PydanticCustomError(
                "unsupported_parameter",
                "the last message must be the user's: this server does not continue an answer that was begun",
                {"at": f"messages[{len(self.messages) - 1}].role"},
            )
        return self


def session_in(user_id: str) -> str | None:
    """The session that Claude Code names: at the end of `user_..._account_..._session_ID`, or in JSON."""
    if (found := _SESSION.search(user_id)) is not None:
        return found[1]
    if user_id.startswith("{"):
        try:
            session = json.loads(user_id).get("session_id")
        except (ValueError, RecursionError):
            return None
        if isinstance(session, str) and _SESSION_ID.fullmatch(session):
            return session
    return None


def user_in(user_id: str) -> str:
    """The user without the session that `session_in` finds: all sessions of a user are one user's."""
    if session_in(user_id) is None:
        return user_id
    if user_id.startswith("{"):
        said = json.loads(user_id)
        del said["session_id"]
        return json.dumps(said, sort_keys=True)
    return _SESSION.sub("", user_id)


#: Fields that are checked as chats' or ignored.
PASSED = (EXTRAS | IGNORED | ROOTS) - MessageRequest.model_fields.keys()
