"""What `upbeat up` refuses: status 2, one line that names the flag, its value and what to do, and nothing started."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from stand_in_stack import UpbeatUp

from cli.main import app


@pytest.fixture
def refused(up: UpbeatUp, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line of the program, run in this process: these refusals come before anything is locked or started."""

    def run(**changes: object) -> str:
        monkeypatch.chdir(up.directory)
        monkeypatch.setattr(sys, "argv", ["upbeat", *up.flags(**changes)])
        with pytest.raises(SystemExit) as ended:
            app()
        assert ended.value.code == 2
        printed = capsys.readouterr()
        lines = printed.err.strip().splitlines()
        assert len(lines) == 1 and not printed.out
        assert lines[0].startswith("upbeat: ")
        assert not up.journal(), "nothing was started"
        return lines[0]

    return run


def refusal(up: UpbeatUp, environment: dict[str, str] | None = None, **changes: object) -> str:
    """The one line with which the launcher refuses."""
    launcher = up.start(environment, **changes)
    assert launcher.wait(timeout=60) == 2, up.said()
    lines = up.said().strip().splitlines()
    assert len(lines) == 1, up.said()
    assert lines[0].startswith("upbeat: ")
    assert not up.journal(), "nothing was started"
    return lines[0]


@pytest.mark.parametrize(
    ("flag", "value", "remedy"),
    [
        ("nodes", "0", "from 1 to 256"),
        ("nodes", "two", "whole number"),
        ("port", "70000", "from 1 to 65535"),
        ("port", "65530", "give one of at most 65506"),
        ("cache", "maybe", "on or off"),
        ("policy", "fair", "balanced, sticky"),
        ("hbm_gib", "-1", "above 0"),
        ("hbm_gib", "inf", "above 0"),
        ("dram_gib", "much", "not a number"),
        ("model", "/nowhere/at/all", "config.json"),
        ("config", "/nowhere/at/all.yaml", "readable YAML"),
        ("data", "/proc/nowhere", "can be written"),
        ("host", "http://x", "such as 127.0.0.1, 0.0.0.0 or ::"),
        ("host", "[::1]", "such as 127.0.0.1, 0.0.0.0 or ::"),
        ("cors_origin", "localhost:3000", "such as http://localhost:3000, or *"),
        ("cors_origin", "https://x.org/page", "without a path"),
    ],
)
def test_a_wrong_value(refused: Callable[..., str], flag: str, value: str, remedy: str) -> None:
    line = refused(**{flag: value})
    assert f"--{flag.replace('_', '-')}" in line and value in line and remedy in line


def test_more_memory_than_the_machine_shares(up: UpbeatUp) -> None:
    line = refusal(up, dram_gib=100_000)
    assert "--dram-gib 100000" in line and "shared memory" in line and "lower" in line


def test_more_device_memory_than_the_machine_has(up: UpbeatUp) -> None:
    line = refusal(up, {"UPBEAT__WORKER__DEVICE": "cpu"}, hbm_gib=100_000)
    assert "--hbm-gib 100000" in line and "lower" in line


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (lambda model: (model / "config.json").unlink(), "no config.json"),
        (lambda model: (model / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda model: (model / "model.safetensors").unlink(), "safetensors"),
    ],
)
def test_a_directory_that_is_no_model(up: UpbeatUp, refused: Callable[..., str], break_it: object, named: str) -> None:
    assert callable(break_it)
    break_it(up.model)
    line = refused()
    assert f"--model {up.model}" in line and named in line


def test_a_wrong_key_in_the_file(up: UpbeatUp, refused: Callable[..., str]) -> None:
    file = up.directory / "given.yaml"
    file.write_text("kv:\n  hmb_gib: 2\n")
    assert "kv.hmb_gib" in refused(config=file)


def test_a_wrong_key_in_the_environment(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPBEAT__KV__CHUNK_TOKENS", "0")
    assert "kv.chunk_tokens" in refused()


def test_a_kept_key_that_is_none(up: UpbeatUp, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPBEAT__GATEWAY__HOST", "127.0.0.2")
    (up.directory / "data").mkdir(parents=True)
    (up.directory / "data" / "api_key").write_text("\n")
    said = refused()
    assert "api_key" in said and "gateway.api_keys" in said


@pytest.mark.parametrize(
    ("offset", "purpose"), [(0, "gateway"), (1, "scheduler"), (20, "store of node-0"), (21, "worker of node-0")]
)
def test_a_port_that_somebody_has(up: UpbeatUp, offset: int, purpose: str) -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of what an earlier test left in TIME_WAIT
        taken.bind(("127.0.0.1", up.port + offset))
        taken.listen()
        line = refusal(up)
    assert (
        f"port {up.port + offset} ({purpose}) is taken by" in line
        and f"pid {os.getpid()}" in line
        and "another --port" in line
    )


def test_an_address_that_is_not_this_machines(up: UpbeatUp) -> None:
    line = refusal(up, host="192.0.2.7")
    assert "'192.0.2.7' is no address of this machine" in line and "0.0.0.0" in line


def test_a_data_directory_that_another_stack_uses(up: UpbeatUp, tmp_path: Path) -> None:
    first = up.serving()
    other = UpbeatUp(tmp_path / "other", up.port + 45)
    try:
        line = refusal(other, data=up.directory / "data")
        assert f"--data {up.directory / 'data'}" in line and str(first.pid) in line and "another --data" in line
        line = refusal_again(other, run_dir=up.run_dir)
        assert f"--run-dir {up.run_dir}" in line and str(first.pid) in line
    finally:
        other.close()
    assert up.ready()


def refusal_again(up: UpbeatUp, **changes: object) -> str:
    """A refusal after another one, on a fresh output."""
    up.output.unlink()
    return refusal(up, **changes)


def test_programs_that_are_not_installed(up: UpbeatUp, refused: Callable[..., str]) -> None:
    (up.bin / "upbeat-worker").unlink()
    assert "upbeat-worker is not there" in refused()


def test_a_stack_that_was_refused_leaves_the_directory_free(up: UpbeatUp) -> None:
    refusal(up, dram_gib=100_000)
    launcher = up.serving()
    assert json.loads((up.directory / "data" / "lock").read_text())["pid"] == launcher.pid
    os.killpg(launcher.pid, signal.SIGINT)
    assert launcher.wait(timeout=40) == 0
