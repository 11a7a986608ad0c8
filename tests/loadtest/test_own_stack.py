"""A stack comes up on its own ports and leaves nothing behind, however it ends. The launcher here is a small
stand-in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from loadtest.stack import Stack, StackError, free_ports
from runtime.config_file import load_config

LAUNCHER = """
import json, pathlib, signal, subprocess, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
signal.signal(signal.SIGINT, signal.default_int_handler)  # a script's background inherits one that is ignored
flags = dict(zip(sys.argv[2::2], sys.argv[3::2]))
data = pathlib.Path(flags["--data"]); data.mkdir(parents=True, exist_ok=True)
with open(data / "starts", "a") as f: f.write(json.dumps(sys.argv[1:]) + "\\n")
ignores = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
stubborn = subprocess.Popen([sys.executable, "-c", ignores])
(data / "pid").write_text(str(stubborn.pid))
if (data / "die").exists():
    print("the model is missing", flush=True); sys.exit(3)
class Ready(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{"data": [{"id": "stand-in"}]}')
    def log_message(self, *a): pass
try:
    HTTPServer(("127.0.0.1", int(flags["--port"])), Ready).serve_forever()
except KeyboardInterrupt:
    (data / "drained").write_text("yes")
"""


@pytest.fixture
def launcher(tmp_path: Path) -> list[str]:
    path = tmp_path / "launcher.py"
    path.write_text(LAUNCHER)
    return [sys.executable, str(path)]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_until(condition: object, limit_s: float = 60.0) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


def test_it_serves_drains_on_sigint_and_kills_what_does_not_listen(tmp_path: Path, launcher: list[str]) -> None:
    with Stack(stop_s=1.0, launcher=launcher, directory=tmp_path / "s", nodes=3) as stack:
        assert stack.model_name() == "stand-in"
        child = int((stack.data / "pid").read_text())
        assert not gone(child)
    assert (stack.data / "drained").exists()
    assert gone(child)


def test_an_exception_inside_leaves_nothing(tmp_path: Path, launcher: list[str]) -> None:
    def interrupted() -> None:
        with Stack(stop_s=1.0, launcher=launcher, directory=tmp_path / "s"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert gone(int((tmp_path / "s" / "data" / "pid").read_text()))


def test_a_launcher_that_dies_is_an_error_with_its_last_words(tmp_path: Path, launcher: list[str]) -> None:
    (tmp_path / "s" / "data").mkdir(parents=True)
    (tmp_path / "s" / "data" / "die").touch()
    with pytest.raises(StackError, match=r"status 3\n(.*\n)*the model is missing"):
        Stack(stop_s=1.0, launcher=launcher, directory=tmp_path / "s").__enter__()
    assert gone(int((tmp_path / "s" / "data" / "pid").read_text()))


def test_its_own_directory_is_deleted_and_a_given_one_is_kept(tmp_path: Path, launcher: list[str]) -> None:
    with Stack(stop_s=1.0, launcher=launcher) as stack:
        assert stack.directory.exists()
    assert not any(path.stat().st_size for path in stack.data.rglob("*") if path.is_file()), "it takes no room"
    alone = "from loadtest.stack import Stack; stack = Stack(); stack.close(); print(stack.directory)"
    ended = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True, check=True)
    assert not Path(ended.stdout.strip()).exists(), "it is gone with its process"
    with Stack(stop_s=1.0, launcher=launcher, directory=tmp_path / "kept") as kept:
        pass
    assert (kept.data / "starts").exists()


def test_flags_and_settings_are_those_that_were_asked_for(tmp_path: Path) -> None:
    stack = Stack(
        model=tmp_path / "m",
        nodes=2,
        policy="sticky",
        cache=False,
        hbm_gib=0.5,
        dram_gib=1.5,
        directory=tmp_path / "s",
        launcher=["upbeat"],
    )
    command = stack.command
    assert command[:2] == ["upbeat", "up"]
    flags = dict(zip(command[2::2], command[3::2], strict=True))
    assert flags["--policy"] == "sticky" and flags["--cache"] == "off" and flags["--nodes"] == "2"
    assert (flags["--hbm-gib"], flags["--dram-gib"], flags["--model"]) == ("0.5", "1.5", str(tmp_path / "m"))


def test_a_restart_keeps_the_data_and_takes_new_settings(tmp_path: Path, launcher: list[str]) -> None:
    with Stack(stop_s=1.0, launcher=launcher, directory=tmp_path / "s") as stack:
        stack.stop()
        stack.start({"kv": {"blob_url": "file:///elsewhere"}})
        settings = yaml.safe_load((stack.directory / "config.yaml").read_text())
        assert len((stack.data / "starts").read_text().splitlines()) == 2
    assert settings["kv"] == {"blob_url": "file:///elsewhere"}
    config = load_config(stack.directory / "config.yaml", {"gateway": {"port": stack.port}})
    ports = {config.gateway.port, config.scheduler.port, config.nodes.base_port}
    assert len(ports) == 3 and min(ports) == stack.port


def test_killing_the_test_itself_interrupts_the_launcher(tmp_path: Path, launcher: list[str]) -> None:
    script = "\n".join(
        [
            "import time",
            "from pathlib import Path",
            "from loadtest.stack import Stack",
            f"Stack(launcher={launcher!r}, directory=Path({str(tmp_path / 's')!r})).start()",
            "print('up', flush=True)",
            "time.sleep(60)",
        ]
    )
    tester = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert tester.stdout is not None and tester.stdout.readline() == b"up\n"
    child = int((tmp_path / "s" / "data" / "pid").read_text())
    tester.kill()
    tester.wait()
    try:
        assert wait_until((tmp_path / "s" / "data" / "drained").exists)
    finally:
        os.kill(child, signal.SIGKILL)


def test_free_ports_are_free() -> None:
    first = free_ports(12)
    import socket

    for port in range(first, first + 12):
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: an earlier stack may have had it
            s.bind(("127.0.0.1", port))
