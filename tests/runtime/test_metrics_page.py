"""The metrics page of a process: however many connect and say nothing, few threads serve them, and a reader is served
once they have left."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from runtime import metrics_page
from runtime.metrics_page import read_metrics, serve_metrics


def readers() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def test_connections_without_end_take_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "_MOST_READERS", 4)
    server = serve_metrics("127.0.0.1", 0)
    host, port = server.server_address[:2]
    try:
        before = readers()
        silent = [socket.create_connection((host, port), timeout=5) for _ in range(20)]
        closed = 0
        for connection in silent:
            connection.settimeout(0.2)
            try:
                closed += connection.recv(1) == b""
            except TimeoutError:
                pass
            except ConnectionError:
                closed += 1
        assert closed == 16 and readers() - before <= 4
        for connection in silent:
            connection.close()
        deadline = time.monotonic() + 10
        while readers() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "upbeat_tasks" in read_metrics("127.0.0.1", port, None)
    finally:
        server.shutdown()
        server.server_close()
