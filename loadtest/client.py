"""Sends one request, or one hint, to any server of the OpenAI API, and measures it at the client.

`loadtest.users` decides when, and how many at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from loadtest.plans import PlannedSession


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server to call. body: merged into every request. hints, priorities, workflows: whether it accepts advisories,
    the field `priority`, and agents' headers. models, api_keys: by the plan's models and tenants; default: `model` and
    `api_key`."""

    base_url: str
    model: str
    api_key: str | None = None
    hints: bool = False
    body: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 900.0
    priorities: bool = False
    workflows: bool = False
    models: dict[str, str] = field(default_factory=dict)
    api_keys: dict[str, str] = field(default_factory=dict)

    def of(self, session: PlannedSession) -> Endpoint:
        """The endpoint with this session's model and key."""
        model, key = self.models.get(session.model, self.model), self.api_keys.get(session.tenant, self.api_key)
        return self if (model, key) == (self.model, self.api_key) else replace(self, model=model, api_key=key)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every call."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(slots=True)
class Hint:
    """An advisory that was sent. Times in seconds on the load's clock; status: 0 if there was no answer."""

    sent_s: float
    answered_s: float = 0.0
    status: int = 0


@dataclass(slots=True)
class Outcome:
    """One request, measured at the client. Times in seconds on the load's clock.

    first_s: arrival of the first text. gaps_s: from each text to the next. end_s: end of the stream. cached_tokens,
    finish_reason: as the server reports them, None if it does not. error: None if the request succeeded.
    """

    session_id: str
    turn: int
    planned_s: float
    sent_s: float = 0.0
    first_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    node: str | None = None
    hint: Hint | None = None
    finish_reason: str | None = None
    error: str | None = None
    text: str = ""
    priority: int = 0
    tenant: str = ""
    model: str = ""

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

    @property
    def normalised_s(self) -> float | None:
        """End to end over output tokens, in seconds; None for an empty answer."""
        return self.end_to_end_s / self.output_tokens if self.output_tokens else None


async def advise(
    http: aiohttp.ClientSession,
    endpoint: Endpoint,
    session_id: str,
    expected_arrival_s: float | None,
    pin_node: str | None = None,
    priority: int = 0,
) -> int:
    """Send one advisory. Returns its HTTP status, 0 if there was no answer."""
    body: dict[str, Any] = {
        "session_id": session_id,
        "model_id": endpoint.model,
        "expected_arrival": expected_arrival_s,
    }
    if priority:
        body["priority"] = priority
    headers = endpoint.headers | ({"X-Upbeat-Node": pin_node} if pin_node else {})
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
    """Send one streaming chat completion. Fills `outcome` except `sent_s` and `hint`; server errors are recorded there,
    not raised. An answer of a wrong length (`wrong_length`) is an error. headers: in addition to the session's."""
    body = {
        "model": endpoint.model,
        "messages": list(messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": answer_tokens,
        "temperature": 0,
        **endpoint.body,
    }
    sent = (
        endpoint.headers
        | {"X-Session-Id": session_id}
        | ({"X-Upbeat-Node": pin_node} if pin_node else {})
        | dict(headers or {})
    )
    timeout = aiohttp.ClientTimeout(total=endpoint.timeout_s)
    try:
        async with http.post(
            f"{endpoint.base_url}/v1/chat/completions", json=body, headers=sent, timeout=timeout
        ) as response:
            outcome.node = response.headers.get("X-Upbeat-Node")
            if response.status != 200:
                outcome.error = f"HTTP {response.status}: {(await response.text())[:300]}"
            else:
                await _read_stream(response, outcome, now)
                outcome.error = outcome.error or wrong_length(
                    outcome, answer_tokens, fixed=bool(body.get("ignore_eos"))
                )
    except (aiohttp.ClientError, TimeoutError, ValueError) as e:
        outcome.error = f"{type(e).__name__}: {e}"
    outcome.end_s = now()
    outcome.first_s = outcome.first_s or outcome.end_s


def wrong_length(outcome: Outcome, planned_tokens: int, *, fixed: bool) -> str | None:
    """The error of an answer's length, or None. A server that truncates answers must not look fast.

    fixed: the request had `ignore_eos`, so the answer must have exactly `planned_tokens`. Otherwise it may be shorter,
    but not empty, if `finish_reason` says that the model ended it (anything but "length").
    """
    tokens = outcome.output_tokens
    ended_itself = not fixed and outcome.finish_reason not in (None, "length") and 0 < tokens < planned_tokens
    if tokens == planned_tokens or ended_itself:
        return None
    return f"the answer has {tokens} tokens where {planned_tokens} were planned (finish_reason {outcome.finish_reason})"


async def _read_stream(response: aiohttp.ClientResponse, outcome: Outcome, now: Callable[[], float]) -> None:
    texts: list[str] = []
    finished, last_s = False, 0.0
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
            outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason
            delta = choice.get("delta", {})
            if delta.get("content") or delta.get("reasoning_content"):
                came_s = now()
                if last_s:
                    outcome.gaps_s.append(came_s - last_s)
                outcome.first_s, last_s = outcome.first_s or came_s, came_s
            if text := delta.get("content"):
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
