"""A hinted conversation through a whole stack: one trace a turn, as a collector gets it, and one id in every log."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from cli.log_lines import of_request, read
from loadtest.stack import Stack
from tests.e2e.chat import ALWAYS_LOAD, Chat, script
from tests.traced import SPAN_ID, TRACE_ID, Receiver, attributes_of

MODEL = Path(__file__).parents[2] / "models" / "demo"
SESSION = "private-session"
pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.sample, pytest.mark.timeout(580)]


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made


@pytest.fixture(scope="module")
def stack(receiver: Receiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    telemetry = {"traces": True, "endpoint": receiver.url, "ratio": 1.0, "traces_per_s": 0}
    settings = ALWAYS_LOAD | {"telemetry": telemetry, "log_level": "debug"}
    directory = tmp_path_factory.mktemp("stack")
    with Stack(
        model=MODEL, nodes=2, directory=directory, hbm_gib=0.25, dram_gib=0.25, settings=settings, ready_s=400
    ) as made:
        yield made


def wait_until(holds: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.1)


class Trace:
    """The spans of one trace, by name."""

    def __init__(self, receiver: Receiver, trace_id: str) -> None:
        self.spans = [(s, span) for s, span in receiver.spans() if span.trace_id.hex() == trace_id]

    def named(self, name: str) -> list[Any]:
        return [span for _, span in self.spans if span.name == name]

    def one(self, name: str) -> Any:
        [span] = self.named(name)
        return span

    def service(self, name: str) -> str:
        return next(service for service, span in self.spans if span.name == name)


def test_a_hinted_turn_is_one_trace_through_all_services(stack: Stack, receiver: Receiver) -> None:
    chat, lines = Chat(stack.url, SESSION), script(5, 3)
    chat.say(lines[0], "node-0", timeout_s=200)

    def turns() -> list[Any]:
        return [span for service, span in receiver.spans() if service == "upbeat-gateway" and span.name[:5] == "chat "]

    def trace_of(turn: int, *names: str) -> Trace:
        """The trace of a turn, once these spans have come: each process sends its own."""
        wait_until(lambda: len(turns()) == turn + 1)
        trace_id = turns()[turn].trace_id.hex()
        for name in names:
            wait_until(lambda name=name: bool(Trace(receiver, trace_id).named(name)))  # type: ignore[misc]
        return Trace(receiver, trace_id)

    # The first turn computes and saves.
    first = trace_of(0, "scheduler.place", "worker.generate", "kv save", "store.write_back")
    server, worker = turns()[0], first.one("worker.generate")
    assert (
        first.service("worker.generate") == "upbeat-worker" and first.service("scheduler.place") == "upbeat-scheduler"
    )
    assert worker.parent_span_id == server.span_id and not server.parent_span_id
    assert first.one("place").parent_span_id == server.span_id
    assert first.one("scheduler.place").parent_span_id == first.one("place").span_id
    for name in ("queue", "prefill", "decode", "kv save"):
        assert all(span.parent_span_id == worker.span_id for span in first.named(name)), name
    assert first.named("prefill") and first.one("decode")
    saves = {span.span_id for span in first.named("kv save")}
    assert saves >= {span.parent_span_id for span in first.named("store.write_back")} != set()
    told = attributes_of(server)
    assert told["gen_ai.usage.output_tokens"] > 0 and told["upbeat.node"] == "node-0"
    assert told["gen_ai.usage.cache_read.input_tokens"] == 0 and told["gen_ai.response.time_to_first_chunk"] > 0
    assert server.start_time_unix_nano <= worker.start_time_unix_nano < worker.end_time_unix_nano

    # A hint brings the session to the other node; the turn there is linked to it.
    chat.advise("node-1")
    for awaited in ("advise", "scheduler.place_hint", "store.prefetch"):
        wait_until(lambda name=awaited: any(span.name == name for _, span in receiver.spans()))  # type: ignore[misc]
    hint = next(span for _, span in receiver.spans() if span.name == "advise")
    hints = Trace(receiver, hint.trace_id.hex())
    assert {span.parent_span_id for _, span in hints.spans} == {b"", hint.span_id}
    assert attributes_of(hints.one("scheduler.place_hint"))["upbeat.node"] == "node-1"
    assert attributes_of(hints.one("store.prefetch"))["upbeat.kv.usable_chunks"] > 0
    answer = chat.say(lines[1], timeout_s=200)
    assert answer.node == "node-1" and answer.cached_tokens > 0
    second, server = trace_of(1, "worker.generate"), turns()[1]
    assert [(link.trace_id, link.span_id) for link in server.links] == [(hint.trace_id, hint.span_id)]
    told = attributes_of(server)
    assert told["gen_ai.usage.cache_read.input_tokens"] == answer.cached_tokens
    assert told["gen_ai.conversation.id"] == attributes_of(hint)["gen_ai.conversation.id"]
    loads = second.named("kv load")
    loaded = sum(attributes_of(span)["upbeat.kv.loaded_tokens"] for span in loads)
    in_hbm = sum(attributes_of(span)["upbeat.kv.hbm_tokens"] for span in loads)
    assert not loads or loaded + in_hbm == answer.cached_tokens

    # Without a hint, a turn on the first node reads what the second has.
    chat.say(lines[2], "node-0", timeout_s=200)
    third = trace_of(2, "worker.generate", "store.load")
    load = third.one("store.load")
    assert load.parent_span_id == third.one("worker.generate").span_id
    assert attributes_of(load)["upbeat.kv.found_chunks"] > 0

    # Nothing of what was said is in any of it.
    sent = b"".join(request.SerializeToString() for request in receiver.requests)
    for secret in (*lines, *(m["content"] for m in chat.messages if len(m["content"]) > 8), SESSION):
        assert secret.encode() not in sent


def test_one_id_is_in_the_logs_of_all_services_and_a_callers_trace_goes_on(stack: Stack, receiver: Receiver) -> None:
    text = " ".join(script(6, 1))
    parent = {"X-Request-Id": "order-42", "traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00", "tracestate": "a=1"}

    model = httpx.get(f"{stack.url}/v1/models").json()["data"][0]["id"]

    def ask(**headers: str) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
        session = {"X-Session-Id": "logs"}
        return httpx.post(f"{stack.url}/v1/chat/completions", json=body, headers=session | headers, timeout=200)

    ask(**{"X-Upbeat-Node": "node-0"})
    reply = ask(**parent, **{"X-Upbeat-Node": "node-1"})  # loads what the other node has
    assert (reply.status_code, reply.headers["X-Request-Id"]) == (200, "order-42"), reply.text

    def services() -> set[str]:
        found = of_request(read(stack.run_dir / "logs"), "order-42")
        return {line.fields["service"].partition("-")[0] for line in found}

    wait_until(lambda: services() == {"gateway", "scheduler", "worker", "kvstore"})

    def servers() -> list[Any]:
        return [span for _, span in Trace(receiver, TRACE_ID).spans if span.parent_span_id.hex() == SPAN_ID]

    wait_until(lambda: bool(servers()) and bool(Trace(receiver, TRACE_ID).named("worker.generate")))
    [server] = servers()
    assert server.trace_state == "a=1" and attributes_of(server)["upbeat.request_id"].endswith("/order-42")
    metrics = httpx.get(f"{stack.url}/metrics").text
    spans = [line for line in metrics.splitlines() if line.startswith("upbeat_spans_total{")]
    counts = {outcome: sum(float(s.split()[-1]) for s in spans if f'"{outcome}"' in s) for outcome in ("sent", "lost")}
    assert counts["sent"] > 0 and not counts["lost"], spans
    assert json.dumps(attributes_of(server)).count("order-42") == 1
