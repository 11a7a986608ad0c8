"""A failed test says what else the machine was doing: many fail only where something takes its cores."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

_SAMPLE_S, _SHOWN = 0.5, 8


def described() -> str:
    """Load, and the processes that use most of the processor just now."""
    before = {p: p.cpu_times() for p in psutil.process_iter() if _alive(p)}
    time.sleep(_SAMPLE_S)
    used: list[tuple[float, psutil.Process]] = []
    for process, old in before.items():
        if _alive(process):
            now = process.cpu_times()
            used.append((now.user + now.system - old.user - old.system, process))
    used.sort(key=lambda row: row[0], reverse=True)
    lines = [f"load averages {os.getloadavg()}, {os.cpu_count()} cores"]
    pressure = Path("/proc/pressure/cpu")
    lines += pressure.read_text().splitlines()[:1] if pressure.exists() else []
    for seconds, process in used[:_SHOWN]:
        if _alive(process):
            lines.append(f"{seconds / _SAMPLE_S:5.0%} {process.pid} {process.name()}, {process.num_threads()} threads")
    return "\n".join(lines)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE and bool(process.cpu_times())
    except psutil.Error:
        return False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        try:
            report.sections.append(("the machine", described()))
        except (psutil.Error, OSError) as e:
            report.sections.append(("the machine", f"not known: {e!r}"))
    return report
