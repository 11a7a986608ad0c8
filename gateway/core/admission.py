"""Decides who may call, and which bodies are read.

Decides the caller of a credential, the priority a caller may use, and whether a body is too large or invalid JSON. Not
here: how much a caller may use (`core.usage`), what the fields of a body mean (`gateway.openai`).
"""

from __future__ import annotations

import hmac
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from blake3 import blake3
from pydantic_core import from_json

from contracts.api_keys import configured_digest, digest
from contracts.errors import BodyTooLarge, InvalidRequest, Unauthorized
from contracts.ids import DEFAULT_TENANT

#: Longer credentials are cut before they are hashed.
MAX_CREDENTIAL_CHARS = 1024
#: Larger bodies are decoded by pydantic's parser, which takes a tenth of the time for long texts. It turns numbers that
#: are too large into infinity, which the range checks of the fields refuse.
LARGE_BYTES = 16 << 10
#: How deep arrays and objects of a body may be nested. Tools' JSON schemas are far less deep.
MAX_DEPTH = 256


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller. max_priority: the most urgent (lowest) priority it gets. server: it may use the routes and headers of a
    server key."""

    tenant: str
    max_priority: int = 0
    server: bool = True

    def priority(self, wanted: int) -> int:
        """`wanted`, but not more urgent than `max_priority`."""
        return max(wanted, self.max_priority)


#: Every caller of a server without keys, which listens on loopback only.
OPEN_CALLER = Caller(DEFAULT_TENANT, max_priority=-1000)


class Keys:
    """The configured API keys, held as digests. Immutable.

    A lookup uses a keyed hash of the digest with a key that only this process knows, so its time reveals nothing about
    how close a credential is to a key.
    """

    def __init__(self, keys: Iterable[tuple[str, Caller]], blind: bytes = bytes(32)) -> None:
        """keys: as configured, in full or hashed. blind: the lookup's hash key, 32 random bytes."""
        self._blind = blind
        self._callers = {
            self._name(digest): (digest, caller) for digest, caller in ((configured_digest(k), c) for k, c in keys)
        }

    @property
    def open(self) -> bool:
        """Whether no keys are configured, so that every caller is `OPEN_CALLER`."""
        return not self._callers

    def caller(self, credential: str | None) -> Caller:
        """The caller with this key. Raises Unauthorized."""
        if self.open:
            return OPEN_CALLER
        if not credential:
            raise Unauthorized("no API key given: send it as `Authorization: Bearer KEY`", code="missing_api_key")
        presented = digest(credential[:MAX_CREDENTIAL_CHARS])
        known = self._callers.get(self._name(presented))
        if known is None or not hmac.compare_digest(known[0], presented):
            raise Unauthorized("incorrect API key provided")
        return known[1]

    def _name(self, digest: bytes) -> bytes:
        return blake3(digest, key=self._blind).digest()


def bearer(header: str | None) -> str | None:
    """The credential in an Authorization header, or None."""
    if not header:
        return None
    scheme, _, credential = header.partition(" ")
    return credential.strip() or None if scheme.lower() == "bearer" else None


def check_length(length_bytes: int | None, limit_bytes: int) -> None:
    """Raises BodyTooLarge when a body of `length_bytes` (None: unknown) is over the limit."""
    if length_bytes is not None and length_bytes > limit_bytes:
        raise BodyTooLarge(f"the body is larger than this server's limit of {limit_bytes} bytes")


def parse_json(body: bytes) -> Any:
    """The decoded body. Raises InvalidRequest for anything but plain JSON."""
    if len(body) > LARGE_BYTES:
        try:
            return from_json(body, allow_inf_nan=False)
        except ValueError:
            pass  # the slower parser below reports the error, or accepts what this one does not
    if not body.strip():
        raise InvalidRequest("the body is empty; send a JSON object", code="invalid_json")
    try:
        value = _decode(body.decode("utf-8"))
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None
    except UnicodeDecodeError as e:
        raise InvalidRequest(f"the body is not UTF-8 at byte {e.start}", code="invalid_json") from None
    except json.JSONDecodeError as e:
        raise InvalidRequest(
            f"the body is not JSON: {e.msg} at line {e.lineno} column {e.colno}", code="invalid_json"
        ) from None
    except ValueError:
        raise InvalidRequest(
            "the body holds a number that is not finite or has too many digits", code="invalid_json"
        ) from None
    # The number of opening brackets bounds the depth.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _deeper(value, MAX_DEPTH):
        raise InvalidRequest(f"the body is nested more than {MAX_DEPTH} deep", code="invalid_json")
    return value


def _deeper(value: Any, levels: int) -> bool:
    """Whether `value` is nested more than `levels` deep. Iterative, so that no depth exhausts the stack."""
    level = [value] if isinstance(value, list | dict) else []
    while level and levels:
        levels -= 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, list | dict)
        ]
    return bool(level)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


_decode = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite).decode
