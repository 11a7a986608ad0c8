"""The schemas of `/v1/chat/completions` and `/v1/completions`. Strict: no value is coerced.

Every field declared here works. `gateway.openai.parameters` handles other fields; `gateway.openai.inputs` has messages
and prompts.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    FailFast,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from contracts import ranges
from contracts.ranges import MAX_BIASES, MAX_STOP_CHARS, MAX_STOP_TOKENS, MAX_STOPS, MAX_TOP_LOGPROBS, MOST_TOKENS
from contracts.request import Sampling, ToolUse
from gateway.core.scopes import MOST_SALT_CHARS
from gateway.openai.forms import (
    ChoiceField,
    Form,
    OllamaFormat,
    RegexField,
    SchemaField,
    StructuredOutputs,
    form_of_format,
    forms_of,
    the_one,
)
from gateway.openai.inputs import MAX_MESSAGES, Ignored, Message, Prompts, utf8
from gateway.openai.thinking import (
    Effort,
    Reasoning,
    ReasoningField,
    ReasoningGoes,
    ThinkField,
    ThinkingField,
    template_kwargs,
)
from gateway.openai.tools import (
    MAX_TOOLS,
    STRICT,
    ResponseFormat,
    Tool,
    ToolChoice,
    json_text,
    tool_use,
)

MAX_CHOICES = 8
#: OpenAI's default for completions.
COMPLETION_MAX_TOKENS = 16
_TOKEN_ID = re.compile(r"[0-9]{1,9}")


def _within(bounds: tuple[float, float]) -> Any:
    return Field(ge=bounds[0], le=bounds[1])


Unit = Annotated[float, _within(ranges.UNIT)]
Penalty = Annotated[float, _within(ranges.PENALTY)]
RepetitionPenalty = Annotated[float, _within(ranges.REPETITION_PENALTY)]
TokenCount = Annotated[int, Field(ge=1, le=MOST_TOKENS)]


#: Not longer than on its way to an engine with HTTP of its own.
Salt = Annotated[
    str,
    Field(min_length=1, max_length=MOST_SALT_CHARS, description="requests with different values share no cache"),
    AfterValidator(utf8),
]


def _label(value: Any) -> str | None:
    """A text of any length and form."""
    if value is not None and not isinstance(value, str):
        raise PydanticCustomError("string_type", "input should be a valid string")
    return value


Label = Annotated[
    str | None,
    PlainValidator(_label),
    WithJsonSchema({"type": ["string", "null"], "description": "the end user; see `gateway.limits.cache_scope`"}),
]


def _stops(value: Any) -> list[str]:
    many = [value] if isinstance(value, str) else value
    if (
        not isinstance(many, list)
        or len(many) > MAX_STOPS
        or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARS for s in many)
    ):
        raise PydanticCustomError(
            "stop_type",
            f"expected a string, or a list of at most {MAX_STOPS} strings, of 1 to {MAX_STOP_CHARS} characters",
        )
    return [utf8(s) for s in many]


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise PydanticCustomError(
            "logit_bias_type", f"expected an object of at most {MAX_BIASES} token ids with their biases"
        )
    biases = {}
    for token, bias in value.items():
        if not _TOKEN_ID.fullmatch(token):
            raise PydanticCustomError("logit_bias_key", "its keys must be token ids")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not ranges.BIAS[0] <= bias <= ranges.BIAS[1]:
            raise PydanticCustomError("logit_bias_value", "a bias must be a number from -100 to 100")
        biases[int(token)] = float(bias)
    return biases


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = STRICT
    include_usage: bool | None = None
    include_obfuscation: Ignored = None


class UsageOptions(BaseModel):
    """OpenRouter's `usage`."""

    model_config = STRICT
    include: bool | None = None


