#!/usr/bin/env python3
"""How long does a store with a million chunks and a million sessions take to start, and what does it keep of each? See
README.md.

    bench/kvstore/scale.py                    # fills a directory first: a quarter of an hour
    bench/kvstore/scale.py --quick            # 50,000 of each, and a million generated
    bench/kvstore/scale.py --at DIR           # a directory that is filled, or is to be; it stays
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT)]

from pairs import Figure  # noqa: E402
from scale_fill import IDLE_EVERY, SESSION_CHUNKS, SMALL, fill, orphans, session_of  # noqa: E402

from kvstore.core import events as ev  # noqa: E402
from kvstore.core.store import Store  # noqa: E402
from loadtest.report import provenance, write_json  # noqa: E402
from runtime.collector import collecting_nothing  # noqa: E402
from runtime.config_file import load_config  # noqa: E402
from scheduler.core.directory import Directory, Held  # noqa: E402

_PORT, _LONGEST_S = 29_340, 4 * 3600.0


class Running:
    """A store process on the filled directory."""

    def __init__(self, data: Path, scratch: Path, kv: dict[str, object]) -> None:
        config = scratch / "store.yaml"
        config.write_text(
            yaml.safe_dump(
                {
                    "data": str(data),
                    "shm_dir": str(scratch),
                    "nodes": {"count": 1, "base_port": _PORT},
                    "kv": {"dram_gib": 0.01, "transport": "socket", "file_io": "threads"} | kv,
                }
            )
        )
        self._log = scratch / "store.log"
        self._out = self._log.open("wb")
        command = [sys.executable, "-m", "kvstore", "--config", str(config), "--node", "0"]
        self.began = time.monotonic()
        self.process = subprocess.Popen(command, stdout=self._out, stderr=self._out, cwd=ROOT)
        self._port = load_config(config).node(0).store_metrics_port

    def served(self) -> None:
        """Wait until it serves."""
        self.start_s = self.wait(lambda: '"serving"' in self._log.read_text())
        self.start_cpu_s = self.cpu_s()

    def cpu_s(self) -> float:
        """Processor time so far, in seconds."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    def metric(self, name: str) -> float:
        """A sample by name and labels, as its page has it; 0: it has none."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=60) as answer:
            lines = [line.rpartition(" ") for line in answer.read().decode().splitlines()]
        return next((float(value) for found, _, value in lines if found == f"upbeat_kvstore_{name}"), 0.0)

    def completed(self, what: str) -> float:
        """When background work last went through everything."""
        return self.metric(f'completed_timestamp_seconds{{what="{what}"}}')

    def event(self, what: str) -> float:
        """How often this was counted."""
        return self.metric(f'events_total{{what="{what}"}}')

    def wait(self, condition) -> float:  # type: ignore[no-untyped-def]
        """Wait; returns seconds since the start."""
        while not condition():
            if self.process.poll() is not None or time.monotonic() - self.began > _LONGEST_S:
                raise RuntimeError(f"the store did not get there: {self._log.read_text()[-2000:]}")
            time.sleep(0.05)
        return time.monotonic() - self.began

    def own_bytes(self) -> int:
        """Memory that is the process's own: without the arena."""
        return int(psutil.Process(self.process.pid).memory_full_info().uss)


@contextmanager
def running(data: Path, scratch: Path, **kv: object) -> Iterator[Running]:
    """A store that is ended afterwards."""
    made = Running(data, scratch, kv)
    try:
        made.served()
        yield made
    finally:
        made.process.terminate()
        made.process.wait(60)


