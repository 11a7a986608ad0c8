"""The scheduler's metrics: they say what the core did, and its process shows them."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from contracts.ids import SessionKey
from runtime.config_file import load_config
from scheduler.core.control import Ask
from scheduler.metrics import METRICS_PORT, SchedulerMetrics, metrics_port
from tests.scheduler.test_core import Harness, hint

ROOT = Path(__file__).parents[2]


def shown(h: Harness) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(SchedulerMetrics(h))
    lines = [
        line.rsplit(" ", 1) for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")
    ]
    return {name.removeprefix("upbeat_scheduler_"): float(value) for name, value in lines}


def test_what_was_done_about_hints_and_turns_is_counted() -> None:
    h = Harness(3)
    h.worker_left("node-2")
    h.hold("node-0", 960)
    for name in ("a", "a", "b", "c"):
        h.advise(hint(SessionKey("t", name), f"hint-{name}", expires_s=60.0), 0.0)
    h.advise(hint(SessionKey("t", "d"), "hint-d", model="nobody's"), 0.0)
    before = shown(h)
    assert before["hints_pending"] == 3 and before["expected_arrivals"] == pytest.approx(2.7)
    for i, name in enumerate(("a", "b", "x")):
        h.place(Ask(f"r{i}", SessionKey("t", name), "m"), 1.0)
    h.tick(60.0)
    found = shown(h)
    assert found["decisions_total"] == 3 and found["hints_pending"] == 0 and found["expected_arrivals"] == 0
    assert {k: v for k, v in found.items() if k.startswith("hints_total")} == {
        'hints_total{done="full"}': 3,
        'hints_total{done="known"}': 1,
        'hints_total{done="unusable"}': 1,
    }
    ends = {"used": 2, "missed": 1, "expired": 1, "invalidated": 0, "dropped": 0, "moved": 0}
    assert all(found[f'hint_outcomes_total{{outcome="{end}"}}'] == count for end, count in ends.items())
    assert found["sessions"] == 1 and sum(v for k, v in found.items() if k.startswith("nodes{")) == 3


def test_a_port_that_another_service_of_the_deployment_has_is_left_to_it() -> None:
    config = load_config(
        None,
        {"scheduler": {"port": 9000, "count": 11}, "nodes": {"count": 2, "base_port": 9015}, "gateway": {"port": 8999}},
    )
    assert [metrics_port(config, 9000 + n) for n in (0, 1, 4, 5, 9, 10)] == [None, 9011, 9014, None, None, 9020]


def test_a_schedulers_process_shows_them(tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    port = free_ports(METRICS_PORT + 1)
    config = tmp_path / "config.yaml"
    config.write_text(
        f"scheduler: {{port: {port}}}\nnodes: {{count: 1, base_port: 61000}}\ndata: {tmp_path / 'data'}\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "scheduler", "--config", str(config)], cwd=ROOT, stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port + METRICS_PORT}/metrics", timeout=5) as answer:
                    text = answer.read().decode()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, process.stderr
                time.sleep(0.05)
    finally:
        process.terminate()
        process.communicate(timeout=30)
    for name in (
        "decision_seconds_bucket",
        "decisions_total",
        "hint_outcomes_total",
        "expected_arrivals",
        "refused_total",
    ):
        assert f"upbeat_scheduler_{name}" in text
    assert 'upbeat_scheduler_nodes{state="serving"} 0.0' in text
