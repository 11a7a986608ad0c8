"""Encodes what a helper process is asked, and what it answers: `Asked` and the like for a large body of a request,
`Reading` for a large answer of an engine.

Format: a msgpack header, in which each dataclass is an extension with its fields in order, followed by the large parts:
prompts as msgpack, ready for the worker's frame, and bodies for an engine's HTTP.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import Any

import msgpack

from contracts.context import ContextBound
from contracts.errors import RequestError, from_wire, to_wire
from contracts.models import wire_of
from contracts.request import Sampling, ToolUse
from gateway.asking import Kind, Question
from gateway.core.implicit import History
from gateway.core.kv_hints import HintAction, HintEnvelope
from gateway.core.relay_answers import Reading, Stated
from gateway.core.relay_bodies import Relayed
from gateway.core.spellings import Spelled
from gateway.openai.asked import Asked, Prompt, Told
from gateway.openai.forms import Form
from gateway.openai.token_requests import TokensAsked
from gateway.translating import MessageAsked, NeedsStored, ResponseAsked, Stored

#: The types that decoding may create; the index is the extension's code.
_KINDS: tuple[type[Any], ...] = (
    Asked,
    Prompt,
    Sampling,
    ToolUse,
    Form,
    Spelled,
    HintAction,
    HintEnvelope,
    History,
    ContextBound,
    TokensAsked,
    Relayed,
    Reading,
    Stated,
    Stored,
    NeedsStored,
    ResponseAsked,
    MessageAsked,
)
_CODES = {kind: code for code, kind in enumerate(_KINDS)}
_NAMES = [[f.name for f in fields(kind)] for kind in _KINDS]
#: Fields that are tuples, which msgpack decodes as lists.
_TUPLES = [[i for i, f in enumerate(fields(kind)) if str(f.type).startswith("tuple")] for kind in _KINDS]
#: The extension code of a large part: its offset and length after the header.
_LARGE, _PLACE = 100, struct.Struct("<QQ")
_LENGTH = struct.Struct("<Q")


@dataclass(slots=True)
class _Large:
    data: bytes


def encode_question(kind: Kind, body: bytes, told: Told, stored: Stored | None = None) -> bytes:
    """The question what `body` asks for."""
    wires = {name: int(wire) for name, wire in told.wires.items()}
    said = [kind, told.tenant, told.named, dict(told.headers), dict(told.bounds), told.served, wires, told.per_user]
    return _encoded([*said, stored], [], body)


def encode_reading(reading: Reading, body: bytes) -> bytes:
    """The question what the answer `body` says."""
    return _encoded(reading, [], body)


def decode_question(payload: bytes) -> tuple[Kind, bytes, Told, Stored | None] | tuple[Reading, bytes]:
    """The inverse of `encode_question` and of `encode_reading`."""
    asked, rest = _decoded(payload)
    if isinstance(asked, Reading):
        return asked, bytes(rest)
    kind, tenant, named, headers, bounds, served, numbers, per_user, stored = asked
    wires = {name: wire_of(number) for name, number in numbers.items()}
    return kind, bytes(rest), Told(tenant, named, headers, bounds, served, wires, per_user), stored


def encode_answer(answer: Question | Reading | RequestError) -> bytes:
    """The helper's answer. Mutates an `Asked`, whose prompts it packs, and a `Relayed`, also within another."""
    if isinstance(answer, RequestError):
        return _encoded(to_wire(answer), [], b"")
    _separate(answer.asked if isinstance(answer, ResponseAsked | MessageAsked) else answer)
    return _encoded(answer, [], b"")


def _separate(asked: Any) -> None:
    """Make large parts of their own of what is large in a request."""
    if isinstance(asked, Relayed):
        asked.body = _Large(asked.body)  # type: ignore[assignment]
    elif isinstance(asked, Asked):
        for prompt in asked.prompts:
            for name in ("messages", "prompt", "prompt_tokens"):
                if (value := getattr(prompt, name)) is not None:
                    setattr(prompt, name, None)
                    prompt.packed[name] = _Large(msgpack.packb(value, use_bin_type=True))  # type: ignore[assignment]


def decode_answer(payload: bytes) -> Any:
    """The inverse of `encode_answer`. Raises an encoded RequestError."""
    answer, _ = _decoded(payload)
    if isinstance(answer, list):
        status, message, param, code = answer
        raise from_wire(status, message, param, code)
    return answer


def _encoded(value: Any, large: list[bytes], rest: bytes) -> bytes:
    size = 0

    def extension(value: Any) -> msgpack.ExtType:
        nonlocal size
        if isinstance(value, _Large):
            place = _PLACE.pack(size, len(value.data))
            size += len(value.data)
            large.append(value.data)
            return msgpack.ExtType(_LARGE, place)
        if isinstance(value, int):
            raise OverflowError("an integer of more than 64 bits")
        code = _CODES[type(value)]
        return msgpack.ExtType(code, pack([getattr(value, name) for name in _NAMES[code]]))

    def pack(value: Any) -> bytes:
        # Any text may contain half of a surrogate pair.
        packed: bytes = msgpack.packb(value, use_bin_type=True, default=extension, unicode_errors="surrogatepass")
        return packed

    header = pack(value)
    return b"".join((_LENGTH.pack(len(header)), header, *large, rest))


def _decoded(payload: bytes) -> tuple[Any, memoryview]:
    """The value, and the bytes after its header."""
    view = memoryview(payload)
    begin = _LENGTH.size + _LENGTH.unpack_from(view)[0]
    rest = view[begin:]

    def made(code: int, data: bytes) -> Any:
        if code == _LARGE:
            at, length = _PLACE.unpack(data)
            return bytes(rest[at : at + length])
        values = unpack(data)
        for i in _TUPLES[code]:
            values[i] = tuple(values[i])
        return _KINDS[code](*values)

    def unpack(data: Any) -> Any:
        return msgpack.unpackb(data, raw=False, strict_map_key=False, ext_hook=made, unicode_errors="surrogatepass")

    return unpack(view[_LENGTH.size : begin]), rest
