"""Translates a request of the Responses API into a chat, and its items into messages.

An assistant's consecutive items (texts and calls) are one message; its thoughts are left out, because chats do not read
them again either. Leading system messages are joined: templates know one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from contracts.errors import InvalidRequest
from gateway.openai.tools import Named
from gateway.responses.items import Allowed, CallItem, Item, MessageItem, ReferenceItem, ResultItem
from gateway.responses.requests import ResponseRequest

Body = dict[str, Any]


@dataclass(slots=True)
class Chat:
    """A chat. sources: by message, the field that it came from."""

    messages: list[Body] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def add(self, message: Body, source: str) -> None:
        """Add a message; a further leading system message is joined to the first."""
        if message["role"] == "system" and len(self.messages) == 1 and self.messages[0]["role"] == "system":
            before, now = self.messages[0]["content"], message["content"]
            if isinstance(before, str) and isinstance(now, str):
                self.messages[0]["content"] = f"{before}\n\n{now}"
                return
        self.messages.append(message)
        self.sources.append(source)


# ---- items as they are stored ----------------------------------------------------------------------------------------
def stored_items(items: Sequence[Item], referenced: dict[str, Body]) -> list[Body]:
    """The items in the form in which they are stored and shown, without ids. referenced: stored items by id. Raises
    InvalidRequest for a reference to an item that is not there."""
    return [_stored(item, referenced, f"input[{i}]") for i, item in enumerate(items)]


def _stored(item: Item, referenced: dict[str, Body], at: str) -> Body:
    if isinstance(item, MessageItem):
        kind = "output_text" if item.role == "assistant" else "input_text"
        return {
            "type": "message",
            "role": item.role,
            "status": "completed",
            "content": _shown(item.content, kind),
        }
    if isinstance(item, CallItem):
        called = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        return {"type": "function_call", "status": "completed"} | called
    if isinstance(item, ResultItem):
        output = item.output if isinstance(item.output, str) else _shown(item.output, "input_text")
        return {"type": "function_call_output", "status": "completed", "call_id": item.call_id, "output": output}
    if isinstance(item, ReferenceItem):
        known = referenced.get(item.id)
        if known is None:
            raise InvalidRequest(
                f"{at}.id: no item {item.id[:80]!r} is stored; send the item itself", param=f"{at}.id", code="not_found"
            )
        return {k: v for k, v in known.items() if k != "id"}
    return {"type": "reasoning", "summary": []}


def _shown(content: Any, text_type: str) -> list[Body]:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [_shown_part(part, text_type) for part in parts]


def _shown_part(part: Body, text_type: str) -> Body:
    if part["type"] == "text":
        more: Body = {"annotations": []} if text_type == "output_text" else {}
        return {"type": text_type, "text": part["text"]} | more
    if part["type"] == "image_url":
        image = part["image_url"]
        return {"type": "input_image", "image_url": image["url"], "detail": image.get("detail", "auto")}
    return part


# ---- items as messages -----------------------------------------------------------------------------------------------
def chat_of(instructions: str | None, earlier: Sequence[Body], items: Sequence[Body]) -> Chat:
    """The chat of stored items. earlier: those of earlier responses."""
    chat = Chat()
    if instructions is not None:
        chat.add({"role": "system", "content": instructions}, "instructions")
    turn = _Turn(chat)
    for item in earlier:
        turn.take(item, "previous_response_id")
    for i, item in enumerate(items):
        turn.take(item, f"input[{i}]")
    turn.ends()
    return chat


class _Turn:
    """An assistant's turn so far: texts and calls."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._texts: list[str] = []
        self._calls: list[Body] = []
        self._source = ""

    def take(self, item: Body, source: str) -> None:
        kind = item["type"]
        if kind == "reasoning":
            return
        if kind == "function_call":
            self._begins(source)
            function = {"name": item["name"], "arguments": item["arguments"]}
            self._calls.append({"id": item["call_id"], "type": "function", "function": function})
        elif kind == "function_call_output":
            self.ends()
            message = {"role": "tool", "tool_call_id": item["call_id"], "content": _chat_content(item["output"])}
            self._chat.add(message, source)
        elif item["role"] == "assistant":
            self._begins(source)
            self._texts += [part["text"] for part in item["content"] if "text" in part]
        else:
            self.ends()
            role = "system" if item["role"] == "developer" else item["role"]
            self._chat.add({"role": role, "content": _chat_content(item["content"])}, source)

    def _begins(self, source: str) -> None:
        if not self._texts and not self._calls:
            self._source = source

    def ends(self) -> None:
        """Add the turn, if there is one."""
        if not self._texts and not self._calls:
            return
        message: Body = {"role": "assistant", "content": "".join(self._texts)}
        if self._calls:
            message["tool_calls"] = self._calls
        self._chat.add(message, self._source)
        self._texts, self._calls = [], []


