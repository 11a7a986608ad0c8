"""Translates a request of the Messages API into a chat.

Blocks of text are paragraphs. Results of tools are messages of their own, in their order. Thoughts are left out: chats
do not read them again either.
"""

from __future__ import annotations

from typing import Any

from gateway.anthropic.requests import (
    AnthropicMessage,
    CountRequest,
    ImageBlock,
    MessageRequest,
    ResultBlock,
    TextBlock,
    UseBlock,
    session_in,
    spelled,
    user_in,
)
from gateway.responses.items import chat_tool
from gateway.responses.translation import Chat

Body = dict[str, Any]
#: Claude Code's first block of `system` begins so. It is for Anthropic's billing and differs from request to request:
#: with it, no two prompts would share a prefix.
_BILLING = "x-anthropic-billing-header:"
_BETWEEN = "\n\n"


def chat_of(wanted: CountRequest) -> Chat:
    """The chat's messages."""
    chat = Chat()
    system = [block.text for block in wanted.system if not block.text.startswith(_BILLING)]
    if system:
        chat.add({"role": "system", "content": _BETWEEN.join(system)}, "system")
    for i, message in enumerate(wanted.messages):
        at = f"messages[{i}]"
        if message.role == "assistant":
            chat.add(_answer(message), at)
        else:
            _asked(chat, message, at)
    return chat


def _answer(message: AnthropicMessage) -> Body:
    made: Body = {
        "role": "assistant",
        "content": "".join(block.text for block in message.content if isinstance(block, TextBlock)),
    }
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": spelled(block.input)}}
        for block in message.content
        if isinstance(block, UseBlock)
    ]
    return made | {"tool_calls": calls} if calls else made


def _asked(chat: Chat, message: AnthropicMessage, at: str) -> None:
    """Add what the user, or a tool, said."""
    said: list[TextBlock | ImageBlock] = []

    def ends(*, always: bool = False) -> None:
        if said or always:
            chat.add({"role": message.role, "content": _content(said)}, at)
            said.clear()

    for i, block in enumerate(message.content):
        if isinstance(block, ResultBlock):
            ends()
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(block.content)}
            chat.add(result, f"{at}.content[{i}]")
        elif isinstance(block, TextBlock | ImageBlock):
            said.append(block)
    ends(always=not any(isinstance(block, ResultBlock) for block in message.content))


def _content(blocks: Any) -> Any:
    if all(isinstance(block, TextBlock) for block in blocks):
        return _BETWEEN.join(block.text for block in blocks)
    return [
        {"type": "text", "text": block.text}
        if isinstance(block, TextBlock)
        else {"type": "image_url", "image_url": {"url": block.url}}
        for block in blocks
    ]


# ---- the other fields ------------------------------------------------------------------------------------------------
def shows_thoughts(wanted: CountRequest) -> bool:
    """Whether the answer has blocks of thoughts."""
    thinking = wanted.thinking
    return thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"


def common_fields(wanted: CountRequest) -> Body:
    """The fields of the chat that a prompt is made of."""
    forced = wanted.tool_choice is not None and wanted.tool_choice.type in ("any", "tool")
    tools = [chat_tool(t.name, t.description, t.input_schema, t.strict, forced=forced) for t in wanted.tools or ()]
    body: Body = {"model": wanted.model}
    if tools:
        body["tools"] = tools
    return body


def thinking_of(wanted: CountRequest) -> Body:
    """Whether the model is to think: not unless the request says so, as in Anthropic's API."""
    kind = wanted.thinking.type if wanted.thinking is not None else "disabled"
    if kind == "disabled":
        return {"enable_thinking": False}
    effort = wanted.output_config.effort if wanted.output_config is not None else None
    if effort is not None:
        return {"reasoning_effort": effort}
    return {"enable_thinking": True} if kind == "enabled" else {}


def chat_fields(wanted: MessageRequest) -> Body:
    """The other fields of the chat."""
    choice, form = wanted.tool_choice, wanted.output_config.format if wanted.output_config is not None else None
    body = common_fields(wanted) | {
        "max_completion_tokens": wanted.max_tokens,
        "temperature": wanted.temperature,
        "top_p": wanted.top_p,
        "stop": wanted.stop_sequences,
        "stream": wanted.stream,
        "prompt_cache_key": wanted.prompt_cache_key,
    }
    if choice is not None and (wanted.tools or choice.type in ("any", "tool")):
        body["tool_choice"] = (
            {"type": "function", "function": {"name": choice.name}}
            if choice.type == "tool"
            else {"auto": "auto", "any": "required", "none": "none"}[choice.type]
        )
        if choice.disable_parallel_tool_use and wanted.tools:
            body["parallel_tool_calls"] = False
    if form is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.json_schema}}
    if wanted.metadata is not None and wanted.metadata.user_id:
        body["session_id"] = session_in(wanted.metadata.user_id)
        body["user"] = user_in(wanted.metadata.user_id)
    return {name: value for name, value in (body | thinking_of(wanted)).items() if value is not None}
