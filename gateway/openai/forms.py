"""The constraint on an answer's form, in the fields of OpenAI (`response_format`), vLLM (`guided_*`,
`structured_outputs`) and Ollama (`format`).

A form is a JSON schema or a regular expression. The worker decides whether it can be enforced.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from gateway.openai.tools import MAX_SCHEMA_BYTES, STRICT, ResponseFormat, json_text, schema_object

MAX_REGEX_CHARS = 16 << 10
MAX_LISTED, MAX_LISTED_CHARS = 1024, 1024
_ANY_OBJECT = '{"type":"object"}'


@dataclass(frozen=True, slots=True)
class Form:
    """An answer's form: either json_schema (JSON text) or regex is set. field: the request field that states it."""

    field: str
    json_schema: str | None = None
    regex: str | None = None


def _schema(value: Any) -> Any:
    if not isinstance(value, str):
        return None if value is None else schema_object(value)
    if len(value) > MAX_SCHEMA_BYTES:
        raise PydanticCustomError("schema_size", f"is larger than {MAX_SCHEMA_BYTES} bytes")
    try:
        return schema_object(json.loads(value))
    except (ValueError, RecursionError):
        raise PydanticCustomError("schema_text", "expected a JSON schema: an object, or JSON text of one") from None


def _ollama_format(value: Any) -> Any:
    if value == "json":
        return {"type": "object"}
    if value in (None, ""):
        return None
    if not isinstance(value, dict):
        raise PydanticCustomError("format_type", "expected json, or a JSON schema: an object")
    return schema_object(value)


def _plain_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("lone_surrogate", "holds half of a surrogate pair, which is no character") from None
    return value


def _regex(value: Any) -> Any:
    if isinstance(value, str):
        if (len(value) - len(value.rstrip("\\"))) % 2:
            raise PydanticCustomError("regex", "ends in the middle of an escape")
        _plain_text(value)
    return value


def _choice(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_LISTED or not all(_listed(item) for item in value):
        raise PydanticCustomError(
            "choice_type", f"expected a list of 1 to {MAX_LISTED} strings, of 1 to {MAX_LISTED_CHARS} characters each"
        )
    return [_plain_text(item) for item in value]


def _listed(item: Any) -> bool:
    return isinstance(item, str) and 1 <= len(item) <= MAX_LISTED_CHARS


def _off(value: Any) -> None:
    if value not in (None, False, ""):
        raise PydanticCustomError("unsupported_parameter", "is not supported by this server; leave it out")


def _no_grammar(value: Any) -> None:
    if value not in (None, ""):
        raise PydanticCustomError(
            "unsupported_parameter", "is not supported by this server; use json, regex or choice instead"
        )


_SCHEMA_FORM = {"anyOf": [{"type": "object"}, {"type": "string", "maxLength": MAX_SCHEMA_BYTES}, {"type": "null"}]}
_OLLAMA_FORM = {"anyOf": [{"type": "object"}, {"enum": ["json", "", None]}]}
_CHOICE_FORM = {
    "type": ["array", "null"],
    "minItems": 1,
    "maxItems": MAX_LISTED,
    "items": {"type": "string", "minLength": 1, "maxLength": MAX_LISTED_CHARS},
}
#: A JSON schema, or JSON text of one.
SchemaField = Annotated[dict[str, Any] | None, BeforeValidator(_schema), WithJsonSchema(_SCHEMA_FORM)]
RegexField = Annotated[Annotated[str, Field(min_length=1, max_length=MAX_REGEX_CHARS)] | None, BeforeValidator(_regex)]
ChoiceField = Annotated[list[str] | None, BeforeValidator(_choice), WithJsonSchema(_CHOICE_FORM)]
#: Ollama's `format`: `json`, or a JSON schema.
OllamaFormat = Annotated[dict[str, Any] | None, BeforeValidator(_ollama_format), WithJsonSchema(_OLLAMA_FORM)]
_Off = Annotated[None, BeforeValidator(_off)]
_NoGrammar = Annotated[None, BeforeValidator(_no_grammar)]


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: at most one of the first four fields."""

    model_config = STRICT
    json_schema: SchemaField = Field(default=None, alias="json")
    regex: RegexField = None
    choice: ChoiceField = None
    json_object: bool | None = None
    grammar: _NoGrammar = None
    structural_tag: _NoGrammar = None
    disable_fallback: bool | None = None
    disable_any_whitespace: _Off = None
    disable_additional_properties: _Off = None
    whitespace_pattern: _Off = None

    def forms(self) -> list[Form]:
        """The forms that are set: at most one in a valid request."""
        found = forms_of("structured_outputs.", self.json_schema, self.regex, self.choice)
        return [*found, Form("structured_outputs.json_object", _ANY_OBJECT)] if self.json_object else found


def forms_of(prefix: str, schema: dict[str, Any] | None, regex: str | None, choice: list[str] | None) -> list[Form]:
    """The forms of vLLM's three fields. prefix: of the fields' names."""
    found = [] if schema is None else [Form(f"{prefix}json", json_text(schema))]
    if regex is not None:
        found.append(Form(f"{prefix}regex", regex=regex))
    if choice is not None:
        found.append(Form(f"{prefix}choice", regex="|".join(map(_literal, choice))))
    return found


def form_of_format(wanted: ResponseFormat | None) -> list[Form]:
    """The form in `response_format`, if any."""
    text = wanted.schema_text() if wanted is not None else None
    return [] if text is None else [Form("response_format", text)]


def the_one(forms: Iterable[Form]) -> Form | None:
    """The only one of `forms`. Raises PydanticCustomError when there are several."""
    first, *others = [*forms, None]
    if first is not None and others[0] is not None:
        what = f"does not go with {first.field}; leave one of both out"
        raise PydanticCustomError("form", "{what}", {"at": others[0].field, "what": what})
    return first


def _literal(text: str) -> str:
    """A regular expression that only `text` matches."""
    return "".join(c if c.isalnum() or c == " " or not c.isascii() else f"\\x{{{ord(c):x}}}" for c in text)