def _chat_content(content: Any) -> Any:
    if isinstance(content, str):
        return content
    parts = [_chat_part(part) for part in content]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _chat_part(part: Body) -> Body:
    if "text" in part:
        return {"type": "text", "text": part["text"]}
    if part["type"] == "input_image":
        return {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part["detail"]}}
    return part


# ---- the other fields ------------------------------------------------------------------------------------------------
def chat_fields(wanted: ResponseRequest) -> Body:
    """The other fields of the chat."""
    choice: Any = wanted.tool_choice
    forced = isinstance(choice, Named) or "required" in (choice, getattr(choice, "mode", ""))
    tools = [tool.chat(forced=forced) for tool in wanted.tools or ()]
    if isinstance(choice, Named):
        choice = {"type": "function", "function": {"name": choice.name}}
    elif isinstance(choice, Allowed):
        known = {tool["function"]["name"] for tool in tools}
        if unknown := [name for name in choice.names if name not in known]:
            raise InvalidRequest(
                f"tool_choice.tools: {unknown[0][:80]!r} is no function of tools", param="tool_choice.tools"
            )
        tools = [tool for tool in tools if tool["function"]["name"] in choice.names]
        choice = choice.mode
    form = wanted.text.format if wanted.text is not None else None
    body: Body = {
        "model": wanted.model,
        "max_completion_tokens": wanted.max_output_tokens,
        "temperature": wanted.temperature,
        "top_p": wanted.top_p,
        "logprobs": True if wanted.wants_logprobs else None,
        "top_logprobs": wanted.top_logprobs if wanted.wants_logprobs else None,
        "tools": tools or None,
        # Without tools a choice has nothing to say, and clients send `auto` always.
        "tool_choice": None if not tools and choice == "auto" else choice,
        "parallel_tool_calls": wanted.parallel_tool_calls if tools else None,
        "response_format": None if form is None or form.type == "text" else _response_format(form),
        "reasoning_effort": wanted.reasoning.effort if wanted.reasoning is not None else None,
        "prompt_cache_key": wanted.prompt_cache_key,
        "stream": wanted.stream,
    }
    return {name: value for name, value in body.items() if value is not None}


def _response_format(form: Any) -> Body:
    if form.type == "json_object":
        return {"type": "json_object"}
    schema = {"name": form.name, "schema": form.json_schema, "strict": form.strict}
    return {"type": "json_schema", "json_schema": {k: v for k, v in schema.items() if v is not None}}


def echoed(wanted: ResponseRequest, data: Body) -> Body:
    """The fields of the request that the response says again. data: the request's body."""
    text = wanted.text
    form = text.format if text is not None else None
    reasoning = wanted.reasoning
    kept = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
    return {
        "instructions": wanted.instructions,
        "metadata": wanted.metadata or {},
        "parallel_tool_calls": wanted.parallel_tool_calls is not False,
        "temperature": 1.0 if wanted.temperature is None else wanted.temperature,
        "tool_choice": data.get("tool_choice") or "auto",
        "tools": [tool.shown() for tool in wanted.tools or ()],
        "top_p": 1.0 if wanted.top_p is None else wanted.top_p,
        "background": bool(wanted.background),
        "max_output_tokens": wanted.max_output_tokens,
        "max_tool_calls": None,
        "previous_response_id": wanted.previous_response_id,
        "prompt_cache_key": wanted.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": (reasoning.summary or reasoning.generate_summary) if reasoning is not None else None,
        },
        "safety_identifier": _label(data, "safety_identifier"),
        "service_tier": "default",
        "store": wanted.store is not False,
        "text": {"format": kept, "verbosity": "medium"},
        "top_logprobs": wanted.top_logprobs or 0,
        "truncation": "disabled",
        "user": _label(data, "user"),
    }


def _label(data: Body, name: str) -> str | None:
    value = data.get(name)
    return value if isinstance(value, str) and len(value) <= 512 and value.isprintable() else None
