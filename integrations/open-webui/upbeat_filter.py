"""
title: Upbeat
author: Upbeat
version: 0.1.0
required_open_webui_version: 0.5.17
license: Apache-2.0
description: A chat keeps its KV cache, and hints load it while knowledge, web search and tools work.
"""

# Open WebUI runs this file as it is: paste it under Admin Panel, Functions. It needs nothing but Open WebUI's own
# packages. `inlet` runs before knowledge, web search and tools do; `stream` sees the answer; `outlet` runs after it.
# Nothing here sees the user type: a page does (docs/web-sdk.md).

import asyncio
import hashlib
import json
import os
import re
import urllib.request
from typing import Any

from pydantic import BaseModel, Field

_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def session_of(metadata: Any) -> str | None:
    """The session of a chat: its id; None for a task about a chat (title, tags), which has another prompt."""
    said = metadata if isinstance(metadata, dict) else {}
    chat_id = said.get("chat_id")
    if said.get("task") or not isinstance(chat_id, str) or not chat_id:
        return None
    if _NAME.fullmatch(chat_id) and chat_id.strip("."):
        return chat_id
    return "chat-" + hashlib.sha256(chat_id.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key elsewhere."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class Filter:
    class Valves(BaseModel):
        priority: int = Field(default=0, description="Order among filters: lower runs first.")
        models: str = Field(
            default="",
            description="Ids of Upbeat's models as Open WebUI shows them, separated by commas. Empty: every model that "
            "this function is on for. Other providers may refuse the field session_id.",
        )
        base_url: str = Field(
            default_factory=lambda: os.environ.get("UPBEAT_BASE_URL", ""),
            description="The gateway's address, as http://127.0.0.1:8080/v1. Empty: no hints, sessions are named only.",
        )
        api_key: str = Field(
            default_factory=lambda: os.environ.get("UPBEAT_API_KEY", ""),
            description="A server key of the gateway.",
            json_schema_extra={"input": {"type": "password"}},
        )
        after_answer_s: float = Field(
            default=0.0,
            ge=0,
            le=3600,
            description="Hint each chat for this many seconds after its answer. 0: not. Most answers get no quick "
            "reply, and Upbeat prefetches less for callers whose hints rarely come true.",
        )
        timeout_s: float = Field(default=2.0, gt=0, le=30, description="Seconds for one hint, in the background.")

    def __init__(self) -> None:
        self.valves = self.Valves()
        self._sending: set[asyncio.Task[None]] = set()
        #: Answers that called tools, each hinted once.
        self._called: dict[str, None] = {}
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)

    async def inlet(self, body: dict[str, Any], __metadata__: Any = None) -> dict[str, Any]:
        """Name the chat's session in the request, and hint it: retrieval and web search come before the model."""
        session_id = session_of(__metadata__)
        if session_id is not None and self._ours(body.get("model")):
            body["session_id"] = session_id
            self._hint(session_id)
        return body

    async def stream(self, event: dict[str, Any], __body__: Any = None, __metadata__: Any = None) -> dict[str, Any]:
        """The answer calls tools: their results come in the chat's next request."""
        session_id = session_of(__metadata__)
        if session_id is not None and _calls_tools(event) and self._ours((__body__ or {}).get("model")):
            answer = str(event.get("id") or session_id)
            if answer not in self._called:
                self._called[answer] = None
                while len(self._called) > 1024:
                    del self._called[next(iter(self._called))]
                self._hint(session_id)
        return event

    async def outlet(self, body: dict[str, Any], __metadata__: Any = None) -> dict[str, Any]:
        """The answer is complete."""
        session_id = session_of(__metadata__ or body)
        if session_id is not None and self.valves.after_answer_s > 0 and self._ours(body.get("model")):
            self._hint(session_id, self.valves.after_answer_s)
        return body

    def _ours(self, model: Any) -> bool:
        named = {one.strip() for one in self.valves.models.split(",") if one.strip()}
        return not named or model in named

    def _hint(self, session_id: str, ttl_s: float | None = None) -> None:
        """Send a hint in the background. Never raises, and never waits."""
        if not self.valves.base_url or len(self._sending) >= 64:
            return
        hint = {"session_id": session_id} | ({} if ttl_s is None else {"ttl_s": ttl_s})
        task = asyncio.get_running_loop().create_task(asyncio.to_thread(self._post, hint, self.valves))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    def _post(self, hint: dict[str, Any], valves: "Filter.Valves") -> None:
        """A hint that fails costs its effect only."""
        address = valves.base_url.rstrip("/").removesuffix("/v1")
        headers = {"Content-Type": "application/json", "User-Agent": "upbeat-open-webui/0.1.0"}
        if valves.api_key:
            headers["Authorization"] = f"Bearer {valves.api_key}"
        try:
            if not address.startswith(("http://", "https://")):
                raise ValueError("base_url must begin with http:// or https://")
            request = urllib.request.Request(f"{address}/v1/advisory", json.dumps(hint).encode(), headers)
            with self._opener.open(request, timeout=valves.timeout_s) as response:
                response.read(65536)
        except Exception as e:
            print(f"upbeat: the hint was not sent: {type(e).__name__}: {e}"[:200], flush=True)


def _calls_tools(event: Any) -> bool:
    choices = event.get("choices") if isinstance(event, dict) else None
    return any(
        isinstance(choice, dict) and bool((choice.get("delta") or {}).get("tool_calls"))
        for choice in (choices if isinstance(choices, list) else ())
    )
