"""`upbeat status`, `sessions`, `advise`, `invalidate`, `doctor`, `probe`: against a small real HTTP server."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from upbeat_here import upbeat

from cli import doctor
from cli.probe import healthy
from cli.settings import BUNDLED_MODEL
from runtime import rpc
from runtime.config_file import load_config
from runtime.native import abilities

FLEET = {
    "expected_nodes": 2,
    "ready": False,
    "missing": ["node-1 does not serve"],
    "nodes": [
        {
            "node": "node-0",
            "serving": True,
            "models": [{"name": "upbeat-demo", "chunk_tokens": 32}],
            "running": 3,
            "waiting": 1,
            "outstanding_tokens": 120.0,
        }
        | {
            "advised": 2,
            "hbm_pages_total": 100,
            "hbm_pages_free": 75,
            "hbm_pages_cached": 60,
            "dram_bytes_total": 1 << 31,
            "dram_bytes_used": 1 << 30,
        }
        | {"ssd_bytes_used": 0, "sessions": 7},
        {"node": "node-1", "serving": False},
    ],
}
SESSION = {"id": "chat-1", "model": "upbeat-demo", "tokens": 640, "last_use_s": 0, "node": None, "held_by": ["node-0"]}
TIERS = [
    {"tier": "dram", "tokens": 640, "layer_chunks": [10, 10], "bytes": 1 << 20},
    {"tier": "hbm", "tokens": 64, "layer_chunks": [10, 1], "bytes": 9},
]


PLACEMENT = {
    "id": "chat-1",
    "object": "session.placement",
    "decisions": [
        {
            "what": "turn",
            "ago_s": 2.0,
            "node": "node-0",
            "request_id": "r1",
            "hinted": True,
            "prefetched_node": "node-0",
        }
        | {"prefetched_s": 3.5, "moves": 0, "pin_node": None, "avoided_nodes": 0, "source_nodes": [], "worth": None}
        | {
            "scores": [
                {"node": f"node-{i}", "sum": 0.5 + i, "terms": {"load_s": 0.5, "work_s": float(i)}} for i in range(2)
            ]
        }
    ],
}


LEAVING = {
    "id": "leaving",
    "status": "erasing",
    "nodes": [
        {"node": "node-0", "answered": True, "verified": False, "left": {"blob": 3}},
        {"node": "node-1", "answered": False, "verified": False, "left": {}},
    ],
}


class GatewayStandIn(ThreadingHTTPServer):
    """Answers the routes that the command line asks for, and remembers what it was asked. `all_serve`: the status of
    /ready?all=1. `ready`: what /v1/fleet says."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.asked: list[tuple[str, str, dict[str, str], Any]] = []
        self.all_serve, self.ready = 200, True
        self.sessions = [SESSION]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    server: GatewayStandIn

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.server.asked.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        status, answer = self._route(body)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _route(self, body: Any) -> tuple[int, Any]:
        if self.headers.get("authorization") == "Bearer wrong-key":
            return 401, {"error": {"message": "unknown key"}}
        known: dict[str, tuple[int, Any]] = {
            "/health": (200, {}),
            "/ready?all=1": (self.server.all_serve, {"missing": FLEET["missing"]}),
            "/v1/fleet": (200, FLEET | {"ready": self.server.ready}),
            "/v1/fleet?metrics=true": (
                200,
                FLEET | {"nodes": [FLEET["nodes"][0] | {"metrics": self._samples()}, FLEET["nodes"][1]]},
            ),
            "/v1/sessions": (200, {"data": self.server.sessions}),
            "/v1/sessions?order=id&limit=1000&after=": (
                200,
                {"data": [SESSION], "has_more": True, "last_id": "chat/1"},
            ),
            "/v1/sessions?order=id&limit=1000&after=chat%2F1": (
                200,
                {"data": [SESSION | {"id": "chat-2"}], "has_more": False},
            ),
            "/v1/sessions?limit=1": (200, {"data": [SESSION], "has_more": True}),
            "/v1/sessions/leaving": (200, LEAVING),
            "/v1/sessions?limit=10": (200, {"data": self.server.sessions}),
            "/v1/sessions/chat-1/placement": (200, PLACEMENT),
            "/v1/sessions/chat-1": (200, SESSION | {"nodes": [{"node": "node-0", "tiers": TIERS}]}),
        }
        if self.command == "POST":
            return 202, {"session_id": body["session_id"], "status": "accepted"}
        if self.command == "DELETE" and self.path.startswith("/v1/models/"):
            return 200, {"id": "m:mine", "object": "model", "deleted": True}
        return known.get(self.path, (404, {"error": {"message": "no node holds it"}}))

    def _samples(self) -> dict[str, float]:
        """Counters that grow with every look."""
        looks = sum(path == "/v1/fleet?metrics=true" for _, path, _, _ in self.server.asked)
        return {
            'upbeat_kvstore_hit_bytes_total{tier="dram"}': 300.0 * looks,
            'upbeat_kvstore_hit_bytes_total{tier="ssd"}': 100.0 * looks,
            'upbeat_worker_hit_bytes_total{tier="hbm"}': 100.0 * looks,
            'upbeat_kvstore_tier_up{tier="ssd_write"}': 0.0,
            'upbeat_kvstore_used_bytes{tier="ssd"}': 24e6,
            'upbeat_kvstore_limit_bytes{tier="ssd"}': 4.0 * (1 << 30),
            'upbeat_kvstore_used_bytes{tier="blob"}': 30.0 * (1 << 20),
            'upbeat_kvstore_disk_free_bytes{tier="ssd"}': 1.5 * (1 << 30),
            'upbeat_kvstore_hint_bytes_total{outcome="used"}': float(looks << 20),
            'upbeat_kvstore_evicted_bytes_total{tier="dram",reason="unadvised"}': 3.0 * (1 << 20),
            'upbeat_kvstore_write_back_waiting_bytes{tier="blob"}': 5.0 * (1 << 20),
        }

    do_GET = do_POST = do_DELETE = _answer


