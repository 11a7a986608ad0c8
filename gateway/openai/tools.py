"""The schemas of tools, calls and response formats in a request, and their form for the worker. Strict: no value is
coerced.

Only the size and type of JSON schemas are checked here. The worker, which has the library, decides whether they can be
enforced.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from contracts.request import ToolUse

MAX_TOOLS = 128
MAX_CALLS = 128
#: Limits of a schema's JSON text, and of its nesting.
MAX_SCHEMA_BYTES = 256 << 10
MAX_SCHEMA_DEPTH = 64
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)
_NESTS = frozenset((dict, list))
_ANY_OBJECT = '{"type":"object"}'


def json_text(value: Any) -> str:
    """`value` as JSON text. Raises PydanticCustomError for a value that is too large, too deep, or not encodable."""
    if _depth(value) > MAX_SCHEMA_DEPTH:
        raise PydanticCustomError("schema_depth", f"is nested more than {MAX_SCHEMA_DEPTH} deep")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        size = len(text.encode())
    except UnicodeEncodeError:
        raise PydanticCustomError("lone_surrogate", "holds half of a surrogate pair, which is no character") from None
    except ValueError:
        raise PydanticCustomError("schema_number", "holds a number that JSON cannot spell") from None
    if size > MAX_SCHEMA_BYTES:
        raise PydanticCustomError("schema_size", f"is larger than {MAX_SCHEMA_BYTES} bytes")
    return text


def _depth(value: Any) -> int:
    """How deep arrays and objects are nested."""
    depth, level = 0, [value] if type(value) in _NESTS else []
    while level and depth <= MAX_SCHEMA_DEPTH:
        depth += 1
        level = [
            inner
            for item in level
            for inner in (item.values() if type(item) is dict else item)
            if type(inner) in _NESTS
        ]
    return depth


def schema_object(value: Any) -> Any:
    """`value`, checked to be a JSON schema by type and size. Raises PydanticCustomError."""
    if not isinstance(value, dict):
        raise PydanticCustomError("schema_type", "expected a JSON schema, which is an object")
    json_text(value)
    return value


def _parameters(value: Any) -> Any:
    if value is None:
        return None
    if schema_object(value).get("type", "object") != "object":
        raise PydanticCustomError("parameters_type", "its type must be object: arguments have names")
    return value


JsonSchema = Annotated[dict[str, Any], BeforeValidator(schema_object), WithJsonSchema({"type": "object"})]
Parameters = Annotated[dict[str, Any] | None, BeforeValidator(_parameters), WithJsonSchema({"type": "object"})]
#: Tools of MCP servers have longer names than OpenAI's 64 characters.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]


# ---- response_format -------------------------------------------------------------------------------------------------
class NamedSchema(BaseModel):
    """OpenAI's `json_schema`. Every schema is enforced, `strict` or not."""

    model_config = STRICT
    name: Name
    description: str | None = None
    json_schema: Annotated[JsonSchema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The form of the answer: any text, any JSON object, or JSON that satisfies a schema."""

    model_config = STRICT
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _both_or_none(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "json_schema", "json_schema and the type of that name come together", {"at": ".json_schema"}
            )
        return self

    def schema_text(self) -> str | None:
        """JSON text of the schema that the answer must satisfy, if any."""
        if self.json_schema is not None:
            return json_text(self.json_schema.json_schema)
        return _ANY_OBJECT if self.type == "json_object" else None


# ---- tools -----------------------------------------------------------------------------------------------------------
def _function_only(value: Any) -> Any:
    if isinstance(value, str) and value != "function":
        raise PydanticCustomError("unsupported_parameter", "only functions are supported by this server")
    return value


Kind = Annotated[Literal["function"], BeforeValidator(_function_only)]


class Function(BaseModel):
    """A function that the model may call. Its schema is enforced, `strict` or not."""

    model_config = STRICT
    name: Name
    description: str | None = None
    parameters: Parameters = None
    strict: bool | None = None


class Tool(BaseModel):
    """One tool."""

    model_config = STRICT
    type: Kind
    function: Function
    #: Anthropic's cache marks, ignored.
    cache_control: Any = None

    def plain(self) -> dict[str, Any]:
        """The value for the chat template."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {"name": function["name"], **function}}


@dataclass(frozen=True, slots=True)
class Named:
    """A `tool_choice` that names the function to call."""

    name: str


def _choice(value: Any) -> str | Named | None:
    if value is None or value in ("none", "auto", "required"):
        return value if value is None else str(value)
    if not isinstance(value, dict):
        raise PydanticCustomError("tool_choice", "expected none, auto, required, or an object that names a function")
    if value.get("type") != "function":
        raise PydanticCustomError(
            "unsupported_parameter", "only functions are supported by this server", {"at": ".type"}
        )
    function = value.get("function")
    if set(value) != {"type", "function"} or not isinstance(function, dict) or set(function) != {"name"}:
        raise PydanticCustomError("tool_choice", "expected function with a name and nothing else", {"at": ".function"})
    if not isinstance(function["name"], str):
        raise PydanticCustomError("tool_choice", "expected a string", {"at": ".function.name"})
    return Named(function["name"])


_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
    ]
}
ToolChoice = Annotated[Any, BeforeValidator(_choice), WithJsonSchema(_CHOICE_SCHEMA)]


def tool_use(tools: list[Tool] | None, choice: str | Named | None, parallel: bool | None) -> ToolUse | None:
    """Tools and choice for the worker. Raises PydanticCustomError for a choice that `tools` does not allow."""
    if not tools:
        if choice is not None and choice != "none":
            raise PydanticCustomError("tool_choice", "needs tools", {"at": "tool_choice"})
        return None
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise PydanticCustomError("tools", "two tools have the same name", {"at": "tools"})
    if isinstance(choice, Named) and choice.name not in names:
        raise PydanticCustomError("tool_choice", "names no function of tools", {"at": "tool_choice"})
    text = json_text([tool.plain() for tool in tools])
    several = parallel is not False
    if isinstance(choice, Named):
        return ToolUse(text, "required", choice.name, several)
    wanted: Literal["none", "auto", "required"] = (
        "none" if choice == "none" else "required" if choice == "required" else "auto"
    )
    return ToolUse(text, wanted, None, several)


# ---- calls in the history --------------------------------------------------------------------------------------------
class CalledFunction(BaseModel):
    """A function that an assistant called. arguments: JSON text, as the model wrote it."""

    model_config = STRICT
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str


class Call(BaseModel):
    """One call of an assistant's message. index: from streams, ignored."""

    model_config = STRICT
    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Kind = "function"
    function: CalledFunction
    index: int | None = None

    def plain(self) -> dict[str, Any]:
        """The value for the chat template."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": self.function.arguments},
        }
