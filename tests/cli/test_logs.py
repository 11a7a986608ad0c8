"""The services' logs do not grow without end, and nothing that was said is lost or torn: with real processes."""

from __future__ import annotations

import os
import random
import re
import signal
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
from stand_in_stack import UpbeatUp

from cli.log_writer import RollingLog
from contracts.errors import ConfigError
from runtime.config_file import load_config

LINES = 4000
#: 64 KiB a file, as a setting; as many files as hold everything.
SMALL = {"UPBEAT__LOG_MIB": "0.0625", "UPBEAT__LOG_FILES": "1000"}
LIMIT = 64 << 10


def files(log: Path) -> list[Path]:
    """A log's files, the oldest first."""
    older = {int(path.name.rpartition(".")[2]): path for path in log.parent.glob(f"{log.name}.*")}
    return [older[n] for n in sorted(older, reverse=True)] + [log]


def said(log: Path) -> str:
    return "".join(path.read_text() for path in files(log))


def check_whole(log: Path) -> dict[tuple[str, str], int]:
    """Every line of the stand-ins that `lines` made is whole and in its place; how many there are by process and
    speaker."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for line in said(log).splitlines():
        if line.startswith("{"):
            continue  # the service's own
        found = re.fullmatch(r"(\d+) (out|err|child) (\d+) x*\.", line)
        assert found is not None, f"torn: {line!r}"
        assert int(found[3]) == counts[found[1], found[2]], f"lost before {line!r}"
        counts[found[1], found[2]] += 1
    return counts


def writer(up: UpbeatUp) -> psutil.Process:
    (found,) = [p for p in up.members() if any(word.endswith("log_writer.py") for word in p.cmdline())]
    return found


def test_logs_are_rolled_by_size_and_no_line_is_lost_or_torn_also_when_a_service_is_started_again(up: UpbeatUp) -> None:
    up.behave("worker-0", lines=LINES)
    launcher = up.serving(SMALL)
    log = up.run_dir / "logs" / "worker-0.log"
    up.until(lambda: "worker-0" in up.events("spoken"), "it has spoken")
    first = up.pids()["worker-0"]
    os.kill(first, signal.SIGKILL)
    up.until(lambda: up.events("spoken").count("worker-0") == 2 and "serving again" in up.said(), "it has spoken again")
    second = up.pids()["worker-0"]
    os.killpg(launcher.pid, signal.SIGINT)
    assert launcher.wait(timeout=40) == 0, up.said()
    counts = check_whole(log)
    assert counts == {(str(pid), speaker): LINES for pid in (first, second) for speaker in ("out", "err", "child")}
    sizes = [path.stat().st_size for path in files(log)]
    assert len(sizes) > 10 and max(sizes) <= LIMIT + 200 and min(sizes[:-1]) > LIMIT - 200
    assert not up.members()


def test_only_so_many_files_are_kept_within_a_run_and_across_runs(up: UpbeatUp) -> None:
    up.behave("worker-0", lines=LINES)
    for run in (1, 2):
        launcher = up.serving(SMALL | {"UPBEAT__LOG_FILES": "3"})
        up.until(lambda run=run: up.events("spoken").count("worker-0") == run, "it has spoken")  # type: ignore[misc]
        os.killpg(launcher.pid, signal.SIGINT)
        assert launcher.wait(timeout=40) == 0, up.said()
        kept = files(up.run_dir / "logs" / "worker-0.log")
        assert [path.name for path in kept] == ["worker-0.log.2", "worker-0.log.1", "worker-0.log"]
        assert '"event": "stopped"' in kept[-1].read_text(), "the newest is the one without a number"
    assert len(files(up.run_dir / "logs" / "gateway.log")) == 2, "one a run"


def test_services_that_outlive_their_launcher_are_written_down_to_their_end(up: UpbeatUp) -> None:
    up.behave("kvstore-0", drain_s=2.0)
    launcher = up.serving(SMALL)
    launcher.kill()
    launcher.wait()
    up.until(lambda: not up.members(), "services and writer have ended")
    assert '"event": "stopped"' in said(up.run_dir / "logs" / "kvstore-0.log")


def test_a_writer_that_died_is_replaced_and_what_was_said_meanwhile_is_there(up: UpbeatUp) -> None:
    launcher = up.serving(SMALL)
    before = writer(up)
    before.send_signal(signal.SIGSTOP)
    up.behave("worker-0", lines=500)
    os.kill(up.pids()["worker-0"], signal.SIGKILL)
    up.until(lambda: "worker-0" in up.events("spoken"), "it spoke while nobody read")
    before.kill()
    up.until(
        lambda: "what writes the logs ended with status -9; starting it again" in up.said(), "the launcher notices"
    )
    os.killpg(launcher.pid, signal.SIGINT)
    assert launcher.wait(timeout=40) == 0, up.said()
    assert set(check_whole(up.run_dir / "logs" / "worker-0.log").values()) == {500}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_pieces_come_the_files_together_are_what_was_said(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    log, limit = tmp_path / "a.log", chance.randint(20, 400)
    lines = [bytes(chance.choices(b"abc", k=chance.choice((0, 3, 30, 3 * limit)))) + b"\n" for _ in range(300)]
    text = b"".join(lines) + b"unfinished"
    at = 0
    rolling = RollingLog(log, limit, 10_000)
    while at < len(text):
        piece = chance.randint(1, 2 * limit)
        rolling.write(text[at : at + piece])
        at += piece
        if chance.random() < 0.05:
            rolling = RollingLog(log, limit, 10_000)
    made = [path.read_bytes() for path in files(log)]
    assert b"".join(made) == text
    assert all(part.endswith(b"\n") for part in made[:-1]), "a line is never in two files"
    assert all(part.rfind(b"\n", 0, -1) < limit for part in made), (
        "only a last line that came in pieces passes the limit"
    )


def test_where_no_new_file_can_be_made_the_old_one_grows(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    rolling = RollingLog(log, 20, 3)
    (tmp_path / "a.log.1").mkdir()
    (tmp_path / "a.log.1" / "in the way").touch()
    (tmp_path / "a.log.2").mkdir()
    for _ in range(5):
        rolling.write(b"twelve bytes\n" * 3)
    assert log.read_bytes() == b"twelve bytes\n" * 15


@pytest.mark.parametrize(("key", "value"), [("log_mib", 0), ("log_mib", float("inf")), ("log_files", 1)])
def test_a_size_that_cannot_be_is_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=key):
        load_config(None, {key: value})