@pytest.fixture
def gateway() -> Iterator[GatewayStandIn]:
    server = GatewayStandIn()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_status_shows_every_node(gateway: GatewayStandIn) -> None:
    done = upbeat("status", "--url", gateway.url)
    assert done.returncode == 0, done.stderr
    assert "1 of 2 nodes serve" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith("node-0"))
    assert {"serving", "upbeat-demo", "3", "1", "120", "2", "25%", "7"} <= set(row.split())
    assert "1.00 of 2.00 GiB" in row
    assert any(line.startswith("node-1") and "not serving" in line for line in done.stdout.splitlines())


def test_the_version_is_that_of_what_is_installed() -> None:
    done = upbeat("--version")
    assert (done.returncode, done.stdout) == (0, f"upbeat {metadata.version('upbeat-server')}\n")


def test_status_fails_while_one_node_is_away_though_the_stack_is_ready(gateway: GatewayStandIn) -> None:
    gateway.all_serve = 503
    done = upbeat("status", UPBEAT_URL=gateway.url)
    assert (done.returncode, done.stdout.partition(":")[0]) == (1, "partly ready")
    assert "1 of 2 nodes serve (node-1 does not serve)" in done.stdout
    as_json = upbeat("status", "--json", UPBEAT_URL=gateway.url)
    told = json.loads(as_json.stdout)
    assert (as_json.returncode, told["ready"], told["all_serve"]) == (1, True, False)


def test_status_fails_while_the_stack_is_not_ready_and_says_why(gateway: GatewayStandIn) -> None:
    gateway.all_serve, gateway.ready = 503, False
    done = upbeat("status", UPBEAT_URL=gateway.url)
    assert done.returncode == 1
    assert "not ready" in done.stdout and "node-1 does not serve" in done.stdout
    as_json = upbeat("status", "--json", UPBEAT_URL=gateway.url)
    assert as_json.returncode == 1
    assert (
        json.loads(as_json.stdout)["ready"] is False
        and not json.loads(as_json.stdout)["all_serve"]
        and json.loads(as_json.stdout)["nodes"] == FLEET["nodes"]
    )


