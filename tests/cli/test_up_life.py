"""`upbeat up` over stand-in services: starting, restarting, stopping, all with real processes and signals."""

from __future__ import annotations

import os
import re
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from stand_in_stack import UpbeatUp

from cli.addresses import base_url, other_urls
from runtime.config_file import load_config
from storelink.arena_sharing import arenas_of

STOPPING_ORDER = ["gateway", "worker-0", "kvstore-0", "scheduler"]


def test_it_tells_when_it_serves_and_what_to_paste(up: UpbeatUp) -> None:
    up.serving()
    assert up.ready()
    url = f"http://127.0.0.1:{up.port}"
    assert f"Upbeat serves upbeat-model on {url} (1 node" in up.said()
    assert f"curl {url}/v1/chat/completions" in up.said()
    assert set(up.pids()) == {"gateway", "scheduler", "kvstore-0", "worker-0"}


def test_each_device_of_a_node_has_a_worker_with_its_share_of_the_cores(up: UpbeatUp) -> None:
    up.serving(devices=2)
    assert set(up.pids()) == {"gateway", "scheduler", "kvstore-0", "worker-0-0", "worker-0-1"}
    threads = {str(entry["name"]): entry["omp"] for entry in up.journal()}
    share = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert threads["worker-0-0"] == threads["worker-0-1"] == share
    assert "started upbeat-worker of node-0/1 (pid" in up.said() and "(1 node of 2 devices" in up.said()


def test_every_service_is_a_process_of_its_name_in_the_launchers_session_and_group(up: UpbeatUp) -> None:
    launcher = up.serving()
    for name, pid in up.pids().items():
        process = psutil.Process(pid)
        program = f"upbeat-{name.partition('-')[0]}"
        assert process.name() == program[:15] or process.name() == program
        assert any(word.endswith(program) for word in process.cmdline())
        assert os.getsid(pid) == os.getpgid(pid) == launcher.pid


def test_the_services_read_one_written_configuration_and_no_environment_twice(up: UpbeatUp) -> None:
    file = up.directory / "given.yaml"
    file.write_text("kv:\n  chunk_tokens: 32\nscheduler:\n  policy: sticky\n")
    up.serving({"UPBEAT__KV__CHUNK_TOKENS": "16", "UPBEAT__WORKER__THREADS": "3"}, config=file, cache="off")
    written = load_config(up.run_dir / "config.yaml")
    assert (written.kv.chunk_tokens, written.kv.cache, written.scheduler.policy) == (16, False, "sticky")
    assert stat.S_IMODE((up.run_dir / "config.yaml").stat().st_mode) == 0o600
    assert all(entry["foreign"] == [] for entry in up.journal())
    threads = {str(entry["name"]): entry["omp"] for entry in up.journal()}
    assert threads["worker-0"] == "3" and threads["scheduler"] == "1"


def test_pages_and_an_address_that_are_given_as_flags_are_written_for_the_gateway(up: UpbeatUp) -> None:
    file = up.directory / "given.yaml"
    file.write_text("gateway:\n  host: 127.0.0.3\n  cors_origins: [https://chat.example.org]\n")
    pages = ["http://localhost:3000", "https://chat.example.org", "http://[::1]:5173"]
    up.serving(config=file, host="localhost", cors_origin=pages)
    section = load_config(up.run_dir / "config.yaml").gateway
    assert (section.host, section.cors_origins) == ("localhost", ["https://chat.example.org", pages[0], pages[2]])
    assert f"http://localhost:{up.port}/" in up.said() and not section.api_keys


def test_a_host_beyond_loopback_gets_the_stack_its_own_key(up: UpbeatUp) -> None:
    up.serving(host="127.0.0.2")
    section = load_config(up.run_dir / "config.yaml").gateway
    assert section.host == "127.0.0.2" and len(section.api_keys) == 1 and "export UPBEAT_API_KEY=" in up.said()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:9"),
        ("::", "http://[::1]:9"),
        ("fd00::7", "http://[fd00::7]:9"),
        ("a.b", "http://a.b:9"),
    ],
)
def test_the_address_that_is_printed_is_one_that_a_browser_here_can_open(host: str, url: str) -> None:
    keys = [{"key": "a-key-of-somebody"}]
    assert base_url(load_config(None, {"gateway": {"host": host, "port": 9, "api_keys": keys}})) == url


def test_a_gateway_on_every_address_tells_those_by_which_other_machines_reach_it() -> None:
    keys = [{"key": "a-key-of-somebody"}]

    def told(host: str) -> list[str]:
        own = ["127.0.0.1", "192.0.2.7", "::1", "fe80::1", "2001:db8::7"]
        return other_urls(load_config(None, {"gateway": {"host": host, "port": 9, "api_keys": keys}}), own)

    assert told("0.0.0.0") == ["http://192.0.2.7:9"]
    assert told("::") == ["http://192.0.2.7:9", "http://[2001:db8::7]:9"]
    assert told("127.0.0.1") == told("192.0.2.7") == []


def test_a_killed_service_is_started_again_and_serves(up: UpbeatUp) -> None:
    up.serving()
    for times, name in enumerate(["gateway", "scheduler", "kvstore-0", "worker-0"], start=1):
        before = up.pids()
        os.kill(before[name], signal.SIGKILL)
        up.until(
            lambda times=times: up.said().count("serving again") == times, f"it serves again without its old {name}"
        )  # type: ignore[misc]
        assert up.ready()
        after = up.pids()
        assert after[name] != before[name]
        assert {n: p for n, p in after.items() if n != name} == {n: p for n, p in before.items() if n != name}
        assert re.search(
            rf"{name} \(pid {before[name]}\) was killed by SIGKILL after .* s; starting it again in 0\.2 s", up.said()
        )


