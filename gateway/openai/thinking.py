"""Turns other APIs' fields for thinking into variables of the model's chat template.

The template decides what a variable does; unknown variables have no effect. `chat_template_kwargs` overrides variables
derived from other fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from contracts.template_kwargs import encode_template_kwargs
from gateway.openai.tools import STRICT

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
#: Names of the switch in templates: of Qwen and GLM; of DeepSeek and Granite.
SWITCHES = ("enable_thinking", "thinking")
#: What happens to a thought: it stays in the text, moves into its own field, or is dropped.
ReasoningGoes = Literal["text", "field", "away"]
_Budget = Annotated[int, Field(ge=0, le=1 << 31)]


class Thinking(BaseModel):
    """Anthropic's and GLM's form. The budget is not enforced."""

    model_config = STRICT
    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: _Budget | None = None

    @property
    def switch(self) -> bool | None:
        """Whether the model is to think; None: the template's default."""
        return {"enabled": True, "disabled": False}.get(self.type)


class Reasoning(BaseModel):
    """OpenRouter's form, and that of OpenAI's responses. Only `enabled`, `effort` and `exclude` have an effect."""

    model_config = STRICT
    enabled: bool | None = None
    effort: Effort | None = None
    max_tokens: _Budget | None = None
    exclude: bool | None = None
    summary: str | None = None
    generate_summary: str | None = None


def _thinking(value: Any) -> Any:
    return {"type": "enabled" if value else "disabled"} if isinstance(value, bool) else value


def _reasoning(value: Any) -> Any:
    return {"enabled": value} if isinstance(value, bool) else value


def _think(value: Any) -> Any:
    if value is not None and not isinstance(value, bool | str):
        raise PydanticCustomError("think_type", "expected true, false, low, medium or high")
    return value


#: Each may also be true or false.
ThinkingField = Annotated[Thinking | None, BeforeValidator(_thinking)]
ReasoningField = Annotated[Reasoning | None, BeforeValidator(_reasoning)]
#: Ollama's form.
ThinkField = Annotated[Literal[True, False, "low", "medium", "high"] | None, BeforeValidator(_think)]


def template_kwargs(
    given: Mapping[str, Any] | None, efforts: Mapping[str, Effort | None], switches: Mapping[str, bool | None]
) -> str | None:
    """JSON text of the template's variables; None: no variables. efforts, switches: values by field; None: not set.
    Raises PydanticCustomError for contradicting fields, and what `encode_template_kwargs` raises."""
    asked = [(name, effort) for name, effort in efforts.items() if effort]
    _agree(asked)
    said = [(name, effort != "none") for name, effort in asked] + [
        (name, on) for name, on in switches.items() if on is not None
    ]
    _agree(said)
    derived: dict[str, Any] = dict.fromkeys(SWITCHES, said[0][1]) if said else {}
    if asked and said[0][1]:
        derived["reasoning_effort"] = asked[0][1]
    return encode_template_kwargs({**derived, **(given or {})})


def _agree(said: Sequence[tuple[str, Any]]) -> None:
    for name, value in said:
        if value != said[0][1]:
            raise PydanticCustomError(
                "thinking", "contradicts {other}; leave one of both out", {"at": name, "other": said[0][0]}
            )
