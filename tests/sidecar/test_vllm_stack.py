"""`upbeat up --engine vllm` with a real vLLM server: one node, asked through its sidecar and through the gateway."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from contracts.identity import node
from contracts.v1 import worker_pb2_grpc
from loadtest.random_model import SHAPES, make_random_model
from runtime.config_file import load_config
from runtime.metrics_page import read_metrics
from storelink.arena_sharing import arenas_of, remove_dead
from storelink.credentials import Credentials
from tests.sidecar.node import Answer, HttpCall

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

SHAPE = SHAPES["tiny"][0] | {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 6}
#: Starting vLLM takes half a minute on an idle core.
LIMIT_S = 300.0
LONG = "Tell me of the sea, and of the ships that sail it. " * 40


class UpVllm:
    """One `upbeat up --engine vllm`."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        model = make_random_model(folder / "model", SHAPE, 1, "float32")
        command = [
            *(str(Path(sys.executable).with_name("upbeat")), "up", "--nodes", "1", "--model", f"m={model}"),
            *("--engine", "vllm", "--vllm-args", "--enforce-eager --max-num-batched-tokens 2048"),
            *("--port", str(port), "--data", str(folder / "data"), "--run-dir", str(folder / "run")),
            # Of an odd number of bytes.
            *("--hbm-gib", "0.3", "--dram-gib", "0.1253"),
        ]
        with (folder / "output").open("ab") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=folder, start_new_session=True
            )  # fmt: skip
        self.worker = f"127.0.0.1:{port + 21}"

    @property
    def said(self) -> str:
        logs = "".join(p.read_text()[-3000:] for p in sorted((self.folder / "run" / "logs").glob("[vs]*.log")))
        return (self.folder / "output").read_text() + logs

    def until(self, true: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> None:
        end = time.monotonic() + limit_s
        while not true():
            assert time.monotonic() < end and self.process.poll() is None, f"waited in vain until {what}\n{self.said}"
            time.sleep(0.1)

    def pid(self, name: str) -> int:
        """0 while it does not run."""
        pids: dict[str, int] = json.loads((self.folder / "run" / "pids.json").read_text())
        return pids.get(name, 0)

    def servers(self) -> list[psutil.Process]:
        """The processes of the vLLM server: its first one, and all that it has started."""
        (first,) = psutil.Process(self.pid("vllm-server-0")).children()
        return [first, *first.children(recursive=True)]

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON that the gateway answers."""
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=180) as answer:
            return json.loads(answer.read())

    def chat(self, session: str, text: str = LONG) -> Any:
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
        return self.ask("POST", "/v1/chat/completions", body | {"session_id": session})

    def node(self) -> dict[str, Any]:
        (node,) = self.ask("GET", "/v1/fleet")["nodes"]
        found: dict[str, Any] = node
        return found

    def state(self) -> str:
        """The node's state; "unknown" while no scheduler runs, or before it has heard of the node."""
        try:
            nodes = self.ask("GET", "/v1/fleet")["nodes"]
        except urllib.error.HTTPError:
            return "unknown"
        return nodes[0]["state"] if nodes else "unknown"

    def keeps(self, session: str) -> bool:
        """Whether the node's store has the session's KV."""
        try:
            held: bool = self.ask("GET", f"/v1/sessions/{session}").get("held_by") == ["node-0"]
        except urllib.error.HTTPError:
            return False  # not known yet
        return held

    def credentials(self, who: str) -> Credentials:
        return Credentials(self.folder / "data" / "tls" / who)

    def metric(self, name: str) -> float:
        text = read_metrics("127.0.0.1", self.port + 23, self.credentials("operator"), 20.0)
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)
        config = load_config(None, {"data": str(self.folder / "data")})
        remove_dead(arenas_of(config.node(0).arena_stem))


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; what nobody waits for stays as a zombie in a container."""
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], int]) -> Iterator[UpVllm]:
    made = UpVllm(tmp_path_factory.mktemp("up"), free_ports(45))
    try:
        made.until(lambda: "Upbeat serves m on" in (made.folder / "output").read_text(), "it serves")
        yield made
    finally:
        made.close()


async def through_sidecar(stack: UpVllm, path: str, body: Any, **head: Any) -> Answer:
    """What the sidecar answers."""
    named = [("grpc.ssl_target_name_override", node("node-0").dns)]
    own = stack.credentials("gateway").client()
    async with grpc.aio.secure_channel(stack.worker, own, options=named) as channel:
        call = HttpCall(worker_pb2_grpc.WorkerStub(channel))  # type: ignore[no-untyped-call]
        asking = call.begin(**{"request_id": f"r-{time.monotonic_ns()}", "path": path} | head)
        asking.send(json.dumps(body).encode())
        try:
            return await asking.whole(180.0)
        finally:
            await call.close()


async def test_every_route_of_the_server_answers_through_the_sidecar(stack: UpVllm) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 3},
        "/v1/completions": {"prompt": "Hello", "max_tokens": 3},
        "/v1/responses": {"input": "Hello", "max_output_tokens": 3},
        "/v1/messages": {"messages": messages, "max_tokens": 3},
        "/v1/messages/count_tokens": {"messages": messages},
        "/tokenize": {"prompt": "Hello"},
        "/detokenize": {"tokens": [5, 6]},
    }
    for path, body in bodies.items():
        answer = await through_sidecar(stack, path, {"model": "m"} | body, session_id="s-1", priority=2)
        assert answer.status == 200, (path, answer.body)
    refused = await through_sidecar(stack, "/v1/chat/completions", {"model": "m", "messages": "x"})
    assert refused.status == 400 and not refused.failures, "vLLM's own errors come through"


async def test_a_stream_comes_token_by_token_and_ends_on_the_server_with_its_call(stack: UpVllm) -> None:
    body = {"model": "m", "prompt": "Hello", "max_tokens": 30, "stream": True, "ignore_eos": True}
    answer = await through_sidecar(stack, "/v1/completions", body)
    assert answer.body.endswith(b"data: [DONE]\n\n") and len(answer.pieces) > 5
    long = body | {"max_tokens": 15_000}
    call = asyncio.ensure_future(through_sidecar(stack, "/v1/completions", long))
    await asyncio.to_thread(stack.until, lambda: stack.node()["running"] == 1, "it runs")
    call.cancel()
    await asyncio.to_thread(stack.until, lambda: stack.node()["running"] == 0, "vLLM has aborted it", 60.0)
    await asyncio.to_thread(stack.until, lambda: stack.metric("upbeat_sidecar_in_flight") == 0, "none is in flight")


async def test_tenants_and_salts_share_nothing_in_vllms_own_cache(stack: UpVllm) -> None:
    body = {"model": "m", "prompt": LONG + "tenants", "max_tokens": 1}

    async def hits(**head: Any) -> float:
        before = stack.metric('upbeat_worker_hit_bytes_total{tier="hbm"}')
        assert (await through_sidecar(stack, "/v1/completions", body, **head)).status == 200
        await asyncio.sleep(2.0)
        return stack.metric('upbeat_worker_hit_bytes_total{tier="hbm"}') - before

    assert await hits(tenant="one") == 0
    assert await hits(tenant="two") == 0
    assert await hits(tenant="one", cache_salt="own") == 0
    assert await hits(tenant="one") > 0


def test_the_gateway_serves_it_and_the_scheduler_knows_its_load(stack: UpVllm) -> None:
    answer = stack.chat("talk-1")
    assert answer["choices"][0]["message"]["content"] and answer["usage"]["completion_tokens"] == 4
    (model,) = stack.ask("GET", "/v1/models")["data"]
    assert model["id"] == "m" and model["state"] == "active"
    stack.until(lambda: stack.keeps("talk-1"), "its KV is kept", 60.0)
    node = stack.node()
    assert node["state"] == "serving" and node["hbm_pages_total"] > 0


def test_an_idle_server_forgets_an_erased_session_at_once(stack: UpVllm) -> None:
    stack.chat("to-erase", "Erase me. " + LONG)
    stack.until(lambda: stack.keeps("to-erase"), "its KV is kept", 60.0)
    time.sleep(2.0)
    before, began = stack.metric("upbeat_sidecar_wakes_total"), time.monotonic()
    erased = stack.ask("DELETE", "/v1/sessions/to-erase")
    took_s = time.monotonic() - began
    assert erased["verified"] and took_s < 5.0, (erased, took_s)
    assert stack.metric("upbeat_sidecar_wakes_total") > before
    print(f"an erasure on an idle server was verified in {took_s:.2f} s")


def test_other_users_can_neither_reach_the_server_nor_read_its_key(stack: UpVllm) -> None:
    place = stack.folder / "run" / "vllm-0"
    assert place.stat().st_mode & 0o077 == 0
    key = (place / "key").read_text().strip()
    for process in stack.servers():
        assert key not in " ".join(process.cmdline())
        listening = {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert listening <= {"127.0.0.1", "::1"}, f"{process.name()} listens on {listening}"


def test_a_stopped_server_is_stalled_until_it_goes_on(stack: UpVllm) -> None:
    for process in stack.servers():
        process.suspend()
    try:
        stack.until(lambda: stack.state() == "suspect", "the scheduler hears that it is stalled", 60.0)
    finally:
        for process in stack.servers():
            process.resume()
    stack.until(lambda: stack.state() == "serving", "it goes on", 60.0)
    assert stack.chat("talk-1")["choices"]


def test_requests_are_answered_while_the_scheduler_is_dead_and_after(stack: UpVllm) -> None:
    answer = stack.chat("talk-1")["choices"][0]["message"]["content"]
    before = stack.pid("scheduler")
    os.kill(before, signal.SIGKILL)
    for _ in range(3):
        assert stack.chat("talk-1")["choices"][0]["message"]["content"] == answer
    stack.until(lambda: stack.pid("scheduler") not in (0, before), "another scheduler runs", 60.0)
    stack.until(lambda: stack.state() == "serving", "it knows the node", 60.0)
    assert stack.chat("talk-1")["choices"][0]["message"]["content"] == answer


async def test_a_killed_server_is_replaced_and_its_sessions_come_from_the_store(stack: UpVllm) -> None:
    stack.chat("talk-2", "Remember. " + LONG)
    stack.chat("talk-3", "Remember a hint. " + LONG)
    stack.until(lambda: stack.keeps("talk-2") and stack.keeps("talk-3"), "their KV is kept", 60.0)
    before = stack.servers()
    before[0].kill()
    stack.until(lambda: stack.metric("upbeat_sidecar_server_up") == 0, "the sidecar notices", 60.0)
    status, _, ran, _ = (await through_sidecar(stack, "/tokenize", {"model": "m", "prompt": "x"})).failure
    assert status == 503 and not ran
    stack.until(lambda: stack.metric("upbeat_sidecar_server_up") == 1, "another one serves")
    assert not living(before), "its engine is gone too"
    loaded = stack.metric("upbeat_worker_loaded_bytes_total")
    stack.until(lambda: stack.state() == "serving", "it takes requests", 60.0)
    assert stack.chat("talk-2", "Remember. " + LONG)["choices"]
    stack.until(lambda: stack.metric("upbeat_worker_loaded_bytes_total") > loaded, "the store brought its KV", 30.0)
    warms_up(stack)


def warms_up(stack: UpVllm) -> None:
    """A hint brings a session that the server does not know into its own cache, and the next turn reads nothing."""
    assert not stack.metric("upbeat_sidecar_warm_ups_total")
    stack.ask("POST", "/v1/advisory", {"session_id": "talk-3"})
    stack.until(lambda: stack.metric("upbeat_sidecar_warm_ups_total") == 1, "it is warmed up", 60.0)
    time.sleep(2.0)  # figures are read once a second
    loaded, hit = (stack.metric(f"upbeat_worker_{name}_bytes_total") for name in ("loaded", "hit"))
    assert stack.chat("talk-3", "Remember a hint. " + LONG)["choices"]
    stack.until(lambda: stack.metric("upbeat_worker_hit_bytes_total") > hit, "vLLM has it in its own cache", 30.0)
    assert stack.metric("upbeat_worker_loaded_bytes_total") == loaded


def test_it_stops_in_order_and_leaves_nothing(stack: UpVllm) -> None:
    servers = stack.servers()
    os.killpg(stack.process.pid, signal.SIGINT)
    assert stack.process.wait(60) == 0, stack.said
    assert not living(servers)
    left = sorted(path.name for path in (stack.folder / "run" / "vllm-0").iterdir())
    assert left == ["key", "lock"]
