"""Runs several works of one request at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def together(works: list[Coroutine[Any, Any, None]]) -> None:
    """Run all; the first failure cancels the others and is raised. None outlives the call."""
    if len(works) <= 1:
        for work in works:
            await work
        return
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
