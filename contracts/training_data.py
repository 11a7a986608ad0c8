"""What a line of a training file may be: a chat, or a text."""

from __future__ import annotations

import json
from typing import Any

from contracts.errors import InvalidRequest

_ROLES = frozenset({"system", "user", "assistant", "tool"})


def check_line(line: bytes, number: int) -> None:
    """Raises InvalidRequest, which begins with `line NUMBER: `, unless the line is an example: a JSON object with
    `messages` (at least one of the assistant) or `text`."""
    why = _wrong(line)
    if why:
        raise InvalidRequest(f"line {number}: {why}", code="invalid_training_data")


def _wrong(line: bytes) -> str:
    try:
        example = json.loads(line)
    except (ValueError, RecursionError) as e:
        return f"it is not JSON ({e})"
    if not isinstance(example, dict):
        return "it is no JSON object; give one with `messages` or `text`"
    if ("messages" in example) == ("text" in example):
        return "give either `messages` or `text`"
    if "text" in example:
        return (
            "" if isinstance(example["text"], str) and example["text"] else "`text` must be a string that is not empty"
        )
    messages: Any = example["messages"]
    if not isinstance(messages, list) or not messages:
        return "`messages` must be a list of messages"
    for at, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            return f"messages[{at}].role must be one of {', '.join(sorted(_ROLES))}"
        if not isinstance(message.get("content"), str):
            return f"messages[{at}].content must be a string"
    if all(message["role"] != "assistant" for message in messages):
        return "no message is the assistant's, so nothing would be learned"
    return ""
