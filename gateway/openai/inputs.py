"""The schemas of what the model reads: a chat's messages and a completion's prompts. Strict: no value is coerced.

`gateway.openai.requests` has the fields around them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationInfo, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from gateway.openai.tools import MAX_CALLS, STRICT, Call

MAX_MESSAGES = 16_384
MAX_PROMPTS = 32


def utf8(text: str, at: str = "") -> str:
    """`text`. Raises PydanticCustomError, naming `at`, for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError(
            "lone_surrogate", "holds half of a surrogate pair, which is no character", {"at": at}
        ) from None
    return text


def _text(content: Any, info: ValidationInfo) -> str:
    """A message's content: a string, a list of text parts (joined), or null of an assistant (empty)."""
    if content is None and info.data.get("role") == "assistant":
        return ""
    if isinstance(content, str):
        return utf8(content)
    if not isinstance(content, list):
        raise PydanticCustomError("content_type", "expected a string or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text"):
            if isinstance(kind, str):
                raise PydanticCustomError(
                    "unsupported_parameter", "only text parts are supported", {"at": f"[{i}].type"}
                )
            raise PydanticCustomError("part_type", "expected an object with a type", {"at": f"[{i}]"})
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError("text_type", "expected a string", {"at": f"[{i}].text"})
        for name in part:
            if name not in ("type", "text", "cache_control", "annotations"):
                raise PydanticCustomError("extra_part", "unknown field of a text part", {"at": f"[{i}].{name[:40]}"})
        texts.append(utf8(part["text"], f"[{i}].text"))
    return "".join(texts)


def _idle(value: Any) -> None:
    if value not in (None, [], ""):
        raise PydanticCustomError("unsupported_parameter", "is not supported by this server; leave it out")


def _ignored(value: Any) -> None:
    """Accepts anything: a label, or a field of an earlier answer, which the model does not read."""


_TEXT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}
#: Text of valid Unicode.
Text = Annotated[str, AfterValidator(utf8)]
Idle = Annotated[None, BeforeValidator(_idle)]
Ignored = Annotated[None, BeforeValidator(_ignored)]


class Message(BaseModel):
    """One message of a chat."""

    model_config = STRICT
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_text), WithJsonSchema(_TEXT_SCHEMA)]
    name: Ignored = None
    annotations: Ignored = None
    reasoning_content: Ignored = None
    reasoning: Ignored = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    refusal: Idle = None
    audio: Idle = None
    function_call: Idle = None
    tool_calls: Annotated[list[Call], Field(max_length=MAX_CALLS)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _silent_assistant(cls, data: Any) -> Any:
        # OpenAI permits an assistant message without content if it has tool calls.
        if (
            isinstance(data, dict)
            and data.get("role") == "assistant"
            and data.get("tool_calls")
            and "content" not in data
        ):
            return {**data, "content": None}
        return data

    @model_validator(mode="after")
    def _own_fields(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("tool_calls", "only an assistant calls tools", {"at": ".tool_calls"})
        return self

    def plain(self) -> dict[str, Any]:
        """The value for the chat template."""
        plain: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        if self.tool_calls:
            plain["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.role == "tool" and self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        return plain


def _prompts(value: Any) -> list[str | list[int]]:
    """One prompt (text or token ids) or a list of them, as a list."""
    if isinstance(value, list) and value and not isinstance(value[0], int):
        if len(value) > MAX_PROMPTS:
            raise PydanticCustomError("too_many_prompts", f"expected at most {MAX_PROMPTS} prompts")
        return [_prompt(item, f"[{i}]") for i, item in enumerate(value)]
    return [_prompt(value, "")]


def _prompt(value: Any, at: str) -> str | list[int]:
    if not isinstance(value, str | list):
        raise PydanticCustomError("prompt_type", "expected a string or a list of token ids", {"at": at})
    if not value:
        raise PydanticCustomError("empty_prompt", "must not be empty", {"at": at})
    if isinstance(value, str):
        return utf8(value, at)
    for i, token in enumerate(value):
        if type(token) is not int or not 0 <= token < 1 << 31:
            raise PydanticCustomError("token_type", "expected a token id", {"at": f"{at}[{i}]"})
    return value


_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"type": "string", "minLength": 1}},
    ]
}


#: The prompts of a completion, always as a list.
Prompts = Annotated[list[Any], BeforeValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
