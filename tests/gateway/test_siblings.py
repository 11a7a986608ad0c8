"""`/metrics` of a gateway: whoever asks, pages are made one at a time, with pauses, and never on the loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from gateway import siblings
from gateway.siblings import PAUSE_TIMES, Siblings


async def test_many_who_ask_together_share_a_page_made_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[float, threading.Thread]] = []
    began = threading.Event()

    def page() -> bytes:
        made.append((time.monotonic(), threading.current_thread()))
        began.set()
        time.sleep(0.05)
        return b"%d" % len(made)

    monkeypatch.setattr(siblings, "metrics_text", page)
    asked = Siblings(8080, 0, 1)
    first = asyncio.create_task(asked.metrics())
    assert await asyncio.to_thread(began.wait, 5)
    # These asked after the first page was begun, which may lack what they wait for.
    later = await asyncio.gather(*(asked.metrics() for _ in range(20)))
    assert (await first, set(later), len(made)) == (b"1", {b"2"}, 2)
    assert made[1][0] - made[0][0] >= 0.05 * (1 + PAUSE_TIMES) * 0.9
    assert threading.main_thread() not in {thread for _, thread in made}


async def test_a_page_that_failed_or_was_given_up_does_not_end_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = iter([RuntimeError("broken"), b"whole", b"again"])

    def page() -> bytes:
        found = next(pages)
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(siblings, "metrics_text", page)
    asked = Siblings(8080, 0, 1)
    with pytest.raises(RuntimeError, match="broken"):
        await asked.metrics()
    given_up = asyncio.create_task(asked.metrics())
    await asyncio.sleep(0)
    given_up.cancel()
    assert await asked.metrics() == b"whole"
    assert await asked.metrics() == b"again"
