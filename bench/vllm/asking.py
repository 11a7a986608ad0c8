"""Asks a server for one streamed completion of a prompt of token ids, and measures it at the client.

Token ids make prompts equally long in every arm, and their seen part a whole number of blocks in each.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

#: Ids that are neither special tokens nor beyond the tokenizer's vocabulary.
_FIRST_ID, _LAST_ID = 3, 2048
ANSWER_TOKENS = 8
NEW_TOKENS = 50
#: No two prompts end alike, and no two sessions that evict are equal.
_NEW = random.Random(20_251_125)
_EVICTIONS = itertools.count(1)


class WrongAnswer(RuntimeError):
    """An answer that does not count as a measurement. The message says of which server and why."""


@dataclass(frozen=True)
class Turn:
    """One answer. ttft_s: from sending to the first text. cached: prompt tokens that were not computed, as vLLM reports
    them."""

    ttft_s: float
    prompt: int
    cached: int
    node: str | None


class Talk:
    """A session of random tokens that returns with other new ones each time."""

    def __init__(self, name: str, seed: int, tokens: int) -> None:
        self.name = name
        self.history = _tokens(random.Random(seed), tokens)

    def again(self) -> list[int]:
        """The history and new tokens."""
        return self.history + _tokens(_NEW, NEW_TOKENS)


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(_FIRST_ID, _LAST_ID) for _ in range(count)]


class Server:
    """A server to ask. node: the node that must answer; None: there is only one. longest: tokens of its longest
    request, which fill its own cache."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        model: str,
        body: Mapping[str, Any],
        longest: int,
        node: str | None = None,
    ) -> None:
        self.url, self.model, self.node = url, model, node
        self._http, self._body, self._longest = http, dict(body), longest

    async def ask(self, session: str, prompt: Sequence[int]) -> Turn:
        """One answer. Raises WrongAnswer."""
        headers = {"X-Session-Id": session} | ({"X-Upbeat-Node": self.node} if self.node else {})
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._body,
        }
        where = f"{self.url} {self.node or ''} {session}"
        usage: dict[str, Any] = {}
        first_s, ended = 0.0, False
        began_s = time.perf_counter()
        async with self._http.post(f"{self.url}/v1/completions", json=body, headers=headers) as answer:
            if answer.status != 200:
                raise WrongAnswer(f"{where}: HTTP {answer.status}: {(await answer.text())[:300]}")
            node = answer.headers.get("X-Upbeat-Node")
            async for raw in answer.content:
                line = raw.strip()
                if not line.startswith(b"data:"):
                    continue
                if line[5:].strip() == b"[DONE]":
                    ended = True
                    break
                event = json.loads(line[5:])
                if "error" in event:
                    raise WrongAnswer(f"{where}: {event['error']}")
                if not first_s and any(choice.get("text") for choice in event.get("choices", ())):
                    first_s = time.perf_counter()
                usage = event.get("usage") or usage
        if not ended or not first_s or usage.get("completion_tokens") != ANSWER_TOKENS:
            raise WrongAnswer(f"{where}: an answer without its end, or not of {ANSWER_TOKENS} tokens: {usage}")
        if self.node is not None and node not in (None, self.node):
            raise WrongAnswer(f"{where}: {node} answered")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Turn(first_s - began_s, int(usage["prompt_tokens"]), int(cached), node)

    async def evict(self) -> None:
        """Make the server's own cache forget everything else: another session fills it."""
        await self.ask(f"other-{next(_EVICTIONS)}", _tokens(_NEW, self._longest - ANSWER_TOKENS))

    async def post(self, url: str) -> None:
        """A call without a body. Raises WrongAnswer."""
        async with self._http.post(url) as answer:
            if answer.status != 200:
                raise WrongAnswer(f"{url}: HTTP {answer.status}")