def test_all_sessions_are_listed_page_by_page_and_one_that_is_being_erased_says_so(gateway: GatewayStandIn) -> None:
    everything = upbeat("sessions", "--all", "--json", "--url", gateway.url).stdout.splitlines()
    assert [s["id"] for line in everything for s in json.loads(line)["data"]] == ["chat-1", "chat-2"]
    assert "--all" in upbeat("sessions", "--limit", "1", "--url", gateway.url).stdout
    shown = upbeat("sessions", "leaving", "--url", gateway.url).stdout
    assert "being erased" in shown and "blob 3" in shown and "node-1" in shown


def test_sessions_are_listed_and_one_is_shown_tier_by_tier(gateway: GatewayStandIn) -> None:
    listed = upbeat("sessions", "--url", gateway.url).stdout
    assert "chat-1" in listed and "640" in listed and "node-0" in listed
    shown = upbeat("sessions", "chat-1", "--url", gateway.url).stdout
    assert any({"node-0", "dram", "640", "10"} <= set(line.split()) for line in shown.splitlines())
    assert "1 to 10" in shown
    assert json.loads(upbeat("sessions", "--json", "--url", gateway.url).stdout) == {"data": [SESSION]}
    assert json.loads(upbeat("sessions", "chat-1", "--json", "--url", gateway.url).stdout)["nodes"][0]["tiers"] == TIERS


@pytest.mark.parametrize("words", [["sessions"], ["top", "--rounds", "1"]], ids=" ".join)
def test_a_list_without_sessions_says_why_a_short_conversation_is_not_in_it(
    gateway: GatewayStandIn, words: list[str]
) -> None:
    gateway.sessions = []
    said = upbeat(*words, "--url", gateway.url, COLUMNS="80").stdout
    told = " ".join(said.split())
    assert "no sessions yet: one is listed when it has a whole chunk of tokens in the cache" in told
    assert "(kv.chunk_tokens, 32 here); a shorter conversation keeps nothing" in told
    assert max(map(len, said.splitlines())) <= 80


def test_a_placement_is_explained_in_words_and_as_json(gateway: GatewayStandIn) -> None:
    done = upbeat("explain", "chat-1", "--url", gateway.url)
    assert done.returncode == 0, done.stderr
    assert "turn r1, 2.0 s ago: node-0" in done.stdout and "sent its cache there 3.5 s before" in done.stdout
    assert any(line.split() == ["node-1", "0.5", "1", "1.5"] for line in done.stdout.splitlines())
    assert json.loads(upbeat("explain", "chat-1", "--json", "--url", gateway.url).stdout) == PLACEMENT
    unknown = upbeat("explain", "nobody", "--url", gateway.url)
    assert unknown.returncode == 5 and "404" in unknown.stderr


def test_top_shows_sums_since_the_start_and_then_what_each_interval_added(gateway: GatewayStandIn) -> None:
    done = upbeat("top", "--every", "0.05", "--rounds", "2", "--url", gateway.url)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.split("since the last look")
    assert "1 of 2 nodes serve" in first and "chat-1" in second
    for screen in (first, second):
        assert "20%, 60%, 20%, 0%, 0%" in screen and "1.0, 0.0, 0.0 MiB" in screen and "5.0 MiB wait" in screen
        assert "22.9 MiB of 4.00 GiB" in screen and "1.50 GiB, -" in screen
        assert any(
            line.startswith("blob used") and "30.0 MiB" in line and " of " not in line for line in screen.splitlines()
        )
        assert any(line.startswith("tiers left alone") and "ssd_write" in line for line in screen.splitlines())
    assert "3.0, 0.0 MiB" in first and "3.0, 0.0 MiB" not in second
    refused = upbeat("top", "--every", "0", "--url", gateway.url)
    assert refused.returncode == 2 and "--every must be more than 0" in refused.stderr


def test_an_id_is_one_path_segment_whatever_it_holds(gateway: GatewayStandIn) -> None:
    done = upbeat("sessions", "../models?x", "--url", gateway.url)
    assert done.returncode == 5 and "answered 404: no node holds it" in done.stderr
    assert gateway.asked[-1][1] == "/v1/sessions/..%2Fmodels%3Fx"


