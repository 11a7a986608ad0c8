"""Decides what the body of a request for text, or for a tokenizer, asks for, by its route. Pure."""

from __future__ import annotations

from typing import Any, Literal

from gateway.core.admission import parse_json
from gateway.core.relay_bodies import Relayed
from gateway.openai.asked import Asked, Told
from gateway.openai.asked import Kind as OpenAIKind
from gateway.openai.asked import ask as ask_openai
from gateway.openai.token_requests import TokensAsked
from gateway.translating import MessageAsked, NeedsStored, ResponseAsked, Stored, ask_count, ask_message, ask_response

Kind = OpenAIKind | Literal["response", "message", "count"]
Question = Asked | TokensAsked | Relayed | ResponseAsked | MessageAsked | NeedsStored


def ask(kind: Kind, body: bytes, told: Told, stored: Stored | None = None) -> Any:
    """The request in `body`, a `Question`. stored: what a request for a response names, once that is known. Raises
    InvalidRequest naming the first field that is wrong."""
    if kind == "response":
        return ask_response(parse_json(body), len(body), told, stored)
    if kind == "message":
        return ask_message(parse_json(body), len(body), told)
    if kind == "count":
        return ask_count(parse_json(body), len(body), told)
    return ask_openai(kind, body, told)
