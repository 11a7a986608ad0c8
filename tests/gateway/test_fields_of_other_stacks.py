"""Fields that clients of vLLM, OpenRouter, Ollama and others send: done, or accepted and ignored; what cannot be done names the remedy."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_fakes import Stack, stack

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
IGNORED: dict[str, Any] = {
    "cache_salt": "s",
    "request_id": "mine",
    "provider": {"order": ["x"], "allow_fallbacks": False},
    "options": {"num_ctx": 4096},
    "include_reasoning": False,
    "return_token_ids": True,
}


@pytest.fixture
async def s() -> Any:
    async with stack() as running:
        yield running


# ---- ignored -----------------------------------------------------------------------------------------------------------
async def test_what_means_nothing_here_is_accepted_and_changes_nothing(s: Stack) -> None:
    status, plain, _ = await s.chat(seed=3, session_id="a")
    assert status == 200
    status, body, _ = await s.chat(seed=3, session_id="a", **IGNORED)
    assert status == 200, body
    assert body["choices"] == plain["choices"] and body["id"] != "mine"
    without, with_them = s.workers[0].submitted
    with_them.request_id = without.request_id
    assert with_them == without
    status, body, _ = await s.post(PLAIN, {"model": "toy", "prompt": "x", **IGNORED})
    assert status == 200, body
