"""What a process leaves in its log."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

CRASHES = """
import ctypes
from runtime.telemetry import configure_logs
configure_logs("kvstore-0")
def reads_what_is_not_there():
    ctypes.string_at(0)
reads_what_is_not_there()
"""


def test_a_crash_in_native_code_leaves_the_stack_in_the_log() -> None:
    done = subprocess.run([sys.executable, "-c", CRASHES], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr and "in reads_what_is_not_there" in done.stderr


THREADS = """
import threading
from runtime.telemetry import configure_logs, logger
configure_logs("worker-0")
thread = threading.Thread(target=lambda: logger("engine").info("computed", request="r1"))
thread.start()
thread.join()
"""


def test_lines_of_every_thread_name_their_service() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=60)
    line = json.loads(done.stderr)
    assert (line["service"], line["request"], line["module"]) == ("worker-0", "r1", "engine")
