"""Reads published traces of LLM services into `TraceRequest`s: arrival times, lengths and prompt blocks.

`loadtest.sessions` groups them into conversations; `loadtest.prompts` makes their texts.

Formats, recognised by content: Mooncake JSONL (FAST '25) and its aiperf superset, Bailian JSONL, Azure LLM inference
CSV, BurstGPT CSV, ShareGPT JSON. Formats without prompt blocks get invented ones, shared only by requests of a
conversation that the trace names. Texts in a trace are kept.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from loadtest.typist import READ_WORDS_PER_S, TYPE_WORDS_PER_S
from loadtest.typist import TOKENS_PER_WORD as TOKENS_PER_WORD

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16
#: First invented block id, above the ids of traces.
_INVENTED = 1 << 40


class Message(NamedTuple):
    """A message of a trace that has texts."""

    role: str
    content: str


class TraceError(ValueError):
    """The file is not a readable trace. The message names file, line and error."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    arrival_s: seconds since the trace's first request. input_tokens, output_tokens: lengths of the prompt (history
    included) and of the answer. block_ids: the prompt's blocks of `block_tokens` tokens, the last one possibly partial;
    equal prefixes have equal ids. conversation: its name in the trace; None: unnamed. messages: added by this turn, if
    the trace has texts. model: its name in the trace, or empty. extra: (name, value) for the request's body.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    conversation: str | None = None
    messages: tuple[Message, ...] = ()
    model: str = ""
    extra: tuple[tuple[str, Any], ...] = ()


def read_trace(path: Path) -> list[TraceRequest]:
    """All requests of the trace at `path`, by arrival. Raises TraceError naming the line, and OSError."""
    with path.open(encoding="utf-8") as f:
        start = f.read(4096).lstrip()
    reader = _reader(path, start)
    requests = sorted(reader(path), key=lambda r: r.arrival_s)
    if not requests:
        raise TraceError(f"{path} holds no requests")
    first = requests[0].arrival_s
    return [replace(r, arrival_s=r.arrival_s - first) for r in requests]


def _reader(path: Path, start: str) -> Callable[[Path], Iterator[TraceRequest]]:
    line = start.split("\n", 1)[0]
    if start.startswith("["):
        return _read_sharegpt
    if start.startswith("{"):
        return _read_bailian if '"parent_chat_id"' in line else _read_mooncake
    if line.startswith("TIMESTAMP,ContextTokens"):
        return _read_azure
    if line.startswith("Timestamp,") and "Request tokens" in line:
        return _read_burstgpt
    raise TraceError(f"{path}: starts like none of Mooncake, Bailian, Azure, BurstGPT and ShareGPT: {line[:80]!r}")


def _read_mooncake(path: Path) -> Iterator[TraceRequest]:
    """Mooncake, and aiperf's superset: `session_id`, `delay` (ms after the turn before), `text_input` or `messages`,
    `extra`; `hash_ids` and lengths are then optional. A later turn of a named session that does not extend the one
    before holds only what is new."""
    blocks, before, texts = _Inventor(), dict[str, TraceRequest](), dict[str, tuple[Message, ...]]()
    for number, data in _json_lines(path):
        where = f"{path}:{number}"
        name = None if data.get("session_id") is None else str(data["session_id"])
        last = before.get(name) if name is not None else None
        if "timestamp" in data:
            arrival_s = _number(data, "timestamp", where) / 1000
        elif name is not None:
            arrival_s = (last.arrival_s if last else 0.0) + (
                _number(data, "delay", where) / 1000 if "delay" in data else 0.0
            )
        else:
            raise TraceError(f"{where}: neither timestamp nor session_id and delay")
        said = _said(data, where)
        tokens = (
            _count(data, "input_length", where)
            if "input_length" in data or not said
            else sum(_tokens(m.content) for m in said)
        )
        earlier = texts.get(name, ()) if name is not None else ()
        goes_on = bool(earlier) and said[: len(earlier)] == earlier
        if name is not None:
            texts[name] = said
        has_blocks = "hash_ids" in data or not (said or name is not None)
        ids = _blocks(data, where) if has_blocks else ()
        if name is not None and not (ids and (last is None or _extends(ids, last))):
            tokens += last.input_tokens + last.output_tokens if last and not goes_on else 0
            ids = blocks.grow(name, tokens)
        found = TraceRequest(
            arrival_s=arrival_s,
            input_tokens=tokens,
            output_tokens=_count(data, "output_length", where),
            block_ids=ids or blocks.new(tokens),
            conversation=name,
            # The measured server's answers replace the trace's.
            messages=tuple(m for m in said[len(earlier) :] if m.role != "assistant") if goes_on else said,
            extra=_extra(data, where),
        )
        if name is not None:
            before[name] = found
        yield found