@pytest.mark.parametrize(
    ("number", "to_group"),
    [(signal.SIGINT, True), (signal.SIGTERM, True), (signal.SIGTERM, False)],
    ids=["SIGINT to the group", "SIGTERM to the group", "SIGTERM to the launcher alone"],
)
def test_a_signal_stops_in_order_and_leaves_nothing(up: UpbeatUp, number: signal.Signals, to_group: bool) -> None:
    launcher = up.serving()
    config = load_config(up.run_dir / "config.yaml")
    stem, image = config.node(0).arena_stem, config.shm_dir / f"upbeat-weights-{os.getpid()}.image"
    assert arenas_of(stem)
    image.write_bytes(b"of a worker that was killed")
    (os.killpg if to_group else os.kill)(launcher.pid, number)
    assert launcher.wait(timeout=40) == 0, up.said()
    assert sorted(up.events("drained")) == sorted(STOPPING_ORDER)
    if number is signal.SIGINT or not to_group:
        assert up.events("drained") == STOPPING_ORDER
    assert not up.members()
    assert not arenas_of(stem) and not image.exists()
    assert len(up.events("serving")) == 4, "a stopping stack starts nothing again"


def test_a_service_finishes_its_drain_before_the_next_one_is_told(up: UpbeatUp) -> None:
    up.behave("worker-0", drain_s=1.0)
    launcher = up.serving()
    os.killpg(launcher.pid, signal.SIGINT)
    assert launcher.wait(timeout=40) == 0
    happened = [(entry["event"], entry["name"]) for entry in up.journal()]
    assert happened.index(("drained", "worker-0")) < happened.index(("draining", "kvstore-0"))


def test_a_second_ctrl_c_stops_at_once(up: UpbeatUp) -> None:
    up.behave("gateway", deaf=True)
    launcher = up.serving()
    os.killpg(launcher.pid, signal.SIGINT)
    up.until(lambda: "stopping" in up.said(), "it stops")
    # Two deliveries of one Ctrl-C are one; the second Ctrl-C is another.
    with pytest.raises(Exception, match="timed out"):
        launcher.wait(timeout=1)
    os.killpg(launcher.pid, signal.SIGINT)
    assert launcher.wait(timeout=8) == 1
    assert "killed before it had finished: gateway" in up.said()
    assert not up.members()


def test_a_service_that_ends_again_and_again_at_start_ends_the_launcher_with_its_log(up: UpbeatUp) -> None:
    up.behave("kvstore-0", exit=1)
    launcher = up.start()
    assert launcher.wait(timeout=60) == 1
    assert up.said().count("kvstore-0 (pid") == 5
    assert "giving up" in up.said() and "the disk is on fire" in up.said()
    assert not up.members()


def test_a_service_that_refuses_its_configuration_is_not_tried_twice(up: UpbeatUp) -> None:
    up.behave("worker-0", exit=2)
    launcher = up.start()
    assert launcher.wait(timeout=40) == 1
    assert "worker-0" in up.said() and up.said().count("ended with status 2") == 1
    assert "the disk is on fire" in up.said()


def test_when_the_launcher_is_killed_its_services_end_and_the_next_launcher_waits_for_them(up: UpbeatUp) -> None:
    up.behave("kvstore-0", drain_s=3.0)
    launcher = up.serving()
    orphans = set(up.pids().values())
    launcher.kill()
    launcher.wait()
    up.behave("kvstore-0")
    up.serving()
    assert "waiting for the services of an earlier stack" in up.said()
    assert not orphans & {process.pid for process in up.members()}
    assert up.events("drained").count("kvstore-0") == 1, "an orphan finishes its write-back"


def test_stacks_live_side_by_side(up: UpbeatUp, tmp_path: Path, free_ports: Callable[[int], int]) -> None:
    other = UpbeatUp(tmp_path / "other", free_ports(50))
    try:
        up.serving()
        launcher = other.serving()
        assert up.ready() and other.ready()
        os.killpg(launcher.pid, signal.SIGINT)
        assert launcher.wait(timeout=40) == 0
        assert up.ready()
    finally:
        other.close()


def test_the_logs_of_the_last_run_are_kept(up: UpbeatUp) -> None:
    up.behave("worker-0", exit=2)
    up.start().wait(timeout=40)
    up.behave("worker-0")
    up.serving()
    assert "the disk is on fire" in (up.run_dir / "logs" / "worker-0.log.1").read_text()
    assert "the disk is on fire" not in (up.run_dir / "logs" / "worker-0.log").read_text()


def test_it_says_what_the_tiers_may_take_of_the_disk_and_warns_where_nothing_will_be_written(up: UpbeatUp) -> None:
    launcher = up.serving({"UPBEAT__KV__DISK_RESERVE": "0.9999"})
    said = " ".join(up.said().split())
    assert "GiB free; a node's SSD tier takes up to 0.0 GiB, the blob tier takes up to 0.0 GiB" in said
    assert "of its disk free, and kv.disk_reserve keeps 100%: no KV is written there; free some space" in said
    os.killpg(launcher.pid, signal.SIGTERM)
    assert launcher.wait(timeout=40) == 0, up.said()
