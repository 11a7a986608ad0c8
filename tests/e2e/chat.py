"""A conversation with a stack, through the unmodified openai client: greedy, with the history resent at each turn."""

from __future__ import annotations

import random
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai

sys.path.insert(0, str(Path(__file__).parents[2] / "models" / "demo"))
from conversations import facts

#: Settings with which a worker loads whatever is cached. By default it computes a few tokens of a small model again
#: where that is sooner.
ALWAYS_LOAD = {"kv": {"load_plan": False}}


@dataclass
class Answer:
    """One turn's result."""

    text: str
    node: str
    session: str
    cached_tokens: int
    prompt_tokens: int


@dataclass
class Chat:
    """One session. `session_id` None: the server recognises it by its history. model: empty for the first that the
    server names."""

    url: str
    session_id: str | None = None
    api_key: str = "none"
    messages: list[dict[str, str]] = field(default_factory=list)
    max_tokens: int = 48
    model: str = ""

    def say(self, text: str, node: str | None = None, timeout_s: float = 60.0, salt: str = "") -> Answer:
        """One streamed turn; the answer joins the history. salt: requests with another one share no cache with it."""
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.api_key, max_retries=0, timeout=timeout_s)
        headers = ({"X-Session-Id": self.session_id} if self.session_id else {}) | (
            {"X-Upbeat-Node": node} if node else {}
        )
        self.messages.append({"role": "user", "content": text})
        model = self.model or client.models.list().data[0].id
        with client.chat.completions.with_streaming_response.create(
            model=model,
            messages=self.messages,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=self.max_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers=headers,
            extra_body={"cache_salt": salt} if salt else None,
        ) as response:
            parts, usage = [], None
            for chunk in response.parse():
                parts += [c.delta.content or "" for c in chunk.choices]
                usage = chunk.usage or usage
            answered_by, session = response.headers["x-upbeat-node"], response.headers["x-session-id"]
        assert usage is not None and usage.prompt_tokens_details is not None
        self.messages.append({"role": "assistant", "content": "".join(parts)})
        return Answer(
            "".join(parts), answered_by, session, usage.prompt_tokens_details.cached_tokens or 0, usage.prompt_tokens
        )

    def advise(self, node: str | None = None, **more: str) -> None:
        """Say that this session is about to speak. more: further fields of the hint."""
        headers = {"X-Upbeat-Node": node} if node else {}
        reply = httpx.post(
            f"{self.url}/v1/advisory", json={"session_id": self.session_id, **more}, headers=headers, timeout=10
        )
        assert reply.status_code == 202, reply.text


def script(seed: int, turns: int = 10) -> list[str]:
    """What the user says: facts told early, then asked for, every turn long enough to fill chunks."""
    rng = random.Random(seed)
    told = facts(rng, turns + 4)
    filler = (
        "Please keep all of this in mind while we talk, because I will come back to it later and ask about "
        "every part of it. "
    )
    opening = " ".join(f.told for f in told)
    return [f"{opening} {filler} {told[0].asked}"] + [f"{filler * 2}{told[i].asked}" for i in range(1, turns)]


def uncached(url: str, lines: Sequence[str], node: str | None = None) -> list[str]:
    """The answers of a conversation of which everything is computed at each turn: no turn shares cache with another
    request, or with the turn before."""
    chat = Chat(url)
    answers = [chat.say(line, node, salt=uuid.uuid4().hex) for line in lines]
    assert not any(answer.cached_tokens for answer in answers)
    return [answer.text for answer in answers]
