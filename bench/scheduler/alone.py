"""The scheduler's core in this process: cost of a placement and a hint, and memory per session."""

from __future__ import annotations

import random
import statistics
import time
import tracemalloc
from collections.abc import Callable

from contracts.ids import SessionKey
from contracts.kv import KvShape
from scheduler.core.advisories import Hint
from scheduler.core.control import Ask, Control
from scheduler.core.directory import Held
from scheduler.core.fleet import LoadReport, Model

_MODEL = Model("bench", KvShape.of_heads(b"f" * 32, 32, 8, 128, 64, "bfloat16"), 8192, 0)


def figures(nodes: int, sessions: int, rounds: int) -> dict[str, float]:
    """Microseconds per placement and hint (median and p99), and bytes per session."""
    draw, control = random.Random(1), Control()
    for i in range(nodes):
        name = f"node-{i}"
        control.fleet.worker_joined(name, "x:1", (_MODEL,), 0.0)
        control.fleet.store_joined(name, "x:2")
        load = LoadReport(
            outstanding_s=draw.random() * 5,
            prefill_token_s=1e-4,
            hbm_pages_total=100_000,
            hbm_pages_free=draw.randrange(100_000),
        )
        control.fleet.loaded(name, load, [], [], 0.0)
    tracemalloc.start()
    for i in range(sessions):
        tokens = 64 * draw.randrange(1, 100)
        held = Held(tokens, tokens * 131_072, tokens)
        control.directory.report(f"node-{i % nodes}", SessionKey("t", f"s{i}"), "bench", tokens, 1.0, held)
    session_bytes = tracemalloc.get_traced_memory()[0] / sessions
    tracemalloc.stop()

    def key() -> SessionKey:
        return SessionKey("t", f"s{draw.randrange(sessions)}")

    placed = _times(lambda i: control.place(Ask(f"r{i}", key(), "bench"), 0.0).choice.why, rounds)
    hinted = _times(lambda i: control.advise(Hint(key(), f"a{i}", "bench", None, 60.0), 0.0), rounds)
    return {
        "place_us_median": placed[0],
        "place_us_p99": placed[1],
        "hint_us_median": hinted[0],
        "hint_us_p99": hinted[1],
        "session_bytes": round(session_bytes),
    }


def _times(what: Callable[[int], object], rounds: int) -> tuple[float, float]:
    took = []
    for i in range(rounds):
        began = time.perf_counter()
        what(i)
        took.append((time.perf_counter() - began) * 1e6)
    return round(statistics.median(took), 1), round(statistics.quantiles(took, n=100)[98], 1)
