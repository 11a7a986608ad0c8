"""Variables for the model's chat template (`chat_template_kwargs`), encoded as JSON text.

Gateway and worker both check them, as the worker does not trust the gateway.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from contracts.errors import InvalidRequest

FIELD: Final = "chat_template_kwargs"
#: Limits of the JSON text and of its nesting; the object of variables is level 1.
MAX_BYTES: Final = 16 << 10
MAX_DEPTH: Final = 16
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
#: Reserved names: the server sets them, or Jinja does. Requests have separate fields for messages and tools.
OURS: Final = frozenset(
    """messages tools documents add_generation_prompt continue_final_message chat_template tokenize
    raise_exception strftime_now
    bos_token eos_token unk_token sep_token pad_token cls_token mask_token
    range dict lipsum cycler joiner namespace self loop caller""".split()
)
#: Reserved names that are accepted, and ignored, with the value that the server uses anyway.
_IDLE: Final[Mapping[str, bool]] = {"add_generation_prompt": True, "continue_final_message": False}


def encode_template_kwargs(given: Mapping[str, Any]) -> str | None:
    """`given` as JSON text; None when it changes nothing. Raises InvalidRequest when it is malformed, too large, too
    deep, or uses a reserved name."""
    wanted = {name: value for name, value in given.items() if not (name in _IDLE and value is _IDLE[name])}
    if not wanted:
        return None
    _check(wanted)
    try:
        text = json.dumps(wanted, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{FIELD} holds half of a surrogate pair, which is no character", param=FIELD) from None
    except (ValueError, TypeError):
        raise InvalidRequest(f"{FIELD} holds what JSON cannot spell", param=FIELD) from None
    if size > MAX_BYTES:
        raise InvalidRequest(
            f"{FIELD} takes {size} bytes of JSON, and at most {MAX_BYTES} are taken; shorten it", param=FIELD
        )
    return text


def decode_template_kwargs(text: str | None) -> dict[str, Any]:
    """The inverse of `encode_template_kwargs`; raises the same errors."""
    if text is None:
        return {}
    if not isinstance(text, str) or len(text) > MAX_BYTES:
        raise InvalidRequest(f"{FIELD} must be JSON text of at most {MAX_BYTES} bytes", param=FIELD)
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{FIELD} must be a JSON object", param=FIELD) from None
    if not isinstance(given, dict):
        raise InvalidRequest(f"{FIELD} must be a JSON object", param=FIELD)
    _check(given)
    return given


def _check(given: dict[str, Any]) -> None:
    for name in given:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            wrong = ascii(name)[:80]
            raise InvalidRequest(
                f"{FIELD}: {wrong} is no name of a variable; use letters, digits and underscores", param=FIELD
            )
        if name in OURS:
            where = f"{FIELD}.{name}"
            raise InvalidRequest(f"{where} is set by the server and cannot be overridden; leave it out", param=where)
    level: list[dict[str, Any] | list[Any]] = [given]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"{FIELD} is nested more than {MAX_DEPTH} deep", param=FIELD)
        inner = [value for item in level for value in (item.values() if isinstance(item, dict) else item)]
        level = [value for value in inner if isinstance(value, dict | list)]
