"""Whether and how much a model is to think, in the words of OpenAI, OpenRouter, Anthropic and vLLM, as variables of its chat template.

The template decides what a variable does; one that it does not know does nothing. What a caller puts into `chat_template_kwargs` goes
before what follows from other fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from contracts.template_kwargs import encode_template_kwargs
from gateway.openai.tools import STRICT

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
#: How templates call the switch: Qwen and GLM; DeepSeek and Granite.
SWITCHES = ("enable_thinking", "thinking")
_Budget = Annotated[int, Field(ge=0, le=1 << 31)]


class Thinking(BaseModel):
    """Anthropic's and GLM's form. The budget is not enforced."""

    model_config = STRICT
    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: _Budget | None = None


class Reasoning(BaseModel):
    """OpenRouter's form, and that of OpenAI's responses. `enabled`, `effort` and `exclude` do something."""

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


#: Each may also be true or false.
ThinkingField = Annotated[Thinking | None, BeforeValidator(_thinking)]
ReasoningField = Annotated[Reasoning | None, BeforeValidator(_reasoning)]


def template_kwargs(
    given: Mapping[str, Any] | None, effort: Effort | None, thinking: Thinking | None, reasoning: Reasoning | None
) -> str | None:
    """JSON text of the template's variables; None: none. Raises PydanticCustomError for fields that contradict each other, and what
    `encode_template_kwargs` raises."""
    efforts = {"reasoning_effort": effort, "reasoning.effort": reasoning.effort if reasoning is not None else None}
    asked = [(name, value) for name, value in efforts.items() if value]
    if len({value for _, value in asked}) > 1:
        raise PydanticCustomError("reasoning", "contradicts reasoning_effort; leave one of both out", {"at": "reasoning.effort"})
    said = [(name, value != "none") for name, value in asked]
    if reasoning is not None and reasoning.enabled is not None:
        said.append(("reasoning.enabled", reasoning.enabled))
    if thinking is not None and thinking.type in ("enabled", "disabled"):
        said.append(("thinking", thinking.type == "enabled"))
    first = said[0] if said else ("", None)
    for name, on in said:
        if on is not first[1]:
            raise PydanticCustomError("thinking", "contradicts {other}; leave one of both out", {"at": name, "other": first[0]})
    derived: dict[str, Any] = {} if first[1] is None else dict.fromkeys(SWITCHES, first[1])
    if asked and first[1]:
        derived["reasoning_effort"] = asked[0][1]
    return encode_template_kwargs({**derived, **(given or {})})
