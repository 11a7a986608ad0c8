"""The schema of `POST /v1/responses`. Strict: no value is coerced.

Fields of the Responses API are declared here; `EXTRAS` are those of chats that work here too, and are checked there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from contracts.ranges import MAX_TOP_LOGPROBS
from gateway.core.spellings import ROOTS
from gateway.openai.inputs import MAX_MESSAGES, Ignored, Text
from gateway.openai.parameters import HARMLESS
from gateway.openai.requests import TokenCount
from gateway.openai.thinking import Effort
from gateway.openai.tools import MAX_TOOLS, STRICT, JsonSchema, Name
from gateway.responses.items import Choice, FunctionTool, Item, Lenient, OrText, items_of, tools_of

#: Fields of chats that work here as they do there.
EXTRAS = frozenset(
    {
        "top_k", "min_p", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "skip_special_tokens",
        "chat_template_kwargs", "enable_thinking", "include_reasoning", "session_id", "priority", "structured_outputs",
        "guided_json", "guided_regex", "guided_choice", "cache_salt", "user", "safety_identifier",
    }
)  # fmt: skip
#: Fields with any value, without effect on the text.
IGNORED = HARMLESS | {
    "client_metadata", "context_compression", "image", "max_tool_calls", "moderation", "prompt_cache_options",
    "access_programs", "truncation",
}  # fmt: skip
#: Field -> the values without effect, besides null.
REFUSED: dict[str, tuple[Any, ...]] = {
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "messages": (),
    "n": (1,),
    "response_format": (),
    "max_tokens": (),
    "max_completion_tokens": (),
    "logprobs": (),
}
INCLUDABLE = frozenset(
    {
        "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
        "message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs",
        "reasoning.encrypted_content", "message.output_text.logprobs",
    }
)  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"
_MOST_PAIRS, _KEY_CHARS, _VALUE_CHARS = 16, 64, 512
_Summary = Literal["auto", "concise", "detailed"]


def _include(value: Any) -> Any:
    if value is not None and (not isinstance(value, list) or not all(isinstance(v, str) for v in value)):
        raise PydanticCustomError("include_type", "expected a list of strings")
    for i, name in enumerate(value or ()):
        if name not in INCLUDABLE:
            raise PydanticCustomError(
                "unsupported_parameter", "is not supported by this server; leave it out", {"at": f"[{i}]"}
            )
    return value


def _metadata(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > _MOST_PAIRS:
        raise PydanticCustomError("metadata_type", f"expected an object of at most {_MOST_PAIRS} strings")
    for key, text in value.items():
        if len(key) > _KEY_CHARS or not isinstance(text, str) or len(text) > _VALUE_CHARS:
            raise PydanticCustomError(
                "metadata_value",
                f"its keys have at most {_KEY_CHARS} characters, its values are strings of at most {_VALUE_CHARS}",
            )
    return value


class ReasoningOptions(Lenient):
    """How the model is to think. summary: how thoughts are given: as summaries, else as they are."""

    effort: Effort | None = None
    summary: _Summary | None = None
    generate_summary: _Summary | None = None
    context: Ignored = None
    mode: Literal["standard"] | None = None

    @property
    def as_summary(self) -> bool:
        """Whether thoughts are given in the field for summaries."""
        return self.summary is not None or self.generate_summary is not None


class TextFormat(Lenient):
    """The form of the answer. Every schema is enforced, `strict` or not."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    json_schema: Annotated[JsonSchema | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _both_or_none(self) -> TextFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("json_schema", "schema and the type json_schema come together", {"at": ".schema"})
        if self.json_schema is not None and self.name is None:
            raise PydanticCustomError("json_schema", "needs a name", {"at": ".name"})
        return self


class TextOptions(Lenient):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Ignored = None


class ResponseStreamOptions(BaseModel):
    """Options of a stream."""

    model_config = STRICT
    include_obfuscation: Ignored = None


Tools = Annotated[Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None, BeforeValidator(tools_of)]


class ResponseRequest(BaseModel):
    """`POST /v1/responses`."""

    model_config = STRICT
    model: Annotated[str, Field(min_length=1, max_length=512)]
    input: Annotated[
        Annotated[list[Item], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)],
        BeforeValidator(items_of),
        OrText(),
    ]
    instructions: Text | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Tools = None
    tool_choice: Choice = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[str] | None, BeforeValidator(_include)] = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_metadata)] = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=4096)] | None = None

    @model_validator(mode="after")
    def _together(self) -> ResponseRequest:
        if self.background and self.store is False:
            raise PydanticCustomError("background", "needs store: the answer is read later", {"at": "background"})
        if self.background and self.stream:
            raise PydanticCustomError(
                "unsupported_parameter",
                "does not go with stream on this server; read the answer with GET /v1/responses/{id}",
                {"at": "background"},
            )
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has logprobs."""
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())


#: Fields that are checked as chats' or ignored.
PASSED = (EXTRAS | IGNORED | ROOTS) - ResponseRequest.model_fields.keys()
