"""`/metrics` of a gateway: whoever asks, pages are made one at a time, with pauses, and never on the loop."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time

import pytest

from gateway import siblings
from gateway.siblings import PAUSE_TIMES, Siblings
from runtime import same_machine


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


async def test_processes_ask_each_other_and_none_runs_twice() -> None:
    both = [Siblings(18_080, number, 2) for number in range(2)]
    for sibling in both:
        await sibling.open()
    try:
        page = (await both[0].metrics()).decode()
        assert 'process="0"' in page and 'process="1"' in page
        with pytest.raises(OSError, match="runs already"):
            await Siblings(18_080, 1, 2).open()
    finally:
        for sibling in both:
            sibling.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_another_user_who_takes_or_calls_the_socket_gets_nothing_and_stops_nobody() -> None:
    taken, first = "upbeat-gateway-0-18081-1", Siblings(18_081, 0, 2)
    os.seteuid(65_534)
    try:
        found = same_machine.listening(taken)
        assert found is not None
    finally:
        os.seteuid(0)
    with found[0]:
        await Siblings(18_081, 1, 2).open()  # and only says so
        await first.open()
        try:
            assert 'process="1"' not in (await first.metrics()).decode()
            with socket.socket(socket.AF_UNIX) as caller:
                os.seteuid(65_534)
                try:
                    caller.connect("\0upbeat-gateway-0-18081-0")
                finally:
                    os.seteuid(0)
                caller.settimeout(5)
                assert await asyncio.to_thread(caller.recv, 1) == b""
        finally:
            first.close()
