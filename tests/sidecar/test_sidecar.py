"""A sidecar as scheduler and gateways see it: when it joins, what it reports, how it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import stat
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import ConfigError
from contracts.frames import encode_submit, together
from contracts.ids import SessionKey
from contracts.kv import MAX_NOTE_BYTES
from contracts.request import GenerateRequest, Sampling
from contracts.v1 import scheduler_pb2
from contracts.v1 import worker_pb2 as pb
from contracts.warm_up import encode_warm_up, note_of
from runtime.service import Tasks
from runtime.vllm_places import vllm_places
from sidecar.__main__ import SidecarProcess, _key_of
from sidecar.core import server_state
from tests.sidecar.fake_vllm import FakeVllm, serving, streamed
from tests.sidecar.node import Node, configured

Made = tuple[Node, FakeVllm]
Make = Callable[..., Any]


# ---- joining ---------------------------------------------------------------------------------------------------------
async def test_it_joins_once_its_server_serves_and_says_what_that_is(make_node: Make) -> None:
    node, fake = await make_node({"models": {"m": {"path": "/nowhere", "engine": "vllm", "ttft_s": 0.5}}}, server=None)
    await asyncio.sleep(0.5)
    assert not node.listener.hellos
    async with serving(fake.place):
        await node.up()
        (hello,) = node.listener.hellos
        (model,) = hello.models
        assert (hello.node, hello.address, hello.device, hello.devices) == (
            "node-0",
            node.config.device(0, 0).worker_address,
            0,
            1,
        )
        assert (model.name, model.engine, model.wire) == ("m", "vllm", scheduler_pb2.MODEL_WIRE_HTTP)
        assert (model.state, model.max_tokens, model.ttft_slo_s) == (scheduler_pb2.MODEL_STATE_ACTIVE, 4096, 0.5)
        assert model.shape.chunk_tokens == 64 and len(model.shape.fingerprint) == 32


async def test_sizes_come_from_the_models_config_or_that_of_the_weights_the_server_names(
    make_node: Make, tmp_path: Any
) -> None:
    there = tmp_path / "weights"
    there.mkdir()
    config = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    (there / "config.json").write_text(json.dumps(config))
    node, _ = await make_node(server={"root": str(there)})
    (model,) = node.listener.hellos[0].models
    assert (model.shape.layers, model.shape.kv_heads, model.shape.head_dim) == (3, 2, 16)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"key": "another"}, "refuses our API key"),
        ({"model": "other"}, "serves other"),
        ({"fields": {}}, "none of the routes"),
        ({"fields": {"/tokenize": [[]], "/v1/chat/completions": [[]]}}, "neither POST"),
    ],
)
async def test_a_server_that_cannot_be_a_nodes_is_not_reported(
    make_node: Make, settings: dict[str, Any], why: str
) -> None:
    node, fake = await make_node(server=None)
    async with serving(fake.place, **settings):
        await node.until(lambda: why in node.sidecar.watching.why)
        status, message, *_ = (await node.ask()).failure
        assert status == 503 and why in message
    assert not node.listener.hellos


async def test_a_node_without_a_model_in_vllm_has_no_sidecar(tmp_path: Any, free_ports: Callable[[int], int]) -> None:
    models = {"m": {"path": "/a", "engine": "vllm", "nodes": [0]}, "n": {"path": "/b", "nodes": [1]}}
    config = configured(tmp_path, free_ports(30), models=models, nodes={"count": 2})
    with pytest.raises(ConfigError, match=r"--node 1.*models\.NAME\.engine: vllm"):
        SidecarProcess(config, 1, 0, Tasks())
    with pytest.raises(ConfigError, match="--node 5"):
        SidecarProcess(config, 5, 0, Tasks())


async def test_two_sidecars_of_one_device_are_refused(node: Made) -> None:
    made, _ = node
    again = SidecarProcess(made.config, 0, 0, Tasks())
    with pytest.raises(ConfigError, match="in use by another worker"):
        await again.start()


def test_the_key_of_a_server_elsewhere_comes_from_its_variable(
    tmp_path: Any, free_ports: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = {"server": "http://127.0.0.1:1", "api_key_env": "THEIR_KEY"}
    config = configured(tmp_path, free_ports(30), vllm=elsewhere)
    monkeypatch.delenv("THEIR_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"vllm\.api_key_env = 'THEIR_KEY'"):
        _key_of(config, "http://127.0.0.1:1", vllm_places(config, 0))
    monkeypatch.setenv("THEIR_KEY", "k")
    assert _key_of(config, "http://127.0.0.1:1", vllm_places(config, 0))() == "k"


# ---- reports ---------------------------------------------------------------------------------------------------------
async def test_requests_are_reported_while_they_run_and_once_they_have_ended(node: Made) -> None:
    made, server = node
    go = asyncio.Event()

    async def wait(number: int) -> None:
        await go.wait()

    server.answer = streamed("one", wait=wait)
    server.figures |= {"num_requests_running": 1.0, "kv_cache_usage_perc": 0.5, "prompt_tokens_total": 6400.0}
    asked = asyncio.ensure_future(made.ask(request_id="r-7", priority=-3, prompt_tokens=200, kept_tokens=80))
    loads = made.listener.loads
    await made.until(lambda: list(loads[-1].in_flight) == ["r-7"] and loads[-1].hbm_pages_free > 0)
    await made.until(lambda: loads[-1].hbm_pages_free < loads[-1].hbm_pages_total)
    load = loads[-1]
    layers = made.sidecar.served.shape.layers
    assert (load.running, load.waiting) == (1, 0)
    assert (load.hbm_pages_total, load.hbm_pages_free) == (100 * layers, 50 * layers)
    assert load.outstanding_tokens == pytest.approx(120 + 128) and set(load.outstanding_by_priority) == {-3}
    assert load.models[0].model == "m" and load.models[0].kv_bytes_used > 0
    go.set()
    await asked
    await made.until(lambda: made.listener.finished == ["r-7"] and not loads[-1].in_flight)


async def test_a_request_that_is_refused_does_not_stay_outstanding(node: Made) -> None:
    made, _ = node
    await made.ask(request_id="r-8", path="/nowhere")
    await made.until(lambda: made.listener.finished == ["r-8"])


async def test_pace_is_reported_once_it_is_known(node: Made) -> None:
    made, server = node
    loads = made.listener.loads
    assert loads[-1].prefill_token_s == 0 and loads[-1].request_s == 0
    await asyncio.sleep(1.2)  # figures from before the change have been read
    server.figures |= {
        "request_prefill_time_seconds_count": 11.0,
        "request_prefill_time_seconds_sum": 5.0,
        "request_decode_time_seconds_sum": 20.0,
        "request_prefill_kv_computed_tokens_sum": 10_000.0,
        "request_generation_tokens_sum": 1000.0,
    }
    await made.until(lambda: loads[-1].prefill_token_s > 0)
    assert loads[-1].prefill_token_s == pytest.approx(0.0005) and loads[-1].request_s > 0.5


async def test_a_server_that_dies_is_reported_as_loading_and_active_when_it_is_back(node: Made) -> None:
    made, server = node
    loads, states = made.listener.loads, scheduler_pb2
    assert loads[-1].models[0].state == states.MODEL_STATE_ACTIVE
    await server.die()
    await made.until(lambda: loads[-1].models[0].state == states.MODEL_STATE_LOADING)
    assert not loads[-1].draining, "a node that drains would not come back"
    async with serving(server.place):
        await made.until(lambda: loads[-1].models[0].state == states.MODEL_STATE_ACTIVE)
    assert len(made.listener.hellos) == 1


async def test_a_dead_engine_is_a_server_that_is_down(node: Made) -> None:
    made, server = node
    server.engine_is_dead = True
    await made.until(lambda: made.listener.loads[-1].models[0].state == scheduler_pb2.MODEL_STATE_LOADING)


async def test_a_server_that_comes_back_with_another_context_ends_the_sidecar(node: Made) -> None:
    made, server = node
    await server.die()
    await made.until(lambda: not made.sidecar.watching.up)
    async with serving(server.place, max_tokens=100):
        await made.until(lambda: made.tasks.failed.done())
    assert "context of 100 tokens" in str(made.tasks.failed.exception())


async def test_a_frozen_server_is_reported_as_stalled_and_not_as_gone(
    node: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, server = node
    monkeypatch.setattr(server_state, "SILENT_S", 0.2)
    loads = made.listener.loads
    server.freeze()
    await made.until(lambda: loads[-1].stalled_s > 2.0)
    assert loads[-1].models[0].state == scheduler_pb2.MODEL_STATE_ACTIVE, "its requests may go on"
    server.thaw()
    await made.until(lambda: loads[-1].stalled_s == 0)


async def test_an_engine_that_does_nothing_for_its_requests_is_reported_as_stalled(
    node: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, server = node
    monkeypatch.setattr(server_state, "STILL_S", 0.3)
    go = asyncio.Event()

    async def wait(number: int) -> None:
        await go.wait()

    server.answer = streamed("one", wait=wait)
    asked = asyncio.ensure_future(made.ask(prompt_tokens=100))
    loads = made.listener.loads
    await made.until(lambda: loads[-1].stalled_s > 1.0)
    server.figures["kv_cache_usage_perc"] = 0.1  # it computes a part of a long prompt
    await made.until(lambda: loads[-1].stalled_s == 0)
    go.set()
    await asked


# ---- gateways --------------------------------------------------------------------------------------------------------
async def test_a_gateways_stream_stays_open_and_hears_that_the_node_leaves(node: Made) -> None:
    made, server = node
    go = asyncio.Event()

    async def wait(number: int) -> None:
        await go.wait()

    server.answer = streamed("one", wait=wait)
    asked = asyncio.ensure_future(made.ask())
    await made.until(lambda: bool(server.seen))
    async with made.stream() as stream:
        await asyncio.sleep(0.2)
        assert not stream.seen
        drained = asyncio.ensure_future(made.sidecar.drain())
        await made.until(lambda: any(frame.leaving for frame in stream.seen))
        await made.until(lambda: made.listener.loads[-1].draining)
        failure = (await made.ask(request_id="r-2")).failure
        assert failure[0] == 503 and "shutting down" in failure[1] and not failure[2]
        assert not drained.done(), "what runs goes on"
        go.set()
        assert (await asked).status == 200
        await asyncio.wait_for(drained, 10)
        async with made.stream() as late:
            await made.until(lambda: any(frame.leaving for frame in late.seen))


async def test_a_request_in_frames_is_refused_with_a_reason(node: Made) -> None:
    made, _ = node
    request = GenerateRequest("r-9", "t", "s", "m", Sampling(), prompt="x")
    async with made.stream() as stream:
        stream.send(b"\xff not a frame")
        stream.send(together([encode_submit(request)]))
        await made.until(lambda: any(frame.failed for frame in stream.seen))
        (failed,) = [failed for frame in stream.seen for failed in frame.failed]
        assert failed.request_id == "r-9" and failed.error[0] == 503 and "Worker.Http" in failed.error[1]


async def test_tokenising_calls_are_refused_with_a_reason(node: Made) -> None:
    made, _ = node
    for reply in (
        await made.stub.Tokenize(pb.TokenizeRequest(model="m")),
        await made.stub.Detokenize(pb.DetokenizeRequest(model="m")),
    ):
        assert "Worker.Http" in json.loads(reply.refused)[1]


# ---- what the connector asks -----------------------------------------------------------------------------------------
async def said(path: Path, message: bytes) -> None:
    """The connector says it."""
    _, writer = await asyncio.open_unix_connection(str(path))
    writer.write(message)
    writer.close()
    with contextlib.suppress(OSError):  # it does not read what is too long
        await writer.wait_closed()


async def test_a_message_on_its_socket_makes_the_engine_step(node: Made) -> None:
    made, server = node
    path, before = vllm_places(made.config, 0).wake, server.tokens
    for _ in range(50):
        await said(path, b"")
    await made.until(lambda: server.tokens > before)
    await asyncio.sleep(0.7)
    assert before < server.tokens <= before + 5, "however often it is asked"
    assert made.sidecar.watching.wakes == server.tokens - before


async def test_a_hinted_session_on_its_socket_is_warmed_up(node: Made) -> None:
    made, _ = node
    path = vllm_places(made.config, 0).wake
    await said(path, b"nonsense")
    await said(path, bytes(2 * MAX_NOTE_BYTES))
    await said(path, encode_warm_up(SessionKey("t", "s"), note_of("salt", [5, 6, 7]), 3, 9.0))
    await made.until(lambda: made.sidecar.warming.warmed == 1)
    assert "upbeat_sidecar_warm_ups_total 1.0" in metrics(made)


async def test_only_this_user_reaches_its_socket_and_its_key(node: Made) -> None:
    made, _ = node
    places = vllm_places(made.config, 0)
    assert stat.S_IMODE(places.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(places.wake.stat().st_mode) == 0o600
    assert stat.S_IMODE(places.key.stat().st_mode) == 0o600


# ---- metrics ---------------------------------------------------------------------------------------------------------
def metrics(made: Node) -> str:
    port = made.config.device(0, 0).metrics_port
    text: bytes = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read()
    return text.decode()


async def test_its_metrics_count_requests_and_show_the_servers_main_figures(node: Made) -> None:
    made, server = node
    server.figures |= {"kv_cache_usage_perc": 0.5, "num_preemptions_total": 3.0}
    await made.ask({"a": "b"})
    await made.ask(path="/nowhere")
    await made.until(lambda: made.sidecar.watching.sample is not None and made.sidecar.watching.sample.preemptions == 3)
    text = await asyncio.to_thread(metrics, made)
    for line in (
        'upbeat_sidecar_requests_total{outcome="answered"} 1.0',
        'upbeat_sidecar_requests_total{outcome="refused"} 1.0',
        "upbeat_sidecar_in_flight 0.0",
        "upbeat_sidecar_server_up 1.0",
        "upbeat_sidecar_connector 1.0",
        'upbeat_worker_model_state{model="m"} 3.0',
        "upbeat_worker_preemptions_total 3.0",
    ):
        assert line in text.splitlines()
    assert 'upbeat_worker_used_bytes{tier="hbm"}' in text and 'upbeat_sidecar_bytes_total{way="down"}' in text
    await server.die()
    await made.until(lambda: not made.sidecar.watching.up)
    text = await asyncio.to_thread(metrics, made)
    assert 'upbeat_worker_model_state{model="m"} 2.0' in text and "upbeat_worker_used_bytes{" not in text


async def test_nothing_of_torch_is_imported() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys, sidecar.__main__, sidecar.vllm_server; sys.exit('torch' in sys.modules)",
    )
    assert await process.wait() == 0
