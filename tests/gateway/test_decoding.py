"""Helper processes that read large bodies: they come and go, and a body that ends them is refused."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import psutil
import pytest

from contracts.errors import BodyTooLarge, Unavailable
from gateway.core.bodies import Tally
from gateway.decoding import Decoding
from gateway.openai.asked import Told

TOLD = Told("a", False, {}, {})


@pytest.fixture
async def decoding() -> AsyncIterator[Decoding]:
    made = Decoding(2, 192 << 20)
    made.start()
    yield made
    await made.close()
    assert not helpers()


def helpers() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if "gateway.decoder" in p.cmdline()]


def body_of(size: int) -> tuple[bytes, Tally]:
    body, tally = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * size}]}).encode(), Tally()
    tally.add(body)
    return body, tally


async def test_a_small_body_needs_no_helper_and_a_large_one_comes_packed(decoding: Decoding) -> None:
    small, large = [await decoding.ask("chat", *body_of(size), TOLD) for size in (100, 1 << 20)]
    assert small.prompts[0].messages and not small.prompts[0].packed
    assert large.prompts[0].messages is None and large.prompts[0].packed_bytes > 1 << 20
    assert len(helpers()) == 2


async def test_helpers_that_are_killed_are_replaced(decoding: Decoding) -> None:
    await decoding.ask("chat", *body_of(1 << 20), TOLD)
    for helper in helpers():
        helper.kill()
    assert (await decoding.ask("chat", *body_of(1 << 20), TOLD)).model == "m"


async def test_a_body_that_ends_every_helper_is_refused() -> None:
    ends = "import os; from runtime.child import serve; serve(lambda _: os._exit(3))"
    decoding = Decoding(2, 192 << 20, (sys.executable, "-c", ends))
    try:
        with pytest.raises(BodyTooLarge):
            await decoding.ask("chat", *body_of(1 << 20), TOLD)
    finally:
        await decoding.close()


async def test_what_waits_when_the_gateway_stops_is_told_to_try_again(decoding: Decoding) -> None:
    asking = [asyncio.create_task(decoding.ask("chat", *body_of(4 << 20), TOLD)) for _ in range(6)]
    await asyncio.sleep(0.05)
    await decoding.close()
    found = await asyncio.gather(*asking, return_exceptions=True)
    assert any(isinstance(one, Unavailable) for one in found)
    assert not [one for one in found if isinstance(one, BaseException) and not isinstance(one, Unavailable)], found
