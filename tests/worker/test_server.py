"""The worker's stream: what is asked is made ready off the engine's thread, and what was cancelled meanwhile is never
run."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from llguidance import LLMatcher

from contracts.errors import ConfigError
from contracts.frames import StepFrame, decode_step, encode_cancel, encode_submit, submit_command, together
from contracts.request import GenerateRequest, Sampling, ToolUse
from contracts.v1 import worker_pb2
from runtime.sections import WorkerSection
from tests.worker.engine_harness import DEMO, Harness, tiny_model
from worker.engine import failpoints
from worker.sampling.grammars import GrammarCompiler
from worker.service.hosted import Hosted
from worker.service.server import WorkerServer
from worker.text.codec import TextCodec
from worker.text.tokenising import Tokenising

CLOSED = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": CLOSED}}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    made = Harness(tiny_model(tmp_path_factory.mktemp("tiny")))
    yield made
    made.close()


class Gateway:
    """The other end of the stream."""

    def __init__(self, server: WorkerServer) -> None:
        self._server, self._sent = server, asyncio.Queue[bytes | None]()
        self.seen: list[StepFrame] = []
        self._reader = asyncio.ensure_future(self._read())

    async def _frames(self) -> AsyncIterator[worker_pb2.Frame]:
        while (payload := await self._sent.get()) is not None:
            yield worker_pb2.Frame(payload=payload)

    async def _read(self) -> None:
        async for frame in self._server.Stream(self._frames(), None):
            self.seen.append(decode_step(frame.payload))

    def submit(self, request_id: str, *, seed: int = 1, **more: Any) -> None:
        sampling = Sampling(temperature=1.0, seed=seed, max_tokens=200)
        request = GenerateRequest(
            request_id, "t", "s", "tiny", sampling, messages=[{"role": "user", "content": "Hello"}], **more
        )
        self._sent.put_nowait(together([encode_submit(request)]))

    def send(self, frame: bytes) -> None:
        self._sent.put_nowait(frame)

    def cancel(self, request_id: str) -> None:
        self._sent.put_nowait(together([encode_cancel(request_id)]))

    async def ended(self, request_id: str) -> Any:
        """The last Output of a request, or its Failed."""
        async with asyncio.timeout(60):
            while True:
                for frame in self.seen:
                    for event in (*frame.failed, *(o for o in frame.outputs if o.finish_reason)):
                        if event.request_id == request_id:
                            return event
                await asyncio.sleep(0.01)

    def text(self, request_id: str) -> str:
        return "".join(o.text for f in self.seen for o in f.outputs if o.request_id == request_id)

    async def leave(self) -> None:
        self._sent.put_nowait(None)
        await self._reader


class Waiting(GrammarCompiler):
    """Compiles when told to, and notes on which threads."""

    def __init__(self, harness: Harness) -> None:
        super().__init__(harness.codec, harness.model.config.vocab_size, harness.model.eos_ids)
        self.go, self.threads = threading.Event(), []  # type: ignore[var-annotated]
        self.go.set()
        self.asked = threading.Event()

    def matcher(self, grammar: str, param: str) -> LLMatcher:
        self.threads.append(threading.current_thread().name)
        self.asked.set()
        assert self.go.wait(30)
        return super().matcher(grammar, param)


def hosted_of(server: WorkerServer) -> Hosted:
    """The one model that it serves."""
    [hosted] = server.models.values()
    return hosted


@pytest.fixture
async def server(harness: Harness) -> AsyncIterator[WorkerServer]:
    tokenising = Tokenising()
    hosted = Hosted(harness.engine, harness.codec, 1500, harness.model.config.vocab_size, WorkerSection(), tokenising)
    made = WorkerServer([hosted], tokenising)
    hosted.grammars.compiler = Waiting(harness)
    yield made
    await made.stop()


async def test_grammars_are_compiled_on_a_thread_of_their_own_and_only_when_asked_for(server: WorkerServer) -> None:
    gateway, grammars = Gateway(server), hosted_of(server).grammars.compiler
    assert isinstance(grammars, Waiting)
    gateway.submit("plain")
    assert (await gateway.ended("plain")).finish_reason in ("stop", "length") and grammars.threads == []
    grammars.go.clear()
    gateway.submit(
        "json",
        json_schema=json.dumps(
            {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}
        ),
    )
    gateway.submit("beside")
    assert (await gateway.ended("beside")).finish_reason in ("stop", "length"), "a slow schema delays no other request"
    grammars.go.set()
    assert (await gateway.ended("json")).finish_reason == "stop" and json.loads(gateway.text("json"))["a"] in (1, 22)
    assert len(grammars.threads) == 1 and grammars.threads[0].startswith("grammar")
    await gateway.leave()


async def test_what_is_cancelled_while_it_is_made_ready_never_runs(server: WorkerServer, harness: Harness) -> None:
    gateway, other, grammars = Gateway(server), Gateway(server), hosted_of(server).grammars.compiler
    assert isinstance(grammars, Waiting)
    grammars.go.clear()
    gateway.submit("gone", json_schema='{"type": "integer"}')
    other.submit("left", json_schema='{"type": "integer"}')
    await asyncio.to_thread(grammars.asked.wait, 30)
    gateway.cancel("gone")
    await other.leave()  # the whole gateway goes away
    gateway.submit("after")
    assert (await gateway.ended("after")).finish_reason in ("stop", "length")
    finished = len(harness.engine.finished)
    grammars.go.set()
    while hosted_of(server).grammars._learning:  # noqa: ASYNC110 - another class's state
        await asyncio.sleep(0.01)
    gateway.submit("last", json_schema='{"enum": [1]}')
    assert (await gateway.ended("last")).finish_reason == "stop"
    assert list(harness.engine.finished)[finished:] == ["last"] and not gateway.text("gone")
    await gateway.leave()


async def test_steps_that_wait_for_a_slow_stream_come_together(server: WorkerServer, harness: Harness) -> None:
    sent = asyncio.Queue[bytes]()

    async def frames() -> AsyncIterator[worker_pb2.Frame]:
        while True:
            yield worker_pb2.Frame(payload=await sent.get())

    sampling = Sampling(seed=1, max_tokens=40, ignore_eos=True)
    sent.put_nowait(together([encode_submit(GenerateRequest("slow", "t", "s", "tiny", sampling, prompt="Hello"))]))
    stream = server.Stream(frames(), None)
    seen = [decode_step((await anext(stream)).payload)]
    async with asyncio.timeout(60):
        while True:  # nobody reads meanwhile
            if "slow" in harness.engine.finished:
                break
            await asyncio.sleep(0.01)
    while not any(o.finish_reason for o in seen[-1].outputs):
        seen.append(decode_step((await anext(stream)).payload))
    await stream.aclose()
    outputs = [o for step in seen for o in step.outputs]
    assert [a.request_id for step in seen for a in step.accepted] == ["slow"]
    assert sum(len(o.tokens) for o in outputs) == 40 and len(seen) <= 4 < len(outputs)


async def test_a_call_comes_with_its_pieces_and_a_bad_schema_as_a_refusal(server: WorkerServer) -> None:
    gateway = Gateway(server)
    gateway.submit("call", tool_use=ToolUse(json.dumps([TOOL]), "required", "f"))
    assert (await gateway.ended("call")).finish_reason == "stop"
    deltas = [d for f in gateway.seen for o in f.outputs if o.request_id == "call" for d in o.tool_calls or []]
    assert (
        deltas[0].name == "f"
        and json.loads("".join(d.arguments for d in deltas))["x"] in (1, 2)
        and gateway.text("call") == ""
    )
    bad = {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "not": {}}}}
    gateway.submit("bad", tool_use=ToolUse(json.dumps([TOOL, bad])))
    refused = await gateway.ended("bad")
    assert refused.error[0] == 400 and refused.error[2] == "tools[1].function.parameters" and "not" in refused.error[1]
    await gateway.leave()


async def test_tokens_that_do_not_exist_are_refused_by_name(server: WorkerServer) -> None:
    gateway = Gateway(server)
    for name, sampling in (
        ("logit_bias", Sampling(logit_bias={9999: 1.0})),
        ("stop_token_ids", Sampling(stop_token_ids=[9999])),
    ):
        gateway._sent.put_nowait(
            together([encode_submit(GenerateRequest(name, "t", "s", "tiny", sampling, prompt="x"))])
        )
        assert (await gateway.ended(name)).error[2] == name
    await gateway.leave()


async def test_every_gateway_hears_whose_trial_it_is_and_that_the_worker_leaves(
    server: WorkerServer, harness: Harness
) -> None:
    gateway, other = Gateway(server), Gateway(server)
    gateway.submit("before")
    other.submit("others")
    await asyncio.gather(gateway.ended("before"), other.ended("others"))
    gateway.submit("suspect", alone=True)
    ended = await gateway.ended("suspect")
    assert ended.finish_reason in ("stop", "length")
    for each in (gateway, other):
        assert [f.trial for f in each.seen if f.trial is not None] == ["suspect", ""]
    told = next(i for i, f in enumerate(gateway.seen) if f.trial == "suspect")
    first = next(i for i, f in enumerate(gateway.seen) if any(o.request_id == "suspect" for o in f.outputs))
    assert told < first, "before its first step"
    await server.drain()
    async with asyncio.timeout(10):
        while True:
            if all(each.seen[-1].leaving for each in (gateway, other)):
                break
            await asyncio.sleep(0.01)
    await asyncio.gather(gateway.leave(), other.leave())


async def test_a_submit_that_cannot_be_read_is_refused_and_its_stream_goes_on(server: WorkerServer) -> None:
    gateway = Gateway(server)
    gateway._sent.put_nowait(b"\xc1")
    gateway._sent.put_nowait(together([submit_command("bad", b"\xc1")]))
    assert (await gateway.ended("bad")).error[0] == 400
    gateway.submit("good")
    assert (await gateway.ended("good")).finish_reason in ("stop", "length")
    await gateway.leave()


def test_failpoints_name_their_remedy_and_do_nothing_unless_armed() -> None:
    request = GenerateRequest("r", "t", "s", "m", Sampling(), prompt="a deadly word")
    failpoints.reach("step", [request])
    for wanted in (
        {"nowhere": "kill:deadly"},
        {"step": "kill"},
        {"step": "explode:deadly"},
        {"model.loading": "kill:deadly"},
        {"model.loading": "once:relative"},
        {"model.piece": "delay:long"},
    ):
        with pytest.raises(ConfigError, match="give one of"):
            failpoints.arm(wanted)
    failpoints.reach("step", [request])


def test_a_failpoint_kills_once_for_each_time_its_file_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed, file = list[int](), tmp_path / "kill"
    monkeypatch.setattr(failpoints.os, "kill", lambda pid, number: killed.append(number))
    monkeypatch.setattr(failpoints.time, "sleep", lambda seconds: (_ for _ in ()).throw(InterruptedError))
    failpoints.arm({"model.loading": f"once:{file}"})
    try:
        for deaths in (1, 2):
            failpoints.reach("model.active")
            failpoints.reach("model.loading")
            file.touch()
            with pytest.raises(InterruptedError):
                failpoints.reach("model.loading")
            failpoints.reach("model.loading")
            assert len(killed) == deaths and not file.exists()
    finally:
        failpoints.arm({})


async def test_what_cannot_fit_is_refused_before_it_is_tokenised(harness: Harness, server: WorkerServer) -> None:
    gateway = Gateway(server)
    bound = hosted_of(server).bound
    assert bound.longest_token_bytes > 0
    content = "x" * (bound.longest_token_bytes * bound.max_tokens + 1)
    for number, asked in enumerate(
        ({"prompt": content}, {"messages": [{"role": "tool", "content": content, "tool_call_id": "c"}]})
    ):
        request = GenerateRequest(f"r{number}", "t", "s", "tiny", Sampling(), **asked)  # type: ignore[arg-type]
        gateway.send(together([encode_submit(request)]))
        failed = await gateway.ended(f"r{number}")
        status, message, _, code = failed.error
        assert (status, code) == (400, "context_length_exceeded") and "at least" in message


async def test_what_a_gateway_sends_is_checked_again_and_fails_by_name(server: WorkerServer, harness: Harness) -> None:
    gateway = Gateway(server)
    wrong: dict[str, dict[str, Any]] = {
        "resume_tokens": {"resume_tokens": [10**6]},
        "priority": {"priority": 1 << 40},
        "weight": {"weight": 0.0},
    }
    for param, fields in wrong.items():
        gateway.submit(param, **fields)
        failed = await gateway.ended(param)
        assert failed.error[0] == 400 and failed.error[2] == param
    gateway.submit("too-far", resume_tokens=[5] * 201)
    assert (await gateway.ended("too-far")).error[2] == "resume_tokens"
    gateway._sent.put_nowait(msgpack.packb({"submit": {"request_id": [1], "sampling": {}}}))
    gateway.submit("after")
    assert (await gateway.ended("after")).finish_reason in ("stop", "length") and not harness.crashes
    await gateway.leave()


async def test_template_variables_change_the_prompt_and_are_checked_again(server: WorkerServer, tmp_path: Path) -> None:
    gateway = Gateway(server)
    for request_id, text in (
        ("big", '{"a":"' + "x" * (16 << 10) + '"}'),
        ("ours", '{"messages":[]}'),
        ("none", "[" * 9000),
    ):
        gateway.submit(request_id, template_kwargs=text)
        status, message, param, _ = (await gateway.ended(request_id)).error
        assert status == 400 and param.startswith("chat_template_kwargs") and message
    gateway.submit("odd", template_kwargs=5)
    assert (await gateway.ended("odd")).error[2] == "chat_template_kwargs"
    source = "{{ messages[0].content }}{% if enable_thinking is false %} <think></think>{% endif %}"
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text(source)
    hosted_of(server).codec = TextCodec.load(tmp_path)
    for request_id, text in (
        ("off", '{"enable_thinking":false}'),
        ("on", '{"enable_thinking":true}'),
        ("unsaid", None),
    ):
        gateway.submit(request_id, template_kwargs=text)
        assert (await gateway.ended(request_id)).finish_reason in ("stop", "length")
    prompts = {a.request_id: a.prompt_tokens for frame in gateway.seen for a in frame.accepted}
    assert (
        prompts["off"] - prompts["on"] == len(hosted_of(server).codec.plain_tokens(" <think></think>"))
        and prompts["on"] == prompts["unsaid"]
    )
    await gateway.leave()


@pytest.mark.parametrize(
    ("end", "thinking"),
    [("<think>", True), ("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("<thinking>", False), ("", False)],
)
async def test_a_gateway_is_told_when_the_template_begins_a_thought(
    server: WorkerServer, tmp_path: Path, end: str, thinking: bool
) -> None:
    gateway = Gateway(server)
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}assistant: {{ " + repr(end) + " }}")
    hosted_of(server).codec = TextCodec.load(tmp_path)
    gateway.submit("chat")
    gateway.send(
        together(
            [encode_submit(GenerateRequest("plain", "t", "s", "tiny", Sampling(max_tokens=2), prompt="a <think>"))]
        )
    )
    for request_id in ("chat", "plain"):
        await gateway.ended(request_id)
    told = {a.request_id: a.thinking for frame in gateway.seen for a in frame.accepted}
    assert told == {"chat": thinking, "plain": False}
    await gateway.leave()
