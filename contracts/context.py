"""Refuses prompts that are too long for the context, before they are tokenised.

A token stands for at most `b` bytes of text, so a prompt of N bytes has at least N / b tokens. A worker reports its
model's `b`. Gateways refuse prompts by it, and so does the worker before it renders and tokenises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contracts.errors import InvalidRequest

#: Roles whose text every template keeps. Templates may leave out results of tools.
_KEPT = ("system", "developer", "user", "assistant")
#: Templates leave out the assistant's reasoning of earlier turns, which ends with this tag.
_THOUGHT_ENDS = "</think>"


@dataclass(frozen=True, slots=True)
class ContextBound:
    """A model's limits. max_tokens: prompt plus output. longest_token_bytes, message_token_bytes: most bytes of a plain
    prompt, or of text in messages, that one token stands for. 0: unknown, nothing is refused."""

    max_tokens: int = 0
    longest_token_bytes: int = 0
    message_token_bytes: int = 0

    def check_prompt(self, prompt: Any, param: str = "prompt") -> None:
        """Raises InvalidRequest when a text or a list of token ids leaves no space for an answer. Ignores other
        types."""
        if isinstance(prompt, str):
            self.check_bytes(text_bytes(prompt), self.longest_token_bytes, param)
        elif isinstance(prompt, list):
            self._check(len(prompt), param)

    def check_messages(self, messages: Any) -> None:
        """Raises InvalidRequest when the messages of a chat leave no space for an answer. Ignores malformed
        messages."""
        if self.message_token_bytes and isinstance(messages, list):
            self.check_bytes(said_bytes(messages), self.message_token_bytes, "messages")

    def check_bytes(self, amount: int, token_bytes: int, param: str) -> None:
        """Raises InvalidRequest when `amount` bytes are too many tokens in any tokenisation. token_bytes 0: unknown."""
        if token_bytes:
            self._check(-(-amount // token_bytes), param)

    def _check(self, tokens: int, param: str) -> None:
        if self.max_tokens and tokens >= self.max_tokens:
            raise InvalidRequest(
                f"this model's context holds {self.max_tokens} tokens; the prompt has at least {tokens}. Shorten "
                "the prompt",
                param=param,
                code="context_length_exceeded",
            )


def text_bytes(text: str) -> int:
    """Length in UTF-8. A lone surrogate counts as 3 bytes."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def said_bytes(messages: Sequence[Any]) -> int:
    """Bytes of the messages' text that every template keeps: stripped, without reasoning. Malformed messages count
    0."""
    return sum(text_bytes(text) for message in messages if isinstance(message, dict) for text in _texts(message))


def _texts(message: dict[str, Any]) -> list[str]:
    role, content = message.get("role"), message.get("content")
    if role not in _KEPT:
        return []
    if isinstance(content, list):
        content = "".join(
            part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    if not isinstance(content, str):
        return []
    return [(content.rpartition(_THOUGHT_ENDS)[2] if role == "assistant" else content).strip()]
