"""Workers and schedulers that die, clients that go away, a gateway that drains."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_fakes import MODEL, Stack, events, stack, until

from contracts.errors import Unavailable
from gateway.core.retry import RetryLimits


@pytest.fixture
async def s() -> Any:
    async with stack() as running:
        yield running


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **more}


async def streamed(s: Stack, **more: Any) -> list[Any]:
    async with s.http.post(f"{s.url}/v1/chat/completions", json=body(stream=True, **more)) as r:
        assert r.status == 200, await r.text()
        return await events(r)


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [c["choices"][0] for c in chunks if isinstance(c, dict) and c.get("choices")]
    return "".join(c["delta"].get("content", "") for c in choices if c["index"] == index)


@pytest.mark.parametrize(
    "how", [{"temperature": 0}, {"seed": 5}, {"seed": 5, "n": 3}], ids=["greedy", "seeded", "three choices"]
)
async def test_a_stream_whose_worker_dies_goes_on_elsewhere_with_the_same_text(s: Stack, how: dict[str, Any]) -> None:
    undisturbed = await streamed(s, max_tokens=20, **how)
    s.workers[0].token_s = s.workers[1].token_s = 0.002
    s.workers[0].die_after = 7
    disturbed = await streamed(s, max_tokens=20, **how)
    resumed = [r for r in s.workers[1].submitted if r.resume_tokens]
    assert resumed, "nothing moved"
    for index in range(how.get("n", 1)):
        assert text_of(disturbed, index) == text_of(undisturbed, index) != ""
    assert disturbed[-1] == "[DONE]"


async def test_an_unseeded_request_resumes_with_the_seed_it_began_with(s: Stack) -> None:
    s.workers[0].die_after = 3
    status, answer, headers = await s.chat(max_tokens=8)
    assert status == 200 and len(answer["choices"][0]["message"]["content"].split()) == 8
    first, second = s.workers[0].submitted[0], s.workers[1].submitted[0]
    assert first.sampling.seed == second.sampling.seed
    assert len(second.resume_tokens) == 3
    assert first.request_id != second.request_id
    assert s.scheduler.placed[1].avoid_nodes == ["node-0"]
    assert headers["X-Upbeat-Node"] == "node-1"
    assert answer["usage"]["completion_tokens"] == 8


async def test_other_streams_go_on_when_a_worker_dies(s: Stack) -> None:
    for w in s.workers:
        w.token_s = 0.01
    going = [
        asyncio.create_task(
            s.post(
                "/v1/chat/completions",
                body(max_tokens=30, temperature=0, session_id=node),
                headers={"X-Upbeat-Node": node} if pin else {},
            )
        )
        for node, pin in (("node-0", False), ("node-1", True))
    ]
    await until(lambda: bool(s.workers[0].submitted and s.workers[1].submitted))
    await s.workers[0].kill()
    moved, stayed = await asyncio.gather(*going)
    assert moved[0] == stayed[0] == 200
    assert moved[1]["choices"] == stayed[1]["choices"]
    assert [r.session_id for r in s.workers[1].submitted] == ["node-1", "node-0"]


async def test_a_request_waits_for_the_only_node_to_come_back() -> None:
    async with stack(1) as s:
        worker = s.workers[0]
        worker.token_s = 0.01
        going = asyncio.create_task(streamed(s, max_tokens=30, temperature=0))
        async with asyncio.timeout(5):
            await worker.seen_submit.wait()
        await asyncio.sleep(0.1)
        await worker.kill()
        await asyncio.sleep(0.3)
        await worker.start()
        chunks = await going
        assert chunks[-1] == "[DONE]" and len(text_of(chunks).split()) == 30
        assert worker.submitted[-1].resume_tokens
        worker.submitted.clear()
        assert text_of(await streamed(s, max_tokens=30, temperature=0)) == text_of(chunks)


async def test_a_new_request_waits_for_a_node_too() -> None:
    async with stack(1) as s:
        s.scheduler.set_absent("node-0")
        going = asyncio.create_task(s.chat())
        await asyncio.sleep(0.2)
        assert not going.done()
        s.scheduler.set_absent()
        assert (await going)[0] == 200


async def test_when_no_worker_comes_back_a_whole_answer_is_a_503() -> None:
    async with stack(1, retry_limits=RetryLimits(total_s=0.5, pause_s=0.05, connect_s=0.1)) as s:
        await s.workers[0].kill()
        status, answer, headers = await s.chat()
        assert (status, answer["error"]["code"], answer["error"]["type"]) == (503, "unavailable", "server_error")
        assert "Retry-After" in headers


async def test_when_no_worker_comes_back_a_stream_ends_with_an_error_event() -> None:
    async with stack(1, retry_limits=RetryLimits(total_s=0.5, pause_s=0.05, connect_s=0.1)) as s:
        s.workers[0].token_s = 0.01
        going = asyncio.create_task(streamed(s, max_tokens=200))
        await s.workers[0].seen_submit.wait()
        await asyncio.sleep(0.1)
        await s.workers[0].kill()
        chunks = await going
        assert chunks[-1]["error"]["code"] == "unavailable"
        assert text_of(chunks)


async def test_a_request_that_kills_workers_kills_three_at_most() -> None:
    async with stack(4) as s:
        for w in s.workers:
            w.die_after = 1
        status, answer, _ = await s.chat(max_tokens=9)
        assert status == 400 and answer["error"]["code"] == "poisonous_request"
        assert [len(w.submitted) for w in s.workers] == [1, 1, 1, 0]
        assert [w.submitted[0].alone for w in s.workers[:3]] == [False, True, True]


async def test_a_worker_that_says_not_now_is_left_for_another(s: Stack) -> None:
    s.workers[0].refuse = Unavailable("draining")
    status, _, headers = await s.chat()
    assert (status, headers["X-Upbeat-Node"]) == (200, "node-1")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_is_cancelled_in_the_worker(s: Stack, stream: bool) -> None:
    worker = s.workers[0]
    worker.token_s = 0.05
    going = asyncio.create_task(s.post("/v1/chat/completions", body(max_tokens=1000, stream=stream, n=2)))
    await until(lambda: len(worker.submitted) == 2)
    going.cancel()
    await until(lambda: len(worker.cancelled) == 2)
    assert set(worker.cancelled) == {r.request_id for r in worker.submitted}
    assert s.gateway.parts is not None
    async with asyncio.timeout(5):
        await s.gateway.parts.idle.wait()


@pytest.mark.parametrize("how", ["hung", "gone"])
async def test_without_a_scheduler_requests_go_to_the_last_known_fleet(s: Stack, how: str) -> None:
    if how == "hung":
        s.scheduler.hang = True
    else:
        await s.scheduler.kill()
    for _ in range(3):
        status, _, headers = await s.chat()
        assert status == 200 and "least outstanding" in headers["X-Upbeat-Why"]
    assert (await s.post("/v1/chat/completions", body(), headers={"X-Upbeat-Node": "node-1"}))[2][
        "X-Upbeat-Node"
    ] == "node-1"


async def test_a_scheduler_that_comes_back_is_asked_again(s: Stack) -> None:
    await s.scheduler.kill()
    assert (await s.chat())[0] == 200
    s.scheduler.placed.clear()
    await s.scheduler.start()
    await s.ready()
    assert (await s.chat())[0] == 200
    assert len(s.scheduler.placed) == 1


async def test_a_gateway_stays_ready_while_one_node_serves(s: Stack) -> None:
    s.scheduler.set_absent("node-1")
    await until(lambda: lacks(s, "node-1 does not serve"))
    status, answer = await s.get("/ready")
    assert (status, answer) == (200, {"status": "ready", "missing": [], "nodes_serving": 1, "nodes_expected": 2})
    assert [(await s.get(f"/ready?all={all_}"))[0] for all_ in ("1", "true", "0", "false")] == [503, 503, 200, 200]
    fleet = (await s.get("/v1/fleet"))[1]
    assert fleet["ready"] and fleet["missing"] == ["1 of 2 nodes serve", "node-1 does not serve"]
    assert (await s.chat())[0] == 200
    s.scheduler.set_absent("node-0", "node-1")
    await until(lambda: lacks(s, "node-0 does not serve"))
    status, answer = await s.get("/ready")
    assert (status, answer["status"], answer["missing"]) == (503, "not ready", [f"no node serves {MODEL}"])
    assert not (await s.get("/v1/fleet"))[1]["ready"]


async def test_a_gateway_without_a_scheduler_is_ready_as_long_as_it_reaches_a_node(s: Stack) -> None:
    await s.scheduler.kill()
    await until(lambda: lacks(s, "the scheduler does not answer"))
    assert (await s.get("/ready"))[0] == 200 and (await s.get("/ready?all=1"))[0] == 503
    assert (await s.chat())[0] == 200
    for worker in s.workers:
        await worker.kill()

    async def unready() -> bool:
        return (await s.get("/ready"))[1]["missing"] == [f"no node that serves {MODEL} has a stream to this gateway"]

    await until(unready)


async def lacks(s: Stack, why: str) -> bool:
    return why in await s.missing()


@pytest.mark.parametrize("query", ["all=", "all=yes", "all=1&all=0"])
async def test_what_ready_is_asked_is_checked(s: Stack, query: str) -> None:
    status, answer = await s.get(f"/ready?{query}")
    assert (status, answer["error"]["param"]) == (400, "all") and "1" in answer["error"]["message"]


async def test_a_pinned_node_runs_the_request(s: Stack) -> None:
    status, _, headers = await s.post("/v1/chat/completions", body(), headers={"X-Upbeat-Node": "node-1"})
    assert (status, headers["X-Upbeat-Node"], len(s.workers[1].submitted)) == (200, "node-1", 1)


async def test_draining_refuses_new_requests_and_lets_streams_end(s: Stack) -> None:
    s.workers[0].token_s = 0.02
    going = asyncio.create_task(streamed(s, max_tokens=20))
    await s.workers[0].seen_submit.wait()
    draining = asyncio.create_task(s.gateway.drain())
    await asyncio.sleep(0.05)
    assert not draining.done()
    status, answer, _ = await s.chat()
    assert (status, answer["error"]["code"]) == (503, "unavailable")
    assert (await s.get("/ready"))[0] == 503
    assert (await s.get("/health"))[0] == 200
    chunks = await going
    assert len(text_of(chunks).split()) == 20 and chunks[-1] == "[DONE]"
    await draining


async def test_a_gateway_that_never_saw_a_scheduler_cannot_tell_which_models_there_are() -> None:
    async with stack(1) as s:
        assert s.gateway.parts is not None
        s.gateway.parts.fleet.view = None
        s.gateway.parts.fleet.models.clear()
        status, answer, _ = await s.post("/v1/chat/completions", body(model="other"))
        assert (status, answer["error"]["code"]) == (503, "unavailable")
        assert (await s.chat())[0] == 200, "the configured model is known all the same"