def test_an_advisory_carries_what_was_given(gateway: GatewayStandIn) -> None:
    done = upbeat(
        "advise", "chat-1", "--expected-arrival", "2.5", "--priority", "-3", "--node", "node-1", "--url", gateway.url
    )
    assert done.returncode == 0, done.stderr
    method, path, headers, body = gateway.asked[-1]
    assert (method, path, headers["x-upbeat-node"]) == ("POST", "/v1/advisory", "node-1")
    assert body == {"session_id": "chat-1", "expected_arrival": 2.5, "priority": -3}
    assert json.loads(upbeat("advise", "chat-1", "--json", "--url", gateway.url).stdout)["status"] == "accepted"
    assert "x-upbeat-node" not in gateway.asked[-1][2]


def test_an_invalidation_names_the_session(gateway: GatewayStandIn) -> None:
    assert upbeat("invalidate", "chat-1", "--url", gateway.url).returncode == 0
    assert gateway.asked[-1][0::3] == ("POST", {"session_id": "chat-1"}) and gateway.asked[-1][1] == "/v1/invalidate"


def test_a_model_is_removed_by_its_name(gateway: GatewayStandIn) -> None:
    done = upbeat("models", "--remove", "m:mine/[x]", "--url", gateway.url)
    assert done.returncode == 0 and "removed: m:mine/[x];" in done.stdout, done.stderr
    assert [asked[:2] for asked in gateway.asked] == [("DELETE", "/v1/models/m%3Amine%2F%5Bx%5D")]
    assert json.loads(upbeat("models", "--remove", "m:mine", "--json", "--url", gateway.url).stdout)["deleted"]


def test_the_key_comes_from_the_environment_and_a_refused_one_is_named(gateway: GatewayStandIn) -> None:
    assert upbeat("sessions", "--url", gateway.url, UPBEAT_API_KEY="right-key").returncode == 0
    assert gateway.asked[-1][2]["authorization"] == "Bearer right-key"
    done = upbeat("sessions", "--url", gateway.url, UPBEAT_API_KEY="wrong-key")
    assert done.returncode == 4 and "401: unknown key" in done.stderr and "not known there" in done.stderr


def test_when_nobody_answers_one_line_says_what_to_do() -> None:
    for words in (["status"], ["sessions"], ["advise", "s"], ["invalidate", "s"]):
        done = upbeat(*words, "--url", "http://127.0.0.1:9")
        assert done.returncode == 3
        assert len(done.stderr.splitlines()) == 1 and "upbeat up" in done.stderr and done.stdout == ""


def test_a_probe_is_the_exit_status(gateway: GatewayStandIn) -> None:
    assert upbeat("probe", gateway.url).returncode == 0
    assert upbeat("probe", "http://127.0.0.1:9").returncode == 1
    assert upbeat("probe", "grpc://127.0.0.1:9").returncode == 1
    assert upbeat("probe", "ftp://x").returncode == 1


async def test_a_service_that_drains_is_alive_though_not_healthy() -> None:
    server, checker = rpc.server("127.0.0.1:0", [])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        for serving in (True, False):
            await rpc.set_serving(checker, serving)
            said = await asyncio.to_thread(healthy, f"grpc://127.0.0.1:{port}", 5.0, None, None)
            assert said == ("" if serving else f"grpc://127.0.0.1:{port}: NOT_SERVING")
            assert not await asyncio.to_thread(healthy, f"grpc://127.0.0.1:{port}", 5.0, None, None, alive=True)
    finally:
        await server.stop(0)
    assert "UNAVAILABLE" in healthy(f"grpc://127.0.0.1:{port}", 5.0, None, None, alive=True)


