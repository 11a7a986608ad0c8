"""Ids of responses and of their items.

An item's id contains its response's, so that an `item_reference` needs no index: `resp_RESPONSE` has the output items
`msg_RESPONSE0000`, `fc_RESPONSE0001`, `rs_...`, and its input items are counted from 8000 (hexadecimal).
"""

from __future__ import annotations

import re
import secrets

_RESPONSE = re.compile(r"resp_([0-9a-f]{32})")
_ITEM = re.compile(r"(?:msg|fc|fco|rs)_([0-9a-f]{32})([0-9a-f]{4})")
_FIRST_INPUT = 0x8000
#: By an item's type: how its id begins.
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def new_response_id() -> str:
    """An id that nobody can guess."""
    return f"resp_{secrets.token_hex(16)}"


def is_response_id(text: str) -> bool:
    """Whether it has the form of one."""
    return _RESPONSE.fullmatch(text) is not None


def item_id(response_id: str, kind: str, number: int, *, of_input: bool = False) -> str:
    """The id of a response's item. kind: its type. number: its place among the output, or among the input."""
    return f"{_PREFIXES[kind]}_{response_id.removeprefix('resp_')}{number + (_FIRST_INPUT if of_input else 0):04x}"


def response_of(item: str) -> str | None:
    """The id of the response that an item belongs to; None: it is no item of this server's."""
    found = _ITEM.fullmatch(item)
    return f"resp_{found[1]}" if found is not None else None


def number_of(item: str, *, of_input: bool) -> int | None:
    """An item's place among its response's input, or output; None: it is none of that."""
    found = _ITEM.fullmatch(item)
    number = int(found[2], 16) - (_FIRST_INPUT if of_input else 0) if found is not None else -1
    return number if number >= 0 else None
