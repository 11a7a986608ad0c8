"""Relayed requests when something fails: what begins again elsewhere, what does not, and what is left of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import grpc
import pytest
from fake_sidecar import NOT_NOW, HttpStack, failure, head_of, http_stack
from gateway_fakes import MODEL, QUICK, until

from contracts.errors import InvalidRequest, NotFound, Unavailable
from contracts.frames import StepFrame
from contracts.v1 import worker_pb2 as pb
from gateway.core.retry import RetryLimits

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
UNAVAILABLE, INTERNAL, CANCELLED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED
HURRY = replace(QUICK, total_s=0.6)
DIED = failure(Unavailable("vLLM died"), ran=True)
ALONE = failure(Unavailable("vLLM died"), ran=True, only=True)


def body(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "input": text, "max_tokens": 9, **more}


@pytest.fixture
async def s() -> AsyncIterator[HttpStack]:
    async with http_stack() as running:
        yield running


def calls(s: HttpStack) -> list[int]:
    """How many requests each node heard."""
    return [len(sidecar.heard) for sidecar in s.sidecars]


def code(answer: bytes) -> str:
    found: str = json.loads(answer)["error"]["code"]
    return found


# ---- before the first byte -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("said", [failure(NOT_NOW), DIED, ALONE, pb.HttpFailure(), pb.HttpFailure(refused="[500]")])
async def test_a_failure_of_the_worker_begins_again_elsewhere(s: HttpStack, said: pb.HttpFailure, stream: bool) -> None:
    s.sidecars[0].failures.append(said)
    status, _, headers = await s.raw(CHAT, body(stream=stream))
    assert (status, headers["X-Upbeat-Node"], calls(s)) == (200, "node-1", [1, 1])
    first, second = s.heard
    assert second.head.request_id == f"{first.head.request_id}.r1" and first.raw == second.raw
    assert headers["X-Request-Id"] == first.head.request_id
    assert list(s.scheduler.placed[1].avoid_nodes) == ["node-0"]


@pytest.mark.parametrize("error", [InvalidRequest("no such thing", param="a"), NotFound("none")])
async def test_a_refusal_of_the_worker_is_final(s: HttpStack, error: Any) -> None:
    s.sidecars[0].failures.append(failure(error, ran=True, only=True))
    status, answer, _ = await s.raw(CHAT, body())
    assert (status, json.loads(answer)) == (error.status, error.envelope()) and calls(s) == [1, 0]
    assert (await s.raw(CHAT, body()))[0] == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "ends", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED, DIED]
)
async def test_an_answer_that_breaks_off_after_its_head_begins_again(s: HttpStack, ends: Any, stream: bool) -> None:
    """Also in the middle of a whole answer, of which the caller has nothing yet."""
    first = s.sidecars[0]
    first.breaks_after, first.ends_with, first.piece_bytes = (0 if stream else 2), ends, 40
    status, answer, headers = await s.raw(CHAT, body(stream=stream))
    assert (status, headers["X-Upbeat-Node"], calls(s)) == (200, "node-1", [1, 1])
    second = s.sidecars[1]
    assert answer == (b"".join(second._events(second.heard[0])) if stream else second._whole(second.heard[0]))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_node_that_dies_loses_its_requests_to_another(s: HttpStack, stream: bool) -> None:
    first = s.sidecars[0]
    first.breaks_after = 0
    going = asyncio.create_task(s.raw(CHAT, body(stream=stream)))
    await until(lambda: calls(s) == [1, 0])
    await first.kill()
    status, _, headers = await going
    assert (status, headers["X-Upbeat-Node"], calls(s)) == (200, "node-1", [1, 1])


async def test_a_node_without_a_connection_is_left_for_another(s: HttpStack) -> None:
    await s.sidecars[0].kill()
    assert (await s.raw(CHAT, body()))[2]["X-Upbeat-Node"] == "node-1"


async def test_a_worker_that_refuses_before_it_has_read_the_body_is_left_for_another(s: HttpStack) -> None:
    """gRPC may lose the refusal then: it looks as if the call broke off."""
    s.sidecars[0].early = failure(NOT_NOW)
    for text in ("hi", "x" * (7 << 20)):
        assert (await s.raw(CHAT, body(text)))[2]["X-Upbeat-Node"] == "node-1"


async def test_and_is_not_asked_all_the_time_when_it_is_the_only_one() -> None:
    async with http_stack(1, retry_limits=replace(QUICK, total_s=1.0, pause_s=0.2)) as s:
        s.sidecars[0].early = failure(NOT_NOW)
        large = body("x" * (7 << 20))
        assert (await s.raw(CHAT, large, X_Upbeat_Node="node-0"))[0] == 503
        assert 2 <= s.sidecars[0].refused_early <= 7


async def test_when_no_node_answers_it_is_a_503() -> None:
    async with http_stack(1, retry_limits=HURRY) as s:
        s.sidecars[0].failures += [failure(NOT_NOW)] * 100
        status, answer, headers = await s.raw(CHAT, body(stream=True))
        assert (status, code(answer), headers["Retry-After"]) == (503, "unavailable", "1") and len(s.heard) > 2


async def test_a_request_that_may_have_killed_engines_has_three_attempts() -> None:
    async with http_stack(5) as s:
        for sidecar in s.sidecars:
            sidecar.failures.append(DIED)
        status, answer, _ = await s.raw(CHAT, body())
        assert (status, code(answer), calls(s)) == (503, "unavailable", [1, 1, 1, 0, 0])


@pytest.mark.parametrize(
    "nonsense",
    [
        (pb.HttpAnswer(status=0), [b"a"]), (pb.HttpAnswer(status=99), [b"a"]), (pb.HttpAnswer(status=101), []),
        (pb.HttpAnswer(status=70_000), [b"a"]),
    ],
)  # fmt: skip
async def test_what_is_no_answer_begins_again_elsewhere(s: HttpStack, nonsense: Any) -> None:
    s.sidecars[0].answers = nonsense
    status, _, headers = await s.raw(CHAT, body())
    assert (status, headers["X-Upbeat-Node"]) == (200, "node-1")


async def test_a_pinned_request_waits_for_its_node() -> None:
    async with http_stack(retry_limits=replace(QUICK, pause_s=0.2)) as s:
        s.sidecars[1].failures += [failure(NOT_NOW)] * 2
        status, _, headers = await s.raw(CHAT, body(), X_Upbeat_Node="node-1")
        assert (status, headers["X-Upbeat-Node"], calls(s)) == (200, "node-1", [0, 3])


# ---- after the first byte --------------------------------------------------------------------------------------------
def ending(answer: bytes) -> tuple[list[bytes], bytes]:
    """The events before the last one, and the last one."""
    assert answer.endswith(b"\n\n")
    *before, last = answer[:-2].split(b"\n\n")
    return before, last


@pytest.mark.parametrize("ends", [UNAVAILABLE, DIED, ALONE])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES])
async def test_a_stream_that_breaks_off_ends_with_an_error_of_its_api(s: HttpStack, path: str, ends: Any) -> None:
    first = s.sidecars[0]
    first.breaks_after, first.ends_with = 2, ends
    status, answer, _ = await s.raw(path, body(stream=True))
    before, last = ending(answer)
    assert status == 200 and calls(s) == [1, 0], "nobody can continue it"
    if path != MESSAGES:  # which is a translation
        assert b"".join(event + b"\n\n" for event in before) == b"".join(first._events(first.heard[0])[:2])
    name, _, data = last.rpartition(b"data: ")
    error = json.loads(data)
    assert error["error"]["code"] == "unavailable" and error["error"]["message"]
    assert name == (b"event: error\n" if path == MESSAGES else b"")
    assert error.get("type") == ("error" if path == MESSAGES else None)
    assert b"[DONE]" not in answer


async def test_half_an_event_is_not_passed_on_when_its_other_half_never_comes(s: HttpStack) -> None:
    first = s.sidecars[0]
    first.answers = head_of("text/event-stream"), [b'data: {"a": 1}\n\ndata: {"b"', b": 2}\n", b"\n"]
    first.breaks_after, first.ends_with = 2, None
    async with s.http.post(s.url + CHAT, json=body(stream=True)) as answer:
        assert await answer.content.readany() == b'data: {"a": 1}\n\n'
        await first.kill()
        before, last = ending(await answer.read())
        assert not before and json.loads(last[6:])["error"]


async def test_a_long_answer_that_breaks_off_ends_its_connection() -> None:
    async with http_stack(retry_limits=HURRY) as s:
        first = s.sidecars[0]
        first.answers = head_of("application/json"), [b"x" * (1 << 20)] * 12
        first.breaks_after, first.ends_with = 160, UNAVAILABLE
        with pytest.raises(aiohttp.ClientError):
            await s.raw(CHAT, body())
        assert calls(s) == [1, 0]
        first.breaks_after = None
        status, answer, _ = await s.raw(CHAT, body())
        assert (status, len(answer)) == (200, 12 << 20), "and a whole one comes through"


async def test_an_answer_of_eight_mebibytes_begins_again_at_its_last_byte() -> None:
    async with http_stack() as s:
        for sidecar in s.sidecars:
            sidecar.answers = head_of("application/json"), [b"x" * (1 << 20)] * 8
        s.sidecars[0].breaks_after, s.sidecars[0].ends_with = 127, UNAVAILABLE
        status, answer, headers = await s.raw(CHAT, body())
        assert (status, len(answer), headers["X-Upbeat-Node"]) == (200, 8 << 20, "node-1")


# ---- time ------------------------------------------------------------------------------------------------------------
async def test_a_worker_that_does_not_read_a_request_loses_it_to_another() -> None:
    async with http_stack(retry_limits=replace(QUICK, accept_s=0.5, first_token_s=60)) as s:
        s.sidecars[0].frozen = True
        large = body("x" * (7 << 20), stream=True)  # more than the network holds
        assert (await s.raw(CHAT, large))[2]["X-Upbeat-Node"] == "node-1"
        s.sidecars[0].frozen = False


@pytest.mark.parametrize(("path", "stream"), [(CHAT, True), (MESSAGES, True), ("/v1/embeddings", False)])
async def test_a_first_byte_is_waited_for_as_long_as_for_a_first_token(path: str, stream: bool) -> None:
    async with http_stack(retry_limits=replace(QUICK, first_token_s=0.5)) as s:
        s.sidecars[0].breaks_after = 0
        assert (await s.raw(path, body(stream=stream)))[2]["X-Upbeat-Node"] == "node-1"
        await until(lambda: len(s.sidecars[0].broken) == 1)


async def test_a_whole_text_may_take_longer_than_a_first_token() -> None:
    async with http_stack(retry_limits=replace(QUICK, accept_s=0.5, first_token_s=0.5)) as s:
        s.sidecars[0].pace_s = 0.7
        assert (await s.raw(CHAT, body()))[2]["X-Upbeat-Node"] == "node-0"
        assert calls(s) == [1, 0]


async def test_a_stream_may_pause_once_it_has_begun() -> None:
    async with http_stack(retry_limits=replace(QUICK, accept_s=0.5, first_token_s=1.0)) as s:
        s.sidecars[0].pace_s = 0.7
        status, answer, _ = await s.raw(COMPLETIONS, body(stream=True))
        assert status == 200 and b"[DONE]" in answer and calls(s) == [1, 0]


@pytest.mark.parametrize("at", [0, 2])
async def test_a_request_ends_with_the_stream_to_its_node(s: HttpStack, at: int) -> None:
    first = s.sidecars[0]
    first.breaks_after = at
    going = asyncio.create_task(s.raw(CHAT, body(stream=True)))
    await until(lambda: calls(s) == [1, 0])
    await asyncio.sleep(0.2)
    for out in tuple(first._streams):
        out.put_nowait(None)
    status, answer, _ = await going
    assert status == 200 and (b"error" in answer) is (at > 0)
    await until(lambda: len(first.broken) == 1)


async def test_silence_makes_nobody_guilty() -> None:
    async with http_stack(3) as s:
        s.sidecars[0].breaks_after = s.sidecars[1].breaks_after = 0
        going = asyncio.create_task(s.raw(CHAT, body()))
        for number in range(2):
            await until(lambda n=number: len(s.sidecars[n].heard) == 1)
            s.scheduler.set_stalled(*(f"node-{n}" for n in range(number + 1)))
        status, _, headers = await going
        assert (status, headers["X-Upbeat-Node"]) == (200, "node-2")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_stalled_node_is_given_up_for_another(s: HttpStack, stream: bool) -> None:
    s.sidecars[0].breaks_after = 0
    going = asyncio.create_task(s.raw(CHAT, body(stream=stream)))
    await until(lambda: calls(s) == [1, 0])
    s.scheduler.set_stalled("node-0")
    status, _, headers = await going
    assert (status, headers["X-Upbeat-Node"]) == (200, "node-1")
    await until(lambda: len(s.sidecars[0].broken) == 1)


async def test_a_stalled_node_that_still_sends_is_not_given_up(s: HttpStack) -> None:
    s.sidecars[0].tokens, s.sidecars[0].pace_s = ["word "] * 25, 0.1
    going = asyncio.create_task(s.raw(CHAT, body(stream=True)))
    await until(lambda: calls(s) == [1, 0])
    s.scheduler.set_stalled("node-0")
    status, answer, _ = await going
    assert status == 200 and answer.endswith(b"[DONE]\n\n") and not s.sidecars[0].broken


async def test_a_node_that_leaves_in_order_blames_nobody(s: HttpStack) -> None:
    for sidecar in s.sidecars:
        sidecar.breaks_after = 0
    for _ in range(2):
        going = asyncio.create_task(s.raw(CHAT, body()))
        await until(lambda: len(s.sidecars[0].heard) == 1)
        s.sidecars[0].tell(StepFrame(leaving=True))
        await asyncio.sleep(0.1)
        s.sidecars[1].breaks_after = None
        await s.sidecars[0].kill()
        assert (await going)[0] == 200
        await s.sidecars[0].start()
        s.sidecars[0].heard.clear()
        await s.ready()


# ---- poison ----------------------------------------------------------------------------------------------------------
async def test_what_an_engine_died_of_twice_is_refused_for_a_while() -> None:
    async with http_stack(3) as s:
        for sidecar in s.sidecars:
            sidecar.failures.append(ALONE)
        status, answer, _ = await s.raw(CHAT, body("poison"))
        assert (status, code(answer), calls(s)) == (400, "poisonous_request", [1, 1, 0])
        for sidecar in s.sidecars:
            sidecar.failures.clear()
        for again in (body("poison"), body("poison", session_id="else", priority=3)):
            assert code((await s.raw(CHAT, again))[1]) == "poisonous_request"
        assert calls(s) == [1, 1, 0], "no engine hears of it again"
        for other in (body("food"), body("poison", temperature=0.5)):
            assert (await s.raw(CHAT, other))[0] == 200
        assert (await s.raw(COMPLETIONS, body("poison")))[0] == 200


async def test_it_is_also_when_its_caller_sends_it_again() -> None:
    async with http_stack(1, retry_limits=HURRY) as s:
        for _ in range(2):
            s.sidecars[0].breaks_after, s.sidecars[0].ends_with = 2, ALONE
            _, answer, _ = await s.raw(CHAT, body("poison", stream=True))
        assert json.loads(ending(answer)[1][6:])["error"]["code"] == "poisonous_request"
        assert (await s.raw(CHAT, body("poison", stream=True)))[0] == 400 and len(s.heard) == 2


async def test_who_was_not_alone_is_never_found_guilty() -> None:
    async with http_stack(3) as s:
        for _ in range(3):
            for sidecar in s.sidecars:
                sidecar.failures[:] = [DIED]
            assert code((await s.raw(CHAT, body("crowd")))[1]) == "unavailable"
        for sidecar in s.sidecars:
            sidecar.failures.clear()
        assert (await s.raw(CHAT, body("crowd")))[0] == 200


async def test_a_node_that_had_requests_of_another_gateway_accuses_nobody() -> None:
    async with http_stack(3, wait=False) as s:
        s.scheduler.running = 2
        s.scheduler.set_absent()
        fleet = s.gateway.parts.fleet
        await until(lambda: fleet.view is not None and all(n.running == 2 for n in fleet.view.nodes))
        await s.ready()
        assert [status for status, _, _ in await dead(s, ["alone"])] == [200]


async def dead(s: HttpStack, texts: list[str]) -> list[tuple[int, bytes, Any]]:
    """What becomes of requests when the node that has all of them dies, and then the next one."""
    for sidecar in s.sidecars:
        sidecar.breaks_after = 0
    going = [asyncio.create_task(s.raw(CHAT, body(text))) for text in texts]
    for number, sidecar in enumerate(s.sidecars[:2]):
        await until(lambda n=number: len(s.sidecars[n].heard) == len(texts))
        if number == 1:
            s.sidecars[2].breaks_after = None
        await sidecar.kill()
    return await asyncio.gather(*going)


async def test_a_request_that_was_alone_on_two_nodes_that_died_is_guilty_and_companions_are_not() -> None:
    async with http_stack(3) as s:
        ((status, answer, _),) = await dead(s, ["alone"])
        assert (status, code(answer)) == (400, "poisonous_request")
    async with http_stack(3) as s:
        assert [status for status, _, _ in await dead(s, ["one", "two", "three"])] == [200] * 3


async def test_another_tenants_poison_is_nobody_elses() -> None:
    keys = [{"key": f"key-of-tenant-{t}-long-enough", "tenant": t} for t in "ab"]
    async with http_stack(2, api_keys=keys) as s:
        for sidecar in s.sidecars:
            sidecar.failures.append(ALONE)
        status, answer, _ = await s.raw(CHAT, body("poison"), Authorization="Bearer key-of-tenant-a-long-enough")
        assert (status, code(answer)) == (400, "poisonous_request")
        assert (await s.raw(CHAT, body("poison"), Authorization="Bearer key-of-tenant-b-long-enough"))[0] == 200


# ---- callers, and the gateway itself ---------------------------------------------------------------------------------
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_caller_that_goes_away_cancels_the_call(s: HttpStack, stream: bool, at: int) -> None:
    s.sidecars[0].breaks_after, s.sidecars[0].piece_bytes = at, 40
    going = asyncio.create_task(s.raw(CHAT, body(stream=stream)))
    await until(lambda: calls(s) == [1, 0])
    await asyncio.sleep(0.1)
    going.cancel()
    await until(lambda: len(s.sidecars[0].broken) == 1)
    await s.whole()
    assert calls(s) == [1, 0]


async def test_a_caller_that_stops_reading_and_goes_away_cancels_the_call(s: HttpStack) -> None:
    s.sidecars[0].answers = head_of("text/event-stream"), [b"data: " + b"x" * 65_528 + b"\n\n"] * 1024
    async with s.http.post(s.url + CHAT, json=body(stream=True)) as answer:
        await answer.content.readexactly(10)
        await asyncio.sleep(0.5)
        answer.close()
    await until(lambda: len(s.sidecars[0].broken) == 1)


async def test_a_caller_that_goes_away_while_no_node_answers_leaves_nothing() -> None:
    async with http_stack(1) as s:
        s.sidecars[0].failures += [failure(NOT_NOW)] * 1000
        going = asyncio.create_task(s.raw(CHAT, body()))
        await until(lambda: len(s.heard) > 1)
        going.cancel()
        await s.whole()


async def test_a_slow_reader_slows_the_engine_down_and_nobody_else(s: HttpStack) -> None:
    first = s.sidecars[0]
    event = b"data: " + b"x" * 65_528 + b"\n\n"
    first.answers = head_of("text/event-stream"), [event] * 1024
    timeout = aiohttp.ClientTimeout(total=60)
    async with s.http.post(s.url + CHAT, json=body(stream=True), timeout=timeout) as answer:
        await answer.content.readexactly(len(event))
        sent = -1
        while first.sent_bytes != sent:
            sent = first.sent_bytes
            await asyncio.sleep(0.5)
        assert sent < 32 << 20, "of 64 MiB; sockets and windows hold what was sent"
        first.answers = None
        for _ in range(3):
            assert (await s.raw(CHAT, body()))[2]["X-Upbeat-Node"] == "node-0"
        read = len(event)
        async for piece in answer.content.iter_any():
            read += len(piece)
        assert read == 1024 * len(event)


async def test_a_hundred_streams_at_a_time_come_through_whole(s: HttpStack) -> None:
    for sidecar in s.sidecars:
        sidecar.tokens, sidecar.pace_s = [f"{n} " for n in range(40)], 0.002
    expected = "".join(s.sidecars[0].tokens)

    async def one(number: int) -> None:
        pin = {"X_Upbeat_Node": f"node-{number % 2}"}
        _, answer, _ = await s.raw(CHAT, body(f"{number}", stream=True), **pin)
        lines = [line for line in answer.split(b"\n") if line.startswith(b"data: {")]
        text = "".join(json.loads(line[6:])["choices"][0]["delta"].get("content") or "" for line in lines)
        assert text == expected and answer.endswith(b"data: [DONE]\n\n")

    await asyncio.gather(*(one(number) for number in range(100)))
    assert calls(s) == [50, 50] and not any(sidecar.broken for sidecar in s.sidecars)


async def test_a_draining_gateway_refuses_new_requests_and_lets_streams_end(s: HttpStack) -> None:
    s.sidecars[0].tokens, s.sidecars[0].pace_s = ["a "] * 20, 0.05
    going = asyncio.create_task(s.raw(CHAT, body(stream=True)))
    await until(lambda: calls(s) == [1, 0])
    draining = asyncio.create_task(s.gateway.drain())
    await asyncio.sleep(0.1)
    for path in (CHAT, COMPLETIONS, MESSAGES, "/v1/embeddings", "/tokenize"):
        status, answer, _ = await s.raw(path, body(prompt="a"))
        assert (status, code(answer)) == (503, "unavailable")
    assert not draining.done()
    assert (await going)[1].endswith(b"[DONE]\n\n")
    await draining


async def test_a_gateway_that_stops_ends_streams_with_an_error_and_other_requests_with_a_503() -> None:
    async with http_stack(2, retry_limits=RetryLimits(total_s=30)) as s:
        for sidecar in s.sidecars:
            sidecar.breaks_after = 2
        streamed = asyncio.create_task(s.raw(CHAT, body(stream=True)))
        await until(lambda: calls(s) == [1, 0])
        await asyncio.sleep(0.2)
        for sidecar in s.sidecars:
            sidecar.breaks_after = 0
        whole = asyncio.create_task(s.raw(CHAT, body()))
        await until(lambda: calls(s) == [2, 0])
        await s.gateway.stop()
        _, last = ending((await streamed)[1])
        assert "stopping" in json.loads(last[6:])["error"]["message"]
        status, answer, _ = await whole
        assert status == 503 and "stopping" in json.loads(answer)["error"]["message"]
