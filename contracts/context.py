"""How long a prompt may be, before anybody has tokenised it.

A token stands for a bounded number of bytes of text, so a prompt of N bytes has at least N / that many tokens. A worker knows the bound of
its model and reports it; gateways refuse by it what can fit into no context, and the worker does before it renders and tokenises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from contracts.errors import InvalidRequest

#: Whose words every template is asked to keep; what tools answered may be left out.
_KEPT = ("system", "developer", "user", "assistant")
#: Templates leave out what an assistant thought in earlier turns.
_THOUGHT_ENDS = "</think>"


@dataclass(frozen=True, slots=True)
class ContextBound:
    """max_tokens: longest prompt plus output. longest_token_bytes, message_token_bytes: most bytes of a plain prompt, or of what messages
    say, that one token can stand for. 0: not known, and nothing is refused by it."""

    max_tokens: int = 0
    longest_token_bytes: int = 0
    message_token_bytes: int = 0

    def check_prompt(self, prompt: Any, param: str = "prompt") -> None:
        """Raises InvalidRequest when a text, or a list of token ids, leaves no room for an answer. Anything else passes."""
        if isinstance(prompt, str):
            self.check_bytes(text_bytes(prompt), self.longest_token_bytes, param)
        elif isinstance(prompt, list):
            self._check(len(prompt), param)

    def check_messages(self, messages: Any) -> None:
        """Raises InvalidRequest when the messages of a chat leave no room for an answer. What is no message passes."""
        if self.message_token_bytes and isinstance(messages, list):
            self.check_bytes(said_bytes(messages), self.message_token_bytes, "messages")

    def check_bytes(self, amount: int, token_bytes: int, param: str) -> None:
        """Raises InvalidRequest when so many bytes are too many tokens, however they are tokenised; token_bytes 0: not known."""
        if token_bytes:
            self._check(-(-amount // token_bytes), param)

    def _check(self, tokens: int, param: str) -> None:
        if self.max_tokens and tokens >= self.max_tokens:
            raise InvalidRequest(
                f"this model's context holds {self.max_tokens} tokens; the prompt has at least {tokens}. Shorten the prompt",
                param=param,
                code="context_length_exceeded",
            )


def text_bytes(text: str) -> int:
    """Length in UTF-8; half of a surrogate pair counts as the 3 bytes that it would have."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def said_bytes(messages: Sequence[Any]) -> int:
    """Bytes of what these messages say that any template keeps: without space around it, and without what was thought. Parts count as
    they are; what has another form than a message counts nothing."""
    return sum(text_bytes(text) for message in messages if isinstance(message, dict) for text in _texts(message))


def _texts(message: dict[str, Any]) -> list[str]:
    role, content = message.get("role"), message.get("content")
    if role not in _KEPT:
        return []
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    if not isinstance(content, str):
        return []
    return [(content.rpartition(_THOUGHT_ENDS)[2] if role == "assistant" else content).strip()]