def measure(data: Path, scratch: Path, chunks: int, sessions: int) -> Iterator[Figure]:
    """The figures of a store on the filled directory."""
    at = f"{chunks:,} chunks, {sessions:,} sessions"
    empty = scratch / "empty"
    with running(empty, scratch) as store:
        store.wait(lambda: store.completed("sessions"))
        idle_bytes, idle_s, cpu_s = store.own_bytes(), store.start_s, store.start_cpu_s
    yield Figure(
        "start of an empty store", round(idle_s, 2), "s", note=f"{idle_bytes >> 20} MiB; {cpu_s:.1f} s of a processor"
    )
    for times in ("without a catalogue", "with it"):
        with running(data, scratch) as store:
            note = f"{at}; {store.start_cpu_s:.1f} s of a processor"
            yield Figure(f"start until it serves, {times}", round(store.start_s, 2), "s", note=note)
            listed_s = store.wait(lambda: store.completed("sessions")) - store.start_s
            note = f"{at}; in the background; {store.cpu_s() - store.start_cpu_s:.1f} s of a processor"
            yield Figure(f"listing of all sessions, {times}", round(listed_s, 1), "s", note=note)
            time.sleep(5.0)
            own = store.own_bytes()
            note = f"{at}; of it {(own - idle_bytes) / chunks:.0f} more than an empty store"
            yield Figure(f"memory a chunk in all, {times}", round(own / chunks), "bytes", note=note)
    lost = len(list(orphans(chunks)))
    with running(data, scratch, orphan_grace_s=5, blob_expiry_s=20) as store:
        gone_s = store.wait(lambda: store.event("orphans_removed_blob") >= lost)
        assert store.event("orphans_removed_blob") == store.event("orphans_removed_ssd") == lost
        yield Figure(
            "all orphans are gone from SSD and blob", round(gone_s, 1), "s", note=f"{at}; {lost:,}; two sweeps"
        )
        idle = -(-sessions // IDLE_EVERY)
        expired_s = store.wait(lambda: store.event("sessions_expired") >= idle)
        assert store.event("sessions_expired") == idle
        yield Figure("all idle sessions have expired", round(expired_s, 1), "s", note=f"{at}; {idle:,} idle")


def generated(chunks: int, sessions: int) -> Iterator[Figure]:
    """The core with so many listed chunks, and a scheduler's directory of so many sessions, without files."""
    process, at = psutil.Process(), f"{chunks:,} chunks, generated"
    keys = [n.to_bytes(32, "big") for n in range(chunks)]
    key_bytes = sys.getsizeof(keys[0])
    gc.collect()
    before, begun = process.memory_info().rss, time.perf_counter()
    store = Store("node-0", 1 << 20, write_back_limit_bytes=1 << 20)
    with collecting_nothing():
        store.handle(ev.Recovered((), [(SMALL, keys)]))
    yield Figure("names into the index", round(time.perf_counter() - begun, 1), "s", note=at)
    record = (process.memory_info().rss - before) / chunks
    yield Figure("a chunk's record with its key", round(record + key_bytes), "bytes", note=at)
    del store, keys
    gc.collect()
    at = f"{sessions:,} sessions, generated"
    before, begun = process.memory_info().rss, time.perf_counter()
    directory = Directory()
    with collecting_nothing():
        for n in range(sessions):
            directory.report("node-0", session_of(n), "m", 64, float(n), Held(64, 1), joining=True)
    yield Figure("reports into a scheduler's directory", round(time.perf_counter() - begun, 1), "s", note=at)
    record = (process.memory_info().rss - before) / sessions
    yield Figure("a session in the scheduler", round(record), "bytes", note=at)
    for by_id in (True, False):
        after, pages, found = "", 0, 0
        begun = time.perf_counter()
        while part := directory.page("tenant-1", 1000, after, by_id=by_id):
            after, pages, found = part[-1].key.session_id, pages + 1, found + len(part)
        assert found == sessions // 8
        took = (time.perf_counter() - begun) / pages * 1e3
        yield Figure(f"a page of 1000 by {'id' if by_id else 'last use'}", round(took, 2), "ms", note=at)


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--chunks", type=int)
    parser.add_argument("--sessions", type=int)
    parser.add_argument("--at", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    count = given.chunks or (50_000 if given.quick else 1_000_000)
    sessions = given.sessions or count
    made = 1_000_000 if given.quick else 10_000_000
    found: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="upbeat-bench-scale-") as temporary:
        scratch = Path(temporary)
        data = given.at or scratch / "data"
        if not (data / "blob").exists():
            fill(data, count, sessions, time.time())
        for figures in (measure(data, scratch, count, sessions), generated(made, made // 10)):
            for figure in figures:
                found.append(figure)
                print(f"{figure.question}: {figure.value} {figure.unit} ({figure.note})", flush=True)
    if given.out:
        parts = [vars(figure) for figure in found]
        write_json(
            given.out,
            provenance() | {"chunks": count, "sessions": sessions, "session_chunks": SESSION_CHUNKS, "figures": parts},
        )


if __name__ == "__main__":
    main()
