"""Who steps back when processors are short: real threads and their niceness."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import Future

import pytest

from runtime.niceness import step_back, stepped_back

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a niceness a thread")


def here() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_thread_steps_back_alone() -> None:
    before = here()

    def work() -> tuple[int, int]:
        step_back(2)
        step_back(0)
        first = here()
        step_back(1)
        return first, here()

    found: Future[tuple[int, int]] = Future()
    thread = threading.Thread(target=lambda: found.set_result(work()))
    thread.start()
    thread.join()
    assert found.result() == (before + 2, before + 3)
    assert here() == before


def test_threads_that_work_starts_step_back_with_it() -> None:
    before = here()
    end = threading.Event()
    started: Future[int] = Future()

    def starts(name: str) -> str:
        threading.Thread(target=lambda: (started.set_result(here()), end.wait())).start()
        return name

    assert stepped_back(3, starts, name="as told") == "as told"
    assert started.result(10) == before + 3
    end.set()
    assert here() == before


def test_what_work_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        stepped_back(1, lambda: 1 // 0)
