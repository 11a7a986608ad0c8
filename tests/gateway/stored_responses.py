"""Responses as a store has them, and a keeper for one test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from gateway.responses.ids import item_id, new_response_id
from gateway.responses.keeper import Keeper
from gateway.responses.store import Response
from runtime.clock import Clock, RealClock

DAY_S, MOST = 86_400.0, 1 << 20


def response(session: str = "s", tenant: str = "t", previous: str = "", size: int = 10, **more: str) -> Response:
    made = new_response_id()
    output = [{"id": item_id(made, "message", 0), "type": "message", "role": "assistant", "content": []}]
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x" * size}]}]
    encoded = [json.dumps(part).encode() for part in ({"id": made}, output, items)]
    return Response(made, tenant, session, more.pop("status", "completed"), *encoded, previous, **more)


def keeper(data: Path, clock: Clock | None = None, keep_s: float = DAY_S) -> Keeper:
    return Keeper(data, clock or RealClock(), keep_s, 1 << 20, 1.0, "p0")


async def watched(keeper: Keeper, until: Callable[[], bool]) -> None:
    watching = asyncio.create_task(keeper.watch())
    try:
        async with asyncio.timeout(30):
            while not until():  # noqa: ASYNC110 - no event tells of another process's store
                await asyncio.sleep(0.02)
    finally:
        watching.cancel()
