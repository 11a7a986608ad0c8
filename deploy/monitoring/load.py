"""A small load that shows everything: conversations with hints over models that share devices, some of which are
cancelled, refused, or answered in a form."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx

_TOPICS = ("rivers", "bridges", "the tides", "old maps", "kites", "glass", "the moon", "bread")
_FORM = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": {"type": "object", "properties": {"yes": {"type": "boolean"}}}},
}
#: Conversations that a user holds at a time, and the turns of each.
CONVERSATIONS, TURNS = 4, 6


@dataclass
class _Conversation:
    session: str
    model: str
    messages: list[dict[str, str]] = field(default_factory=list)


class Load:
    """`users` conversations at a time on `url`, until `close`. models: their names."""

    def __init__(self, url: str, models: tuple[str, ...], users: int = 5, seed: int = 1) -> None:
        self._url, self._models, self._seed = url, models, seed
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._user, args=(n,), daemon=True) for n in range(users)]
        self.turns = 0
        self.failures: list[str] = []
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """No further turns; returns when those that run have ended."""
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _user(self, number: int) -> None:
        """Holds some conversations, goes on with one of them at a time, and begins another when it is long."""
        rng, begun = random.Random(self._seed * 1000 + number), 0
        open_: list[_Conversation] = []
        with httpx.Client(base_url=self._url, timeout=120) as client:
            while not self._ends.is_set():
                while len(open_) < CONVERSATIONS:
                    begun += 1
                    open_.append(_Conversation(f"user-{number}-{begun}", rng.choice(self._models)))
                one = rng.choice(open_)
                try:
                    self._go_on(client, rng, one)
                except httpx.HTTPError as e:
                    self.failures.append(repr(e))
                    self._ends.wait(0.5)
                if len(one.messages) >= 2 * TURNS:
                    open_.remove(one)

    def _go_on(self, client: httpx.Client, rng: random.Random, one: _Conversation) -> None:
        """The next turn, announced by a hint."""
        if one.messages:
            hint = {"session_id": one.session, "model_id": one.model, "expected_arrival": 1.0}
            client.post("/v1/advisory", json=hint)
            self._ends.wait(rng.uniform(0.3, 1.0))
            if rng.random() < 0.1:  # the user has thought better of it
                client.post("/v1/invalidate", json={"session_id": one.session})
                return
        said = f"{len(one.messages)}: tell me about {rng.choice(_TOPICS)}, and then of {one.session}. "
        one.messages.append({"role": "user", "content": said * 12})
        asked: dict[str, Any] = {"model": one.model, "messages": one.messages, "max_tokens": rng.choice((8, 24, 48))}
        asked |= {"session_id": one.session, "stream": True}
        if rng.random() < 0.1:
            asked["response_format"] = _FORM
        text = self._turn(client, asked)
        one.messages.append({"role": "assistant", "content": text or "-"})
        if rng.random() < 0.05:
            client.post("/v1/chat/completions", json={"model": one.model, "messages": []})  # refused: 400

    def _turn(self, client: httpx.Client, asked: dict[str, Any]) -> str:
        text = ""
        with client.stream("POST", "/v1/chat/completions", json=asked) as answer:
            if answer.status_code != 200:
                self.failures.append(f"{answer.status_code}: {answer.read()[:200]!r}")
                return ""
            for line in answer.iter_lines():
                text += "." if line.startswith("data: {") else ""
        self.turns += 1
        return text[:40]
