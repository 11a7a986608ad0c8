"""Answers that keep to their model's targets are counted, for metrics and for `GET /v1/models`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from gateway_fakes import MODEL, QUICK, Stack, stack, until

from gateway.attainment import TPOT, TTFT, Attainments
from runtime.telemetry import REGISTRY

BOTH = {TTFT: 1.0, TPOT: 0.1}


def counted(model: str, target: str) -> tuple[float, float]:
    """(kept, all) by the metrics."""
    names = ("upbeat_gateway_slo_attained_total", "upbeat_gateway_slo_turns_total")
    kept, turns = (REGISTRY.get_sample_value(name, {"model": model, "target": target}) or 0.0 for name in names)
    return kept, turns


def shown(counts: Attainments, model: str) -> dict[str, tuple[int, int]]:
    return {target: (of["attained"], of["turns"]) for target, of in counts.shown(model).items()}


def test_each_target_of_an_answer_counts_once() -> None:
    counts = Attainments()
    for first_s, token_s in ((1.0, 0.1), (1.1, 0.05), (0.2, 0.2)):
        answer = counts.answer("one", BOTH)
        answer.took(TTFT, first_s)
        answer.took(TPOT, token_s)
        answer.took(TPOT, 9.0)
        answer.stopped(5.0, failed=False)
    assert shown(counts, "one") == {TTFT: (2, 3), TPOT: (2, 3)}
    assert (counted("one", TTFT), counted("one", TPOT)) == ((2, 3), (2, 3))


def test_without_a_target_nothing_counts() -> None:
    counts = Attainments()
    answer = counts.answer("none", {TTFT: 0.0, TPOT: 0.1})
    answer.took(TTFT, 0.1)
    answer.stopped(5.0, failed=False)
    assert shown(counts, "none") == {TTFT: (0, 0), TPOT: (0, 0)} and counted("none", TTFT) == (0, 0)


def test_a_failed_answer_keeps_neither_and_one_whose_caller_left_counts_if_it_was_late() -> None:
    counts = Attainments()
    counts.answer("failed", BOTH).stopped(0.1, failed=True)
    assert shown(counts, "failed") == {TTFT: (0, 1), TPOT: (0, 1)} and counted("failed", TTFT) == (0, 1)
    counts.answer("left", BOTH).stopped(0.9, failed=False)
    assert shown(counts, "left") == {TTFT: (0, 0), TPOT: (0, 0)}
    counts.answer("left", BOTH).stopped(1.1, failed=False)
    assert shown(counts, "left") == {TTFT: (0, 1), TPOT: (0, 0)}


def targets(ttft_s: float, tpot_s: float) -> dict[str, Any]:
    return {MODEL: {"path": "/m/toy", "ttft_s": ttft_s, "tpot_s": tpot_s}}


async def told(s: Stack) -> dict[str, tuple[int, int]]:
    turns = (await s.get("/v1/models"))[1]["data"][0]["slo_turns"]
    return {target: (of["attained"], of["turns"]) for target, of in turns.items()}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_gateway_counts_its_answers_and_not_what_it_refuses(stream: bool) -> None:
    async with stack(1, models=targets(60.0, 0.02)) as s:
        before = [*counted(MODEL, TTFT), *counted(MODEL, TPOT)]
        await say(s, stream=stream)
        assert await told(s) == {TTFT: (1, 1), TPOT: (1, 1)}
        s.workers[0].token_s = 0.1
        await say(s, stream=stream)
        assert (await s.chat(temperature=9))[0] == 400
        assert await told(s) == {TTFT: (2, 2), TPOT: (1, 2)}
        now = [*counted(MODEL, TTFT), *counted(MODEL, TPOT)]
        assert [b - a for a, b in zip(before, now, strict=True)] == [2, 2, 1, 2]


async def say(s: Stack, **more: Any) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **more}
    async with s.http.post(f"{s.url}/v1/chat/completions", json=body) as r:
        assert r.status == 200
        await r.read()


async def test_an_answer_for_which_there_is_no_node_keeps_nothing() -> None:
    async with stack(1, models=targets(60.0, 1.0), retry_limits=replace(QUICK, total_s=0.2)) as s:
        s.scheduler.set_absent("node-0")
        await until(lambda: gone(s))
        assert (await s.chat())[0] == 503
        assert await told(s) == {TTFT: (0, 1), TPOT: (0, 1)}


async def gone(s: Stack) -> bool:
    return any("node-0" in why for why in await s.missing())


async def test_a_caller_that_leaves_after_the_target_was_kept_waiting() -> None:
    async with stack(1, models=targets(0.05, 1.0)) as s:
        s.workers[0].token_s = 5.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await say(s, stream=True)

        async def late() -> bool:
            return (await told(s))[TTFT] == (0, 1)

        await until(late)


def test_what_was_decided_is_taken_once() -> None:
    counts = Attainments()
    counts.answer("one", BOTH).took(TTFT, 0.5)
    counts.answer("one", BOTH).took(TTFT, 2.0)
    assert counts.take() == {("one", TTFT): (2, 1)}
    assert counts.take() == {} and shown(counts, "one")[TTFT] == (1, 2), "the totals stay"
