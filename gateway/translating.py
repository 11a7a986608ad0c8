"""Turns the body of a request in another API's format into a chat's: OpenAI's Responses API and Anthropic's Messages.

Pure, like `gateway.openai.asked`. Every model answers these routes as it answers chats, whether its engine is Upbeat's
or has HTTP of its own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import PydanticCustomError

from contracts.errors import InvalidRequest, RequestError
from contracts.models import ModelWire
from gateway import sse
from gateway.anthropic import requests as anthropic
from gateway.anthropic import translation as of_messages
from gateway.core.relay_bodies import Relayed, relayed
from gateway.core.renaming import OF_MESSAGES, OF_RESPONSES, renamed
from gateway.core.spellings import ROOTS
from gateway.openai.asked import Asked, Told, asked_of_chat, check_context
from gateway.openai.parameters import HARMLESS, validate
from gateway.openai.thinking import SWITCHES, template_kwargs
from gateway.openai.token_requests import TokensAsked, ask_tokens
from gateway.responses import requests as responses
from gateway.responses import translation as of_items
from gateway.responses.items import ReferenceItem

Body = dict[str, Any]
Schema = TypeVar("Schema", bound=BaseModel)


@dataclass(slots=True)
class Stored:
    """What a request names of stored responses, as JSON. earlier: a list of items. referenced: items by id. length:
    bytes that they add to the request, which may name an item several times."""

    earlier: bytes = b"[]"
    referenced: bytes = b"{}"
    length: int = 0


@dataclass(slots=True)
class NeedsStored:
    """A request that names stored responses, which have to be read before it can be translated. previous: a response's
    id, or empty. items: ids of items."""

    previous: str = ""
    items: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ResponseAsked:
    """A valid request for a response. echo: fields that the response says again, as JSON. items: its input as JSON, a
    list of items without ids. as_summary: thoughts are given as summaries."""

    asked: Asked | Relayed
    echo: bytes
    items: bytes
    previous: str = ""
    store: bool = True
    background: bool = False
    as_summary: bool = False
    logprobs: bool = False


@dataclass(slots=True)
class MessageAsked:
    """A valid request for a message. thoughts: the answer has blocks of them."""

    asked: Asked | Relayed
    thoughts: bool = False


def ask_response(data: Any, length: int, told: Told, stored: Stored | None) -> ResponseAsked | NeedsStored:
    """The request in a decoded body of the Responses API. stored: what it names, once that is known. Raises
    InvalidRequest naming the first field that is wrong."""
    known = responses.IGNORED, responses.PASSED
    wanted, passed = _read(responses.ResponseRequest, data, responses.REFUSED, *known, told)
    references = [item.id for item in wanted.input if isinstance(item, ReferenceItem)]
    if stored is None and (wanted.previous_response_id or references):
        return NeedsStored(wanted.previous_response_id or "", references)
    stored = stored or Stored()
    items = of_items.stored_items(wanted.input, json.loads(stored.referenced))
    chat = of_items.chat_of(wanted.instructions, json.loads(stored.earlier), items)
    named = told.named or bool(wanted.previous_response_id)
    body = passed | of_items.chat_fields(wanted) | {"messages": chat.messages}
    try:
        asked = _chat(body, length + stored.length, replace(told, named=named), OF_RESPONSES["response_format"])
    except RequestError as e:
        raise renamed(e, OF_RESPONSES, chat.sources) from None
    return ResponseAsked(
        asked,
        sse.encoded(of_items.echoed(wanted, data)),
        json.dumps(items).encode(),
        previous=wanted.previous_response_id or "",
        store=wanted.store is not False,
        background=bool(wanted.background),
        as_summary=wanted.reasoning is not None and wanted.reasoning.as_summary,
        logprobs=wanted.wants_logprobs,
    )


def ask_message(data: Any, length: int, told: Told) -> MessageAsked:
    """The request in a decoded body of the Messages API. Raises InvalidRequest naming the first field that is wrong."""
    known = anthropic.IGNORED, anthropic.PASSED
    wanted, passed = _read(anthropic.MessageRequest, data, anthropic.REFUSED, *known, told)
    chat = of_messages.chat_of(wanted)
    fields = of_messages.chat_fields(wanted)
    # What the caller's own field says goes before what Claude Code's metadata says.
    body = fields | passed | {"messages": chat.messages}
    try:
        asked = _chat(body, length, told, OF_MESSAGES["response_format"])
    except RequestError as e:
        raise renamed(e, OF_MESSAGES, chat.sources) from None
    shown = of_messages.shows_thoughts(wanted)
    if isinstance(asked, Asked) and asked.reasoning == "field" and not shown:
        asked.reasoning = "away"
    return MessageAsked(asked, shown)


def ask_count(data: Any, length: int, told: Told) -> TokensAsked | Relayed:
    """The request to count the tokens of a prompt of the Messages API, as one for a tokenizer. Raises InvalidRequest
    naming the first field that is wrong."""
    known = anthropic.CountRequest.model_fields
    # The clients send the fields of the message that they are about to ask for.
    ignored = anthropic.PASSED | (anthropic.MessageRequest.model_fields.keys() - known.keys())
    wanted, passed = _read(anthropic.CountRequest, data, anthropic.REFUSED, anthropic.IGNORED, ignored, told)
    chat = of_messages.chat_of(wanted)
    body = of_messages.common_fields(wanted) | {"messages": chat.messages}
    try:
        body |= _variables(of_messages.thinking_of(wanted) | passed, wanted.model, told)
        if told.wires.get(wanted.model) is ModelWire.HTTP:
            return relayed("tokenize", body, told.tenant, told.headers, named=told.named)
        check_context("tokenize", body, length, told)
        return ask_tokens("tokenize", body)
    except RequestError as e:
        raise renamed(e, OF_MESSAGES, chat.sources) from None


def _read(
    schema: type[Schema],
    data: Any,
    refused: Mapping[str, tuple[Any, ...]],
    ignored: Collection[str],
    passed: Collection[str],
    told: Told,
) -> tuple[Schema, Body]:
    """The validated request, and the fields that are checked as chats'. ignored: among `passed`, those that have no
    effect; chats know some of them too. An engine with HTTP of its own may know other fields."""
    model = data.get("model") if isinstance(data, dict) else None
    known = data
    if isinstance(data, dict) and isinstance(model, str) and told.wires.get(model) is ModelWire.HTTP:
        known = {k: v for k, v in data.items() if k in schema.model_fields or k in refused or k in passed}
    wanted = validate(schema, known, refused, passed)
    own = {*schema.model_fields, *refused, *(set(ignored) - HARMLESS - ROOTS)}
    return wanted, {name: value for name, value in data.items() if name not in own and value is not None}


def _chat(body: Body, length: int, told: Told, form_field: str) -> Asked | Relayed:
    """The chat, by the model's engine. form_field: what the caller calls `response_format`."""
    if told.wires.get(body["model"]) is not ModelWire.HTTP:
        asked = asked_of_chat(body, length, told)
        if asked.form is not None and asked.form.field == "response_format":
            asked.form = replace(asked.form, field=form_field)
        return asked
    switches = _for_template({name: body.pop(name) for name in ("enable_thinking",) if name in body})
    if switches:
        given = body.get("chat_template_kwargs")
        body["chat_template_kwargs"] = switches | (given if isinstance(given, dict) else {})
    if body.get("stream"):
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    return relayed("chat", body, told.tenant, told.headers, named=told.named, per_user=told.per_user)


def _for_template(thinking: Body) -> Body:
    """The variables of a chat template for whether to think."""
    if "enable_thinking" in thinking:
        return dict.fromkeys(SWITCHES, thinking["enable_thinking"])
    return {}


def _variables(fields: Body, model: str, told: Told) -> Body:
    """`chat_template_kwargs` with what a message with these fields gives to the template. Raises InvalidRequest."""
    given = fields.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        return {"chat_template_kwargs": given}  # refused where a chat's is
    effort, thinks = fields.get("reasoning_effort"), fields.get("enable_thinking")
    if not isinstance(thinks, bool | None):
        raise InvalidRequest("enable_thinking must be true or false", param="enable_thinking")
    if told.wires.get(model) is ModelWire.HTTP:
        said = {} if thinks is None else _for_template({"enable_thinking": thinks})
        made = said | ({"reasoning_effort": effort} if effort else {}) | (given or {})
    else:
        try:
            text = template_kwargs(given, {"reasoning_effort": effort}, {"enable_thinking": thinks})
        except PydanticCustomError as e:
            raise InvalidRequest(str(e), param="thinking") from None
        made = json.loads(text) if text else {}
    return {"chat_template_kwargs": made} if made else {}
