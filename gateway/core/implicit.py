"""Decides which session a request continues when it names none.

The conversation so far is a chain of parts (messages of a chat; blocks of a prompt). Each part's hash covers everything
before it, so one hash names a whole history. After a turn, the hash of the history with the answer is stored with the
session id; the next request resends that history, and the longest stored one names the session.

Alternatives:

- *Only a deterministic id* (tenant, model, opening messages) needs no memory and survives a restart, but merges all
  conversations with the same opening ("Hi"). That is safe, because the cache is keyed by content, but one session's
  manifest and hints then alternate between unrelated conversations.
- *Only memory* separates them, but forgets every conversation when the gateway restarts.

Chosen: the first conversation with an opening gets the deterministic id; others, while the first is stored, get that id
with a random suffix. An unknown history gets the deterministic id of its opening, so after a restart a chat finds its
first id again. At worst two conversations share an id, which costs some prefetching but never correctness. Prompts of
`/v1/completions` have no visible turns, so a continuation is recognised only by memory, at the last full block of
prompt and answer.
"""

from __future__ import annotations

import json
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

#: Bytes of a prompt's text (or token ids, 4 bytes each) per part. A shorter history is not recognised.
BLOCK_BYTES = 64
#: Only a history's last possible turn ends are looked up: a prompt of 16 MiB has 262,144.
LATEST_ENDS = 4096
REMEMBERED = 200_000


@dataclass(frozen=True, slots=True)
class History:
    """A request's conversation as hashes.

    opening: hash that names an unknown conversation. ends: hashes of the histories with which an earlier turn may have
    ended, shortest first, the last `LATEST_ENDS` of them. first: no sign of an earlier turn. last: hash of all complete
    parts, to which the answer is added. tail: bytes after the last complete part (prompts only).
    """

    opening: bytes
    ends: tuple[bytes, ...]
    first: bool
    last: bytes
    tail: bytes = b""


def of_messages(tenant: str, model: str, messages: Sequence[dict[str, str]], scope: str = "") -> History:
    """The history of a chat. A turn may have ended with any assistant message. scope: see `core.scopes`; equal
    conversations in different scopes are different sessions."""
    link = _root("chat", tenant, model, scope)
    opening: bytes | None = None
    ends: list[bytes] = []
    for message in messages:
        if message["role"] == "assistant" and opening is None:
            opening = link
        link = _message(link, message["role"], message["content"])
        if message["role"] == "assistant":
            ends.append(link)
    return History(link if opening is None else opening, tuple(ends[-LATEST_ENDS:]), not ends, link)


def after_answer(history: History, answer: str) -> bytes:
    """The hash of the chat with this answer, which the client will resend."""
    return _message(history.last, "assistant", answer)


def of_prompt(tenant: str, model: str, prompt: str | Sequence[int], scope: str = "") -> History:
    """The history of a completion. A turn may have ended at any full block of the prompt. scope: as in
    `of_messages`."""
    ends, link, tail = _blocks(_root("prompt", tenant, model, scope), _prompt_bytes(prompt))
    return History(blake3(link + tail).digest(), tuple(ends[-LATEST_ENDS:]), True, link, tail)


def after_completion(history: History, answer: str | Sequence[int]) -> bytes | None:
    """The hash up to the last full block of prompt and answer, or None without a full block."""
    ends, link, _ = _blocks(history.last, history.tail + _prompt_bytes(answer))
    return link if ends or history.ends else None


def with_calls(text: str, called: list[list[str]]) -> str:
    """An assistant's text followed by its calls (name, arguments), however their arguments are spelled: clients of
    Anthropic's API send them back as objects."""
    if not called:
        return text
    return text.strip() + json.dumps([[name, _canonical(arguments)] for name, arguments in called])


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


class ImplicitSessions:
    """Stored histories. Invariant: at most `capacity` of each kind; the least recently used are dropped first."""

    def __init__(self, capacity: int = REMEMBERED) -> None:
        self.capacity = capacity
        #: History hash -> session id.
        self._ended: OrderedDict[bytes, str] = OrderedDict()
        #: Ids given to first turns, so that a second conversation with the same opening gets another.
        self._begun: OrderedDict[str, None] = OrderedDict()

    def resolve(self, history: History, suffix: str) -> str:
        """The session id of a request. suffix: random text, used when a new conversation begins like a known one."""
        for end in reversed(history.ends):
            known = self._ended.get(end)
            if known is not None:
                self._ended.move_to_end(end)
                return known
        plain = f"imp-{history.opening.hex()[:32]}"
        if not history.first:
            return plain
        if plain in self._begun:
            return f"{plain}-{suffix}"
        self._begun[plain] = None
        self._trim()
        return plain

    def remember(self, end: bytes | None, session_id: str) -> None:
        """A turn of `session_id` ended with this history."""
        if end is None:
            return
        self._ended[end] = session_id
        self._ended.move_to_end(end)
        self._trim()

    def validate(self) -> None:
        """Raises AssertionError when the invariant is broken."""
        assert len(self._ended) <= self.capacity and len(self._begun) <= self.capacity

    def _trim(self) -> None:
        while len(self._ended) > self.capacity:
            self._ended.popitem(last=False)
        while len(self._begun) > self.capacity:
            self._begun.popitem(last=False)


def _root(kind: str, tenant: str, model: str, scope: str) -> bytes:
    named = ["upbeat implicit session", kind, tenant, model, *([scope] if scope else [])]
    return blake3(json.dumps(named).encode()).digest()


def _message(link: bytes, role: str, text: str) -> bytes:
    # Strip, because clients trim the answers that they keep.
    return blake3(link + json.dumps([role, text.strip()]).encode()).digest()


def _prompt_bytes(prompt: str | Sequence[int]) -> bytes:
    # A prompt for an engine with HTTP of its own may contain half of a surrogate pair.
    return (
        prompt.encode("utf-8", "surrogatepass") if isinstance(prompt, str) else struct.pack(f"<{len(prompt)}I", *prompt)
    )


def _blocks(link: bytes, data: bytes) -> tuple[list[bytes], bytes, bytes]:
    ends = []
    full = len(data) - len(data) % BLOCK_BYTES
    for start in range(0, full, BLOCK_BYTES):
        link = blake3(link + data[start : start + BLOCK_BYTES]).digest()
        ends.append(link)
    return ends, link, data[full:]
