"""Reads what a relayed body says to a model: the conversation so far, from which an unnamed session is recognised
(`core.implicit`), and how long its prompt is, roughly.

The engine checks the body, so malformed parts are passed over here. Answers are read by `core.relay_answers`; both must
spell an assistant's turn alike: its text, then its calls, without its reasoning, which clients need not send back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from contracts.context import text_bytes
from gateway.core.implicit import History, after_answer, after_completion, of_messages, of_prompt, with_calls
from gateway.core.relay_routes import RelayKind
from gateway.core.usage import estimated_tokens

#: Tokens of an image or of another part that is no text, roughly.
MEDIA_TOKENS = 1000
_TOKEN_IDS = 1 << 32


@dataclass(slots=True)
class Conversation:
    """What a body says. messages: role and content of each, where the body is a chat. prompt: of a completion. Without
    either, nothing is recognised later. text_bytes, token_ids, media: lengths, and the number of other parts."""

    messages: list[dict[str, str]] = field(default_factory=list)
    prompt: str | list[int] | None = None
    text_bytes: int = 0
    token_ids: int = 0
    media: int = 0

    @property
    def estimate(self) -> int:
        """Estimated tokens of the prompt."""
        return estimated_tokens(self.text_bytes, self.token_ids) + self.media * MEDIA_TOKENS

    def history(self, tenant: str, model: str, scope: str = "") -> History | None:
        """The conversation as hashes; None: there is nothing to recognise."""
        if self.messages:
            return of_messages(tenant, model, self.messages, scope)
        return None if self.prompt is None else of_prompt(tenant, model, self.prompt, scope)

    def text(self, content: Any) -> str:
        """The text of a message's content, and a spelling of its other parts. Counts them."""
        if isinstance(content, str):
            self.text_bytes += text_bytes(content)
            return content
        if isinstance(content, list):
            return "".join(map(self._part, content))
        return "" if content is None else canonical(content)

    def _part(self, part: Any) -> str:
        if not isinstance(part, dict):
            return self.text(part)
        if isinstance(part.get("text"), str):
            return self.text(part["text"])
        self.media += 1
        return canonical(part)

    def tools(self, tools: Any) -> None:
        """Count the tools' descriptions."""
        if isinstance(tools, list) and tools:
            self.text_bytes += len(canonical(tools))


def after(kind: RelayKind, history: History, text: str, calls: list[list[str]]) -> bytes | None:
    """The hash of a conversation with this answer, which the client will send again."""
    if kind == "completion":
        return after_completion(history, text)
    return after_answer(history, with_calls(text, calls))


def canonical(value: Any) -> str:
    """A spelling that does not depend on the order of fields."""
    return json.dumps(value, sort_keys=True)


def read(kind: RelayKind, data: dict[str, Any]) -> Conversation:
    """The conversation in a body."""
    return _READERS[kind](data)


def _chat(data: dict[str, Any]) -> Conversation:
    """Also of bodies for a tokenizer."""
    said = Conversation()
    for message in _objects(data.get("messages")):
        content = said.text(message.get("content"))
        functions = [call.get("function") for call in _objects(message.get("tool_calls"))]
        calls = [[str(f.get("name")), str(f.get("arguments"))] for f in functions if isinstance(f, dict)]
        said.text_bytes += sum(len(text) for call in calls for text in call)
        said.messages.append({"role": str(message.get("role")), "content": with_calls(content, calls)})
    said.tools(data.get("tools"))
    return said


def _completion(data: dict[str, Any]) -> Conversation:
    """Of several prompts the first one names the session. An answer that repeats its prompt is not recognised."""
    said = Conversation()
    prompts = _prompts(data.get("prompt"))
    _count(said, prompts)
    if prompts and not data.get("echo"):
        said.prompt = prompts[0]
    return said


def _embeddings(data: dict[str, Any]) -> Conversation:
    said = _chat({"messages": data.get("messages")})
    _count(said, _prompts(data.get("input")))
    return said


def _nothing(data: dict[str, Any]) -> Conversation:
    return Conversation()


def _prompts(value: Any) -> list[str | list[int]]:
    """One prompt or several, each a text or token ids."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    return [one for one in value if isinstance(one, str) or _is_ids(one)] if isinstance(value, list) else []


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int and 0 <= i < _TOKEN_IDS for i in value)


def _count(said: Conversation, prompts: list[str | list[int]]) -> None:
    for prompt in prompts:
        if isinstance(prompt, str):
            said.text_bytes += text_bytes(prompt)
        else:
            said.token_ids += len(prompt)


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


_READERS: dict[RelayKind, Callable[[dict[str, Any]], Conversation]] = {
    "chat": _chat,
    "completion": _completion,
    "embeddings": _embeddings,
    "tokenize": _nothing,
    "detokenize": _nothing,
}
