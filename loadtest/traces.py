"""Reads published traces of LLM services into one shape: requests with arrival times, lengths and prompt blocks.

Decides how each format's fields map onto a `TraceRequest`. Which requests form a conversation is decided in
`loadtest.sessions`; what the prompts say in `loadtest.prompts`.

Formats, told apart by their content: Mooncake JSONL (FAST '25) and its aiperf superset, Bailian JSONL, Azure LLM inference
CSV, BurstGPT CSV, ShareGPT JSON. Formats without prompt blocks get blocks of their own, equal for equal prefixes only where
the trace says which requests belong together.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from loadtest.typist import READ_WORDS_PER_S, TYPE_WORDS_PER_S

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16
#: Tokens of an English word, roughly; for ShareGPT, which has text and no counts.
TOKENS_PER_WORD = 1.3
#: Block ids that a reader invents start here, so that they never meet a trace's own.
_INVENTED = 1 << 40


class TraceError(ValueError):
    """The file is no trace that can be read. The message names file, line and what is wrong."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    arrival_s: seconds since the trace's first request.
    input_tokens, output_tokens: lengths of the prompt (history included) and of the answer.
    block_ids: the prompt's blocks of `block_tokens` tokens in order, the last one possibly partial; equal prefixes are equal.
    conversation: the trace's own name for the conversation; None when it has none and prefixes have to tell.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    conversation: str | None = None


def read_trace(path: Path) -> list[TraceRequest]:
    """All requests of the trace at `path`, by arrival. Raises TraceError naming the line, OSError when it cannot be read."""
    with path.open(encoding="utf-8") as f:
        start = f.read(4096).lstrip()
    reader = _reader(path, start)
    requests = sorted(reader(path), key=lambda r: r.arrival_s)
    if not requests:
        raise TraceError(f"{path} holds no requests")
    first = requests[0].arrival_s
    return [_shifted(r, first) for r in requests]


def _shifted(r: TraceRequest, first_s: float) -> TraceRequest:
    return TraceRequest(r.arrival_s - first_s, r.input_tokens, r.output_tokens, r.block_ids, r.block_tokens, r.conversation)


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
    last_of: dict[str, float] = {}
    for number, data in _json_lines(path):
        where = f"{path}:{number}"
        conversation = data.get("session_id")
        if "timestamp" in data:
            arrival_s = _number(data, "timestamp", where) / 1000
        elif conversation is not None and "delay" in data:
            arrival_s = last_of.get(str(conversation), 0.0) + _number(data, "delay", where) / 1000
        else:
            raise TraceError(f"{where}: neither timestamp nor session_id and delay")
        if conversation is not None:
            last_of[str(conversation)] = arrival_s
        yield TraceRequest(
            arrival_s=arrival_s,
            input_tokens=_count(data, "input_length", where),
            output_tokens=_count(data, "output_length", where),
            block_ids=_blocks(data, where),
            conversation=None if conversation is None else str(conversation),
        )


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
            # Seven digits of fraction; Python reads six.
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
        yield TraceRequest(_number(row, "Timestamp", where), asked, answered, blocks.grow(session, asked), conversation=session)


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
            said = [(str(m["from"]), _tokens(m["value"])) for m in item["conversations"]]
        except (KeyError, TypeError, AttributeError) as e:
            raise TraceError(f"{path}: conversation {name} must hold a list of from and value ({e!r})") from e
        for (who, asked), (answerer, answered) in pairwise(said):
            if who != "human" or answerer != "gpt":
                continue
            history += asked
            at += asked / TOKENS_PER_WORD / TYPE_WORDS_PER_S
            yield TraceRequest(at, history, answered, blocks.grow(name, history), conversation=name)
            at += answered / TOKENS_PER_WORD / READ_WORDS_PER_S
            history += answered


class _Inventor:
    """Block ids for formats that have none: a conversation's blocks grow, and are shared with nobody."""

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