def _extends(ids: tuple[int, ...], last: TraceRequest) -> bool:
    full = min(last.input_tokens // last.block_tokens, len(last.block_ids))
    return full > 0 and ids[:full] == last.block_ids[:full]


def _said(data: dict[str, Any], where: str) -> tuple[Message, ...]:
    if "text_input" in data:
        if not isinstance(data["text_input"], str):
            raise TraceError(f"{where}: text_input must be a text")
        return (Message("user", data["text_input"]),)
    found = []
    for item in data.get("messages") or ():
        content = item.get("content") if isinstance(item, dict) else None
        if isinstance(content, list):  # OpenAI's content parts; only text is used
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        if not isinstance(content, str) or not isinstance(item.get("role"), str):
            raise TraceError(f"{where}: messages must hold objects with role and content")
        found.append(Message(item["role"], content))
    return tuple(found)


def _extra(data: dict[str, Any], where: str) -> tuple[tuple[str, Any], ...]:
    extra = data.get("extra") or {}
    if not isinstance(extra, dict):
        raise TraceError(f"{where}: extra must be an object of fields of the request's body")
    return tuple(sorted(extra.items()))


def _read_bailian(path: Path) -> Iterator[TraceRequest]:
    root_of: dict[Any, str] = {}
    for number, data in _json_lines(path):
        where = f"{path}:{number}"
        chat, parent = data.get("chat_id"), data.get("parent_chat_id")
        root_of[chat] = root_of.get(parent, str(chat))
        yield TraceRequest(
            arrival_s=_number(data, "timestamp", where),
            input_tokens=_count(data, "input_length", where),
            output_tokens=_count(data, "output_length", where),
            block_ids=_blocks(data, where),
            block_tokens=BAILIAN_BLOCK_TOKENS,
            conversation=root_of[chat],
        )


def _read_azure(path: Path) -> Iterator[TraceRequest]:
    blocks = _Inventor()
    for number, row in _csv_rows(path):
        where = f"{path}:{number}"
        try:
            # Azure writes seven decimals; Python reads six.
            at = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26]).timestamp()
        except ValueError as e:
            raise TraceError(f"{where}: TIMESTAMP {row['TIMESTAMP']!r} is no time") from e
        tokens = _count(row, "ContextTokens", where)
        yield TraceRequest(at, tokens, _count(row, "GeneratedTokens", where), blocks.new(tokens))


def _read_burstgpt(path: Path) -> Iterator[TraceRequest]:
    blocks = _Inventor()
    for number, row in _csv_rows(path):
        where = f"{path}:{number}"
        asked, answered = _count(row, "Request tokens", where), _count(row, "Response tokens", where)
        if answered == 0:  # BurstGPT's mark of a failed call
            continue
        session = (row.get("Session ID") or "").strip() or None
        at, model = _number(row, "Timestamp", where), (row.get("Model") or "").strip()
        yield TraceRequest(at, asked, answered, blocks.grow(session, asked), conversation=session, model=model)


def _read_sharegpt(path: Path) -> Iterator[TraceRequest]:
    try:
        conversations = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as e:
        raise TraceError(f"{path}: {e}") from e
    blocks = _Inventor()
    for index, item in enumerate(conversations):
        name = str(item.get("id", index)) if isinstance(item, dict) else str(index)
        # ShareGPT has no times: conversations start one a second, turns follow after reading and typing.
        at, history = float(index), 0
        try:
            said = [(str(m["from"]), str(m["value"])) for m in item["conversations"]]
        except (KeyError, TypeError, AttributeError) as e:
            raise TraceError(f"{path}: conversation {name} must hold a list of from and value ({e!r})") from e
        for (who, prompt), (answerer, answer) in pairwise(said):
            if who != "human" or answerer != "gpt":
                continue
            asked, answered = _tokens(prompt), _tokens(answer)
            history += asked
            at += asked / TOKENS_PER_WORD / TYPE_WORDS_PER_S
            said_now = (Message("user", prompt),)
            yield TraceRequest(at, history, answered, blocks.grow(name, history), conversation=name, messages=said_now)
            at += answered / TOKENS_PER_WORD / READ_WORDS_PER_S
            history += answered


class _Inventor:
    """Invents block ids: a conversation's blocks grow, and no other conversation shares them."""

    def __init__(self) -> None:
        self._next = _INVENTED
        self._of: dict[str, tuple[int, ...]] = {}

    def new(self, tokens: int) -> tuple[int, ...]:
        count = max(1, -(-tokens // MOONCAKE_BLOCK_TOKENS))
        first, self._next = self._next, self._next + count
        return tuple(range(first, first + count))

    def grow(self, conversation: str | None, tokens: int) -> tuple[int, ...]:
        if conversation is None:
            return self.new(tokens)
        held = self._of.get(conversation, ())
        missing = tokens - len(held) * MOONCAKE_BLOCK_TOKENS
        self._of[conversation] = held + self.new(missing) if missing > 0 or not held else held
        return self._of[conversation]


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                data = json.loads(line)
            except json.JSONDecodeError as e:
                raise TraceError(f"{path}:{number}: {e}") from e
            if not isinstance(data, dict):
                raise TraceError(f"{path}:{number}: a line must hold an object")
            yield number, data


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    with path.open(encoding="utf-8", newline="") as f:
        yield from enumerate(csv.DictReader(f), 2)


def _number(data: dict[str, Any], name: str, where: str) -> float:
    try:
        return float(data[name])
    except (KeyError, TypeError, ValueError) as e:
        raise TraceError(f"{where}: {name} must be a number, got {data.get(name)!r}") from e


def _count(data: dict[str, Any], name: str, where: str) -> int:
    value = _number(data, name, where)
    if value < 0 or value != int(value):
        raise TraceError(f"{where}: {name} must be a whole number of tokens, got {value}")
    return int(value)


def _blocks(data: dict[str, Any], where: str) -> tuple[int, ...]:
    ids = data.get("hash_ids")
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise TraceError(f"{where}: hash_ids must be a list of block numbers")
    return tuple(ids)


def _tokens(text: str) -> int:
    return max(1, round(len(text.split()) * TOKENS_PER_WORD))
