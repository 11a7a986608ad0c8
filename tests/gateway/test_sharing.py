"""Tenants beside each other at a gateway process: slots, turns and urgency."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from gateway_fakes import until
from security_harness import CHAT, KEY_A, KEY_B, Answer, Harness, harness

from contracts.errors import ConfigError
from runtime.config_file import load_config
from runtime.gateway_config import GatewaySection


def ask(h: Harness, key: str, tokens: int, **more: Any) -> asyncio.Task[Answer]:
    return asyncio.create_task(h.ask("POST", "/v1/chat/completions", CHAT | {"max_tokens": tokens, **more}, key=key))


async def ended(tasks: list[asyncio.Task[Answer]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_tenant_cannot_take_all_slots(tmp_path: Path) -> None:
    async with harness(tmp_path, max_requests=4, queue_s=0.2) as h:
        h.worker.token_s = 0.01
        greedy = [ask(h, KEY_A, 100_000) for _ in range(10)]
        await until(lambda: len(h.worker.submitted) == 2)
        refused = await asyncio.gather(*[t for t in greedy if await done_soon(t)])
        assert len(refused) == 8
        assert all((a.status, a.error["code"], a.headers["retry-after"]) == (503, "overloaded", "1") for a in refused)
        assert len(h.worker.submitted) == 2, "it has its half, and no more"
        for _ in range(3):
            assert (await ask(h, KEY_B, 2)).status == 200
        await ended(greedy)
        await until(lambda: is_served(h, KEY_A))


async def done_soon(task: asyncio.Task[Answer]) -> bool:
    await asyncio.wait([task], timeout=0.5)
    return task.done()


async def is_served(h: Harness, key: str) -> bool:
    return (await ask(h, key, 1)).status == 200


async def test_a_tenant_with_one_request_waits_one_turn_however_many_of_anothers_wait_and_however_urgent_they_are(
    tmp_path: Path,
) -> None:
    async with harness(tmp_path, max_requests=2, tenant_share=1, queue_s=20) as h:
        h.worker.token_s = 0.01
        flood = [ask(h, KEY_A, 30, priority=-1000) for _ in range(30)]
        await until(lambda: len(h.worker.submitted) == 2)
        assert (await ask(h, KEY_B, 2, priority=1000)).status == 200
        assert len(h.worker.submitted) < 12, "most of the thirty still wait"
        await ended(flood)
        await until(lambda: is_served(h, KEY_A))


async def test_who_goes_away_while_he_waits_leaves_nothing_behind(tmp_path: Path) -> None:
    async with harness(tmp_path, max_requests=1, queue_s=20) as h:
        h.worker.token_s = 0.01
        long = ask(h, KEY_A, 100_000)
        await until(lambda: len(h.worker.submitted) == 1)
        waiting = [ask(h, KEY_B, 2) for _ in range(5)]
        await asyncio.sleep(0.3)
        await ended(waiting)
        await ended([long])
        await until(lambda: is_served(h, KEY_B))
        assert len([r for r in h.worker.submitted if r.tenant == "b"]) == 1


async def test_what_was_told_that_all_slots_are_taken_is_no_request_of_a_minute(tmp_path: Path) -> None:
    async with harness(tmp_path, max_requests=2, queue_s=0, limits={"requests_per_min": 3}) as h:
        h.worker.token_s = 0.01
        long = ask(h, KEY_A, 100_000)
        await until(lambda: len(h.worker.submitted) == 1)
        assert [(await ask(h, KEY_A, 1)).status for _ in range(5)] == [503] * 5
        await ended([long])

        async def is_free() -> bool:
            return (await ask(h, KEY_A, 1)).status == 200

        await until(is_free)
        assert (await ask(h, KEY_A, 1)).headers["x-ratelimit-remaining-requests"] == "0"


async def test_a_stop_sends_those_who_wait_away_at_once(tmp_path: Path) -> None:
    async with harness(tmp_path, max_requests=1, queue_s=30, drain_s=30) as h:
        h.worker.token_s = 0.01
        long = ask(h, KEY_A, 100_000)
        await until(lambda: len(h.worker.submitted) == 1)
        waiting = ask(h, KEY_B, 1)
        await asyncio.sleep(0.3)
        h.process.terminate()
        answer = await asyncio.wait_for(waiting, 1.5)
        assert (answer.status, answer.error["code"]) == (503, "unavailable")
        assert not long.done() and h.process.returncode is None, "what runs goes on"
        h.process.terminate()
        await ended([long])


# ---- urgency -------------------------------------------------------------------------------------------------------
async def test_a_key_is_no_more_urgent_than_anybody_unless_the_operator_says_so(tmp_path: Path) -> None:
    async with harness(tmp_path, tenant_limits={"b": {"max_priority": -5}}) as h:
        for key, wanted in ((KEY_A, -1000), (KEY_A, 7), (KEY_B, -1000), (KEY_B, -3)):
            assert (await ask(h, key, 1, priority=wanted)).status == 200
            hint = {"session_id": "s", "priority": wanted}
            assert (await h.ask("POST", "/v1/advisory", hint, key=key)).status == 202
        dynamo = {"nvext": {"agent_hints": {"priority": 1000}}}
        assert (await h.ask("POST", "/v1/chat/completions", CHAT | dynamo, key=KEY_A)).status == 200
        assert [r.priority for r in h.worker.submitted] == [0, 7, -5, -3, 0]
        await until(lambda: len(h.scheduler.advised) >= 4)
        assert sorted(a.priority for a in h.scheduler.advised) == [-5, -3, 0, 7]


async def test_without_keys_everybody_is_as_urgent_as_he_says(tmp_path: Path) -> None:
    async with harness(tmp_path, api_keys=[]) as h:
        assert (await h.ask("POST", "/v1/chat/completions", CHAT | {"priority": -1000}, key=None)).status == 200
        assert h.worker.submitted[0].priority == -1000


@pytest.mark.parametrize(
    ("key", "tenant", "all_tenants", "allowed"),
    [
        (None, None, None, 0),
        (-10, None, None, -10),
        (None, -10, None, -10),
        (None, None, -10, -10),
        (None, 5, -10, 5),
        (-10, -3, None, -3),
        (-3, -10, None, -3),
        (-3, None, -2, -2),
    ],
)
def test_a_keys_urgency_is_the_lesser_of_its_own_and_its_tenants(
    key: int | None, tenant: int | None, all_tenants: int | None, allowed: int
) -> None:
    section = GatewaySection.model_validate(
        {
            "api_keys": [{"key": "key-of-acme", "tenant": "acme", "max_priority": key}],
            "limits": {"max_priority": all_tenants},
            "tenant_limits": {"acme": {"max_priority": tenant}},
        }
    )
    assert section.max_priority(section.api_keys[0]) == allowed


def test_a_weight_is_a_tenants_own_or_everybodys() -> None:
    section = GatewaySection.model_validate(
        {"limits": {"weight": 2}, "tenant_limits": {"acme": {"weight": 0.5}, "blue": {"concurrent": 1}}}
    )
    assert [section.weight(tenant) for tenant in ("acme", "blue", "other")] == [0.5, 2.0, 2.0]
    assert GatewaySection().weight("anybody") == 1.0


@pytest.mark.parametrize("weight", [0, -1, 1001, "inf", "nan"])
def test_a_weight_that_is_none_stops_the_start(weight: Any) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.limits\.weight"):
        load_config(None, {"gateway": {"limits": {"weight": weight}}})
