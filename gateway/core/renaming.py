"""Renames the fields that errors name, for APIs that are translated into chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from contracts.errors import RequestError

#: Field of a chat -> the field that it came from.
OF_RESPONSES: dict[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
}
OF_MESSAGES: dict[str, str] = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "enable_thinking": "thinking",
}


def renamed(error: RequestError, names: Mapping[str, str], sources: Sequence[str] = ()) -> RequestError:
    """`error`, whose param and the beginning of whose message name the caller's field; mutated. sources: by message of
    the chat, the field that it came from."""
    old = error.param
    if old is None:
        return error
    new = _field(old, names, sources)
    if new != old:
        error.param = new
        error.message = error.message.replace(old, new, 1)
    return error


def _field(name: str, names: Mapping[str, str], sources: Sequence[str]) -> str:
    if name.startswith("messages[") and sources:
        number, _, rest = name.removeprefix("messages[").partition("]")
        return sources[int(number)] + rest if number.isdigit() and int(number) < len(sources) else name
    root = next((name[:i] for i, c in enumerate(name) if c in ".["), name)
    return (names.get(root, root) + name[len(root) :]).replace("].function.", "].")