class Generation(BaseModel):
    """The fields that both routes share."""

    model_config = STRICT
    model: Annotated[str, Field(min_length=1, max_length=512)]
    temperature: Annotated[float, _within(ranges.TEMPERATURE)] | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOKENS)] | None = None
    min_p: Unit | None = None
    max_tokens: TokenCount | None = None
    stop: Annotated[list[str] | None, BeforeValidator(lambda v: None if v is None else _stops(v))] = None
    seed: Annotated[int, _within(ranges.SEED)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    #: Ollama's name for repetition_penalty.
    repeat_penalty: RepetitionPenalty | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=MAX_STOP_TOKENS)] | None
    ) = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaField = None
    guided_regex: RegexField = None
    guided_choice: ChoiceField = None
    format: OllamaFormat = None
    logit_bias: Annotated[
        dict[int, float] | None,
        BeforeValidator(lambda v: None if v is None else _biases(v)),
        WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
    ] = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    usage: UsageOptions | None = None
    priority: Annotated[int, _within(ranges.PRIORITY)] | None = None
    # `gateway.sessions` checks the session id further.
    session_id: Annotated[str, Field(max_length=4096)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=4096)] | None = None
    cache_salt: Salt | None = None
    # `core.scopes.user_of` reads them.
    user: Label = None
    safety_identifier: Label = None

    @model_validator(mode="after")
    def _ends_and_grammars(self) -> Self:
        if self.min_tokens and (self.max_tokens or self.min_tokens) < self.min_tokens:
            raise PydanticCustomError("min_tokens", "must not be more than max_tokens", {"at": "min_tokens"})
        if len({self.repeat_penalty, self.repetition_penalty} - {None}) > 1:
            raise PydanticCustomError(
                "repeat_penalty", "contradicts repetition_penalty; leave one of both out", {"at": "repeat_penalty"}
            )
        if (form := self.form) is not None and self.min_tokens:
            what = f"does not go with {form.field}, which says where to end"
            raise PydanticCustomError("min_tokens", "{what}", {"at": "min_tokens", "what": what})
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage) or bool(
            self.usage and self.usage.include
        )

    @property
    def form(self) -> Form | None:
        """The answer's form. Raises PydanticCustomError when several fields give one."""
        outputs = self.structured_outputs.forms() if self.structured_outputs is not None else []
        guided = forms_of("guided_", self.guided_json, self.guided_regex, self.guided_choice)
        ollama = [] if self.format is None else [Form("format", json_text(self.format))]
        return the_one([*form_of_format(self.response_format), *outputs, *guided, *ollama])

    def sampling(self) -> Sampling:
        """The worker's parameters, with OpenAI's defaults except for seed and token limit."""
        repetition = self.repetition_penalty if self.repeat_penalty is None else self.repeat_penalty
        return Sampling(
            temperature=1.0 if self.temperature is None else float(self.temperature),
            # At 0 no token would remain; OpenAI treats it as "the likeliest token".
            top_p=1.0 if self.top_p is None else max(float(self.top_p), 1e-6),
            top_k=max(0, self.top_k or 0),
            min_p=float(self.min_p or 0.0),
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop=self.stop or [],
            ignore_eos=bool(self.ignore_eos),
            presence_penalty=float(self.presence_penalty or 0.0),
            frequency_penalty=float(self.frequency_penalty or 0.0),
            repetition_penalty=1.0 if repetition is None else float(repetition),
            min_tokens=self.min_tokens or 0,
            stop_token_ids=self.stop_token_ids or [],
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            logit_bias=self.logit_bias or {},
        )


class ChatRequest(Generation):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    thinking: ThinkingField = None
    reasoning: ReasoningField = None
    think: ThinkField = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None

    @model_validator(mode="after")
    def _together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError(
                "top_logprobs_alone", "top_logprobs needs logprobs to be true", {"at": "top_logprobs"}
            )
        _ = self.template_kwargs  # raises for invalid variables
        use = self.tool_use
        if self.min_tokens and use is not None:
            raise PydanticCustomError(
                "min_tokens", "does not go with tools, which say where to end", {"at": "min_tokens"}
            )
        if use is not None and (form := self.form) is not None and form.regex is not None:
            raise PydanticCustomError(
                "form", "does not go with tools; use a JSON schema, or leave one of both out", {"at": form.field}
            )
        if use is not None and self.skip_special_tokens is False:
            raise PydanticCustomError("skip_special_tokens", "does not go with tools", {"at": "skip_special_tokens"})
        return self

    @property
    def tool_use(self) -> ToolUse | None:
        """Tools and choice for the worker."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def reasoning_goes(self) -> ReasoningGoes:
        """What happens to the model's thoughts."""
        if self.include_reasoning is False or (self.reasoning is not None and self.reasoning.exclude):
            return "away"
        return "text" if self.separate_reasoning is False else "field"

    @property
    def template_kwargs(self) -> str | None:
        """JSON text of the chat template's variables."""
        reasoning, think = self.reasoning or Reasoning(), self.think
        efforts: dict[str, Effort | None] = {
            "reasoning_effort": self.reasoning_effort,
            "reasoning.effort": reasoning.effort,
            "think": think if isinstance(think, str) else None,
        }
        switches = {
            "reasoning.enabled": reasoning.enabled,
            "thinking": self.thinking.switch if self.thinking is not None else None,
            "think": think if isinstance(think, bool) else None,
            "enable_thinking": self.enable_thinking,
        }
        return template_kwargs(self.chat_template_kwargs, efforts, switches)

    def sampling(self) -> Sampling:
        """See `Generation.sampling`; `max_completion_tokens`, the newer name, takes precedence."""
        sampling = super().sampling()
        sampling.max_tokens = self.max_completion_tokens or self.max_tokens
        sampling.logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return sampling


class CompletionRequest(Generation):
    """`POST /v1/completions`."""

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    def sampling(self) -> Sampling:
        """See `Generation.sampling`."""
        sampling = super().sampling()
        if sampling.max_tokens is None:
            sampling.max_tokens = COMPLETION_MAX_TOKENS
        sampling.logprobs = self.logprobs
        return sampling
