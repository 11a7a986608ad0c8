"""The schemas of a response's input items and tools. Strict: no value is coerced; a null counts as absent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from gateway.openai.inputs import Ignored, Text, utf8
from gateway.openai.tools import MAX_TOOLS, STRICT, Function, Named

_Id = Annotated[str, Field(min_length=1, max_length=256)]
_TEXTS = ("input_text", "output_text", "text")
_PART_FIELDS = frozenset(
    {"type", "text", "annotations", "logprobs", "cache_control", "prompt_cache_breakpoint", "refusal", "image_url",
     "detail"}
)  # fmt: skip


class OrText:
    """Of a list that may also be one text: says so in the API's description."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(schema)]}


class Lenient(BaseModel):
    """An object of which clients send unset fields as null."""

    model_config = STRICT

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


def _content(value: Any) -> Any:
    """A string, or a list of parts in the form of chats: joined where all of them are text."""
    if isinstance(value, str):
        return utf8(value)
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "expected a string or a list of parts")
    parts = [_part(part, f"[{i}]") for i, part in enumerate(value)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Any, at: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise PydanticCustomError("part_type", "expected an object with a type", {"at": at})
    if kind in _TEXTS or kind == "refusal":
        name = "refusal" if kind == "refusal" else "text"
        if not isinstance(part.get(name), str):
            raise PydanticCustomError("text_type", "expected a string", {"at": f"{at}.{name}"})
        made: dict[str, Any] = {"type": "text", "text": utf8(part[name], f"{at}.{name}")}
    elif kind == "input_image" and isinstance(part.get("image_url"), str):
        image = {"url": utf8(part["image_url"], f"{at}.image_url")}
        if isinstance(part.get("detail"), str):
            image["detail"] = utf8(part["detail"], f"{at}.detail")
        made = {"type": "image_url", "image_url": image}
    else:
        raise PydanticCustomError("unsupported_parameter", "only text parts are supported", {"at": f"{at}.type"})
    for name, value in part.items():
        if name not in _PART_FIELDS and value is not None:
            raise PydanticCustomError(
                "unsupported_parameter", "is not supported by this server; leave it out", {"at": f"{at}.{name[:40]}"}
            )
    return made


_CONTENT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}
Content = Annotated[Any, BeforeValidator(_content), WithJsonSchema(_CONTENT_SCHEMA)]


class MessageItem(Lenient):
    """A message of any role, by the caller or by an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None
    name: Ignored = None


class CallItem(Lenient):
    """A function that the model called."""

    type: Literal["function_call"]
    call_id: _Id
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Text
    id: Ignored = None
    status: Ignored = None
    caller: Ignored = None


class ResultItem(Lenient):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: _Id
    output: Content
    id: Ignored = None
    status: Ignored = None
    name: Ignored = None
    caller: Ignored = None


class ReasoningItem(Lenient):
    """A thought of an earlier answer. The model does not read it again."""

    type: Literal["reasoning"]
    id: Ignored = None
    summary: Ignored = None
    content: Ignored = None
    encrypted_content: Ignored = None
    status: Ignored = None


class ReferenceItem(Lenient):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: _Id


_ITEMS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


def _kind(value: Any) -> str | None:
    """The tag of an item. Raises PydanticCustomError for a type that is not supported."""
    if not isinstance(value, dict):
        return getattr(value, "type", None)
    kind = value.get("type")
    if kind is None:
        return "[message]" if "role" in value or "content" in value else "[item_reference]"
    if kind not in _ITEMS:
        return None
    return f"[{kind}]"


Item = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[CallItem, Tag("[function_call]")]
    | Annotated[ResultItem, Tag("[function_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")]
    | Annotated[ReferenceItem, Tag("[item_reference]")],
    Discriminator(_kind),
]


def items_of(value: Any) -> Any:
    """`input` as a list of items. Raises PydanticCustomError, by name, for items that are not supported."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("input_type", "expected a string or a list of items")
    for i, item in enumerate(value):
        kind = item.get("type") if isinstance(item, dict) else ""
        if not isinstance(item, dict) or not isinstance(kind, str | None):
            raise PydanticCustomError("item_type", "expected an object with a type", {"at": f"[{i}]"})
        if kind is not None and kind not in _ITEMS:
            _refuse(f"items of the type {kind[:60]!r} are not supported by this server", f"[{i}].type")
    return value


def _refuse(what: str, at: str) -> None:
    raise PydanticCustomError("unsupported_parameter", "{what}", {"at": at, "what": what})


# ---- tools -----------------------------------------------------------------------------------------------------------
class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]
    allowed_callers: Ignored = None
    output_schema: Ignored = None
    defer_loading: Ignored = None

    def chat(self, *, forced: bool) -> dict[str, Any]:
        """In the form of chats. forced: a tool must be called."""
        return chat_tool(self.name, self.description, self.parameters, self.strict, forced=forced)

    def shown(self) -> dict[str, Any]:
        """In the form of responses."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": bool(self.strict),
        }


def chat_tool(
    name: str, description: str | None, parameters: Any, strict: bool | None, *, forced: bool
) -> dict[str, Any]:
    """A tool in the form of chats. forced: it, or another one, must be called; then vLLM too keeps to its schema."""
    kept = True if forced and strict is None else strict
    function = {"name": name, "description": description, "parameters": parameters, "strict": kept}
    return {"type": "function", "function": {k: v for k, v in function.items() if v is not None}}


def tools_of(value: Any) -> Any:
    """`tools`, checked for tools that only OpenAI's own servers have. Raises PydanticCustomError naming one."""
    if isinstance(value, list):
        for i, tool in enumerate(value):
            kind = tool.get("type") if isinstance(tool, dict) else None
            if isinstance(kind, str) and kind != "function":
                _refuse(
                    f"the tool {kind[:60]!r} is not supported by this server, which runs no tools; give functions "
                    "and run them yourself",
                    f"[{i}].type",
                )
    return value


@dataclass(frozen=True, slots=True)
class Allowed:
    """A `tool_choice` of some of the functions. mode: auto or required. names: at least one."""

    mode: str
    names: tuple[str, ...]


def choice_of(value: Any) -> Any:
    """`tool_choice`: a word, `Named`, or `Allowed`. Raises PydanticCustomError for one that names no function."""
    if value is None or value in ("none", "auto", "required"):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function":
        return Named(_name(value, ".name"))
    if kind == "allowed_tools":
        tools = value.get("tools")
        if value.get("mode") not in ("auto", "required"):
            raise PydanticCustomError("tool_choice", "expected auto or required", {"at": ".mode"})
        if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
            raise PydanticCustomError("tool_choice", f"expected a list of 1 to {MAX_TOOLS} functions", {"at": ".tools"})
        return Allowed(value["mode"], tuple(_name(tool, f".tools[{i}].name") for i, tool in enumerate(tools)))
    if isinstance(kind, str):
        _refuse("only functions are supported by this server", ".type")
    raise PydanticCustomError("tool_choice", "expected none, auto, required, or an object that names functions")


def _name(value: Any, at: str) -> str:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise PydanticCustomError("tool_choice", "expected a function's name", {"at": at})
    return name


_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        {
            "type": "object",
            "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
            "required": ["type", "name"],
        },
    ]
}
Choice = Annotated[Any, BeforeValidator(choice_of), WithJsonSchema(_CHOICE_SCHEMA)]