def test_a_probe_asks_a_vllm_server_on_its_socket(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    assert upbeat("probe", f"unix:{path}").returncode == 1
    answers = [b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n", b""]
    asked = []
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def serve() -> None:
            for answer in answers:
                connection = listening.accept()[0]
                with connection:
                    asked.append(connection.recv(1 << 16))
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        said = [healthy(f"unix:{path}", 5.0, None, None) for _ in answers]
        thread.join()
    assert said[0] == "" and said[1] == f"{path}: /health answered 503" and str(path) in said[2]
    assert all(line.startswith(b"GET /health HTTP/1.1\r\n") for line in asked)


def test_the_doctor_looks_at_everything(tmp_path: Path) -> None:
    done = upbeat("doctor", "--json", "--port", "13900", "--data", str(tmp_path / "data"), cwd=tmp_path)
    found = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    assert {
        "python",
        "torch",
        "ports",
        "shared memory",
        "memory",
        "disk",
        "nixl",
        "kernels",
        "weights",
        "listening",
    } <= set(found)
    assert all(f["level"] == "ok" or f["remedy"] for f in found.values()), "what is not well comes with a remedy"
    assert "GFLOP/s a thread" in found["kernels"]["detail"]
    assert (done.returncode == 0) == json.loads(done.stdout)["ok"]
    assert not (tmp_path / "data").exists(), "a doctor changes nothing"


def test_the_doctor_says_why_the_kernels_cannot_be_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho this compiler is broken >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for choice, level in (
        ({"kernels": "auto"}, "warn"),
        ({"kernels": "native"}, "fail"),
        ({"kernels": "torch"}, "ok"),
        ({"device": "cuda"}, "ok"),
    ):
        [found] = doctor._kernels(load_config(None, {"worker": choice}))
        assert (found.check, found.level) == ("kernels", level)
        assert level == "ok" or ("this compiler is broken" in found.detail and found.remedy)


@pytest.mark.slow
@pytest.mark.skipif("avx512f" not in abilities(), reason="needs a processor with AVX-512, to be compiled for without")
def test_the_doctor_says_why_kernels_are_slower_than_the_processor_lets_them_be(tmp_path: Path) -> None:
    old = tmp_path / "c++"
    old.write_text('#!/bin/sh\nexec c++ "$@" -mno-avx512f\n')
    old.chmod(0o755)
    done = upbeat("doctor", "--json", cwd=tmp_path, CXX=str(old), XDG_CACHE_HOME=str(tmp_path / "cache"))
    found = next(f for f in json.loads(done.stdout)["findings"] if f["check"] == "kernels")
    assert found["level"] == "warn" and "compiler" in found["remedy"]
    assert "built for avx2 registers and this processor has avx512" in found["detail"]


@pytest.mark.slow
@pytest.mark.sample
def test_the_doctor_reads_every_byte_of_the_weights(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL, model)
    weights = next(model.glob("*.safetensors"))
    digests = tmp_path / "run" / "digests"
    (tmp_path / "upbeat.yaml").write_text(f"model: {model}\nrun_dir: {tmp_path / 'run'}\n")

    def found() -> dict[str, str]:
        done = upbeat("doctor", "--json", "--config", "upbeat.yaml", "--data", str(tmp_path / "data"), cwd=tmp_path)
        return next(f for f in json.loads(done.stdout)["findings"] if f["check"] == "weights")

    assert found()["detail"].endswith("no digest of them is remembered")
    remember = (
        "import sys, time; from pathlib import Path; from worker.models.digest import cached_weights_digest as digest;"
    )
    remember += (
        "from worker.models.checkpoint import Checkpoint; digest(Checkpoint(Path(sys.argv[1])), "
        "Path(sys.argv[2]), time.time() + 60)"
    )
    subprocess.run([sys.executable, "-c", remember, str(model), str(digests)], check=True)
    assert found()["level"] == "ok" and "every byte fits" in found()["detail"]
    next(digests.iterdir()).write_text(bytes(32).hex())
    assert found()["level"] == "fail" and f"delete {digests}" in found()["remedy"]
    weights.write_bytes(weights.read_bytes()[:-10])
    assert found()["level"] == "fail" and "is not a readable safetensors file" in found()["detail"]


def test_the_doctor_names_a_port_that_is_taken(gateway: GatewayStandIn, tmp_path: Path) -> None:
    port = gateway.server_address[1]
    (tmp_path / "upbeat.yaml").write_text("worker: {kernels: torch}\n")  # which are not measured
    done = upbeat("doctor", "--config", "upbeat.yaml", "--port", str(port), cwd=tmp_path)
    line = next(line for line in done.stdout.splitlines() if " ports " in line)
    assert done.returncode == 1
    assert line.startswith("fail") and f"{port} (gateway)" in line and f"pid {os.getpid()}" in line


def test_without_a_command_help_is_shown_and_an_unknown_one_is_refused() -> None:
    assert "Commands:" in upbeat().stdout and upbeat().returncode == 0
    done = upbeat("fly")
    assert done.returncode == 2 and "fly" in done.stderr
