"""Sends a planned load to an OpenAI endpoint and measures every request.

Open loop: sessions start by the plan, however slow the answers are. Within a session a turn waits for the answer before it and
for its own typing (`loadtest.typist.when_to_speak`). A turn's messages are the previous turn's messages, the answer as it was
received, and the new text, so that each prompt literally extends the one before. A session whose request fails ends there.

Works with any server of the OpenAI API; hints (`POST /v1/advisory`) are sent only where asked for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from loadtest.typist import when_to_speak
from loadtest.workload import PlannedSession, PlannedTurn
from runtime.clock import Clock

_MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Whom to ask. `body` is merged into every request; `hints` tells whether it takes advisories."""

    base_url: str
    model: str
    api_key: str | None = None
    hints: bool = False
    body: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 900.0

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every call."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(slots=True)
class Hint:
    """An advisory that was sent. Times on the load's clock, in seconds; `status` is 0 when nobody answered."""

    sent_s: float
    answered_s: float = 0.0
    status: int = 0


@dataclass(slots=True)
class Outcome:
    """One request as it was seen from outside. Times on the load's clock, in seconds.

    first_s: the first text arrived. end_s: the stream ended. cached_tokens: what the server says it did not compute; None when
    it says nothing. error: what went wrong, None when nothing did.
    """

    session_id: str
    turn: int
    planned_s: float
    sent_s: float = 0.0
    first_s: float = 0.0
    end_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    node: str | None = None
    hint: Hint | None = None
    error: str | None = None
    text: str = ""

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first text."""
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds between output tokens; None for answers of one token."""
        return (self.end_s - self.first_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def end_to_end_s(self) -> float:
        """Seconds from sending to the end of the answer."""
        return self.end_s - self.sent_s


async def run_load(
    endpoint: Endpoint, sessions: Sequence[PlannedSession], clock: Clock, on_done: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Send everything in `sessions`; returns the outcomes by sending time. `on_done` sees each as it ends."""
    outcomes: list[Outcome] = []
    start_s = clock.now()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=endpoint.headers, read_bufsize=_MAX_LINE_BYTES) as http:

        def done(outcome: Outcome) -> None:
            outcomes.append(outcome)
            on_done(outcome)

        async with asyncio.TaskGroup() as group:
            for session in sessions:
                group.create_task(_Talk(http, endpoint, session, clock, start_s).run(done))
    return sorted(outcomes, key=lambda o: o.sent_s)


class _Talk:
    """One session being held."""

    def __init__(self, http: aiohttp.ClientSession, endpoint: Endpoint, session: PlannedSession, clock: Clock, start_s: float) -> None:
        self._http, self._endpoint, self._session, self._clock, self._start_s = http, endpoint, session, clock, start_s

    async def run(self, done: Callable[[Outcome], None]) -> None:
        messages: list[dict[str, str]] = []
        previous_end_s: float | None = None
        for number, turn in enumerate(self._session.turns):
            outcome = Outcome(self._session.session_id, number, turn.arrival_s)
            moment = when_to_speak(turn.arrival_s, turn.typing_s, previous_end_s)
            hinting: asyncio.Task[Hint] | None = None
            if self._endpoint.hints:
                await self._until(moment.typing_starts_s)
                hinting = asyncio.create_task(self._send_hint(turn))
            await self._until(moment.request_s)
            messages = [*messages, {"role": "user", "content": turn.text}]
            outcome.sent_s = self._now()
            try:
                await ask(self._http, self._endpoint, messages, turn.answer_tokens, self._session.session_id, outcome, self._now)
            finally:
                if hinting is not None:
                    outcome.hint = await hinting
            done(outcome)
            if outcome.error is not None:
                return
            messages.append({"role": "assistant", "content": outcome.text})
            previous_end_s = outcome.end_s

    def _now(self) -> float:
        return self._clock.now() - self._start_s

    async def _until(self, at_s: float) -> None:
        wait_s = at_s - self._now()
        if wait_s > 0:
            await self._clock.sleep(wait_s)

    async def _send_hint(self, turn: PlannedTurn) -> Hint:
        hint = Hint(sent_s=self._now())
        hint.status = await advise(self._http, self._endpoint, self._session.session_id, turn.typing_s)
        hint.answered_s = self._now()
        return hint


async def advise(
    http: aiohttp.ClientSession, endpoint: Endpoint, session_id: str, expected_arrival_s: float | None, pin_node: str | None = None
) -> int:
    """Send one advisory. Returns its HTTP status, 0 when nobody answered."""
    body = {"session_id": session_id, "model_id": endpoint.model, "expected_arrival": expected_arrival_s}
    headers = {"X-Upbeat-Node": pin_node} if pin_node else {}
    try:
        async with http.post(f"{endpoint.base_url}/v1/advisory", json=body, headers=headers) as response:
            await response.read()
            return response.status
    except (aiohttp.ClientError, TimeoutError):
        return 0


async def ask(
    http: aiohttp.ClientSession,
    endpoint: Endpoint,
    messages: Sequence[dict[str, str]],
    answer_tokens: int,
    session_id: str,
    outcome: Outcome,
    now: Callable[[], float],
    pin_node: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> None:
    """One streaming chat completion; `headers` go beside the session's. Fills `outcome` (all but `sent_s`, `hint`); never raises for
    what the server does."""
    body = {
        "model": endpoint.model,
        "messages": list(messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": answer_tokens,
        "temperature": 0,
        **endpoint.body,
    }
    sent = {"X-Session-Id": session_id} | ({"X-Upbeat-Node": pin_node} if pin_node else {}) | dict(headers or {})
    timeout = aiohttp.ClientTimeout(total=endpoint.timeout_s)
    try:
        async with http.post(f"{endpoint.base_url}/v1/chat/completions", json=body, headers=sent, timeout=timeout) as response:
            outcome.node = response.headers.get("X-Upbeat-Node")
            if response.status != 200:
                outcome.error = f"HTTP {response.status}: {(await response.text())[:300]}"
            else:
                await _read_stream(response, outcome, now)
    except (aiohttp.ClientError, TimeoutError, ValueError) as e:
        outcome.error = f"{type(e).__name__}: {e}"
    outcome.end_s = now()
    outcome.first_s = outcome.first_s or outcome.end_s


async def _read_stream(response: aiohttp.ClientResponse, outcome: Outcome, now: Callable[[], float]) -> None:
    texts: list[str] = []
    finished = False
    async for raw in response.content:
        line = raw.strip()
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            finished = True
            break
        chunk = json.loads(data)
        if "error" in chunk:
            outcome.error = str(chunk["error"].get("message", chunk["error"]))[:300]
            return
        for choice in chunk.get("choices", []):
            text = choice.get("delta", {}).get("content")
            if text:
                outcome.first_s = outcome.first_s or now()
                texts.append(text)
        if chunk.get("usage"):
            _take_usage(chunk["usage"], outcome)
    outcome.text = "".join(texts)
    outcome.output_tokens = outcome.output_tokens or len(texts)
    if not finished:
        outcome.error = "the stream ended before [DONE]"


def _take_usage(usage: dict[str, Any], outcome: Outcome) -> None:
    outcome.prompt_tokens = int(usage.get("prompt_tokens", 0))
    outcome.output_tokens = int(usage.get("completion_tokens", 0))
    details = usage.get("prompt_tokens_details") or {}
    if details.get("cached_tokens") is not None:
        outcome.cached_tokens = int(details["cached_tokens"])
