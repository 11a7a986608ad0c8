"""What a tenant may use: buckets, tickets, windows, and how answers say it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_fakes import Stack, stack, until
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from contracts.errors import IllegalTransition
from gateway.core.limits import Bucket
from gateway.core.usage import Allowance, Refused, Ticket, Usage, duration, estimated_tokens

NOON = 1_800_014_400.0  # 2027-01-15 12:00 UTC
DAY_S = 86_400.0


def usage(**limits: float) -> Usage:
    return Usage(Allowance(), {"a": Allowance(**limits)})  # type: ignore[arg-type]


def admitted(found: Ticket | Refused) -> Ticket:
    assert isinstance(found, Ticket), found
    return found


def refused(found: Ticket | Refused) -> Refused:
    assert isinstance(found, Refused), found
    return found


# ---- the core ------------------------------------------------------------------------------------------------------
@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 50)), max_size=40), st.floats(0.1, 20), st.floats(1, 40))
@settings(deadline=None)
def test_a_bucket_never_grants_more_than_its_rate_and_its_burst(
    asked: list[tuple[float, float]], per_s: float, burst: float
) -> None:
    bucket, now, granted = Bucket(per_s, burst, 0.0), 0.0, 0.0
    for pause, wanted in asked:
        now += pause
        wait = bucket.wait_s(wanted, now)
        if wait == 0:
            bucket.take(wanted)
            granted += wanted
        else:
            assert bucket.wait_s(wanted, now + wait + 1e-6) == 0, "what it says is when it can be had"
            now += wait + 1e-6
        bucket.validate()
        assert granted <= burst + now * per_s + max([0.0, *(w for _, w in asked)]) + 1e-3


def test_requests_are_limited_by_the_minute_and_come_back_evenly() -> None:
    u = usage(requests_per_min=6)
    for _ in range(6):
        u.finish(admitted(u.begin("a", 1, 0.0, NOON)), 1, 0.0, NOON)
    no = refused(u.begin("a", 1, 0.0, NOON))
    assert (no.what, no.after_s) == ("requests", 10.0)
    assert isinstance(u.begin("a", 1, 10.0, NOON + 10), Ticket)
    assert isinstance(u.begin("b", 1, 0.0, NOON), Ticket), "another tenant has its own"


def test_tokens_are_estimated_at_first_and_settled_at_the_end() -> None:
    u = usage(tokens_per_min=600)
    ticket = admitted(u.begin("a", 100, 0.0, NOON))
    assert u.standing("a", 0.0)["tokens"].remaining == 500
    u.finish(ticket, 900, 0.0, NOON)
    no = refused(u.begin("a", 100, 0.0, NOON))
    assert (no.what, no.after_s) == ("tokens", 40.0), (
        "the answer left a debt of 300 that is paid off at 10 a second, and 100 are wanted"
    )
    assert u.standing("a", 0.0)["tokens"].remaining == 0
    u.finish(admitted(u.begin("a", 100, 40.0, NOON)), 0, 40.0, NOON)
    assert u.standing("a", 40.0)["tokens"].remaining == 100, "a request that came to nothing costs no tokens"


def test_a_prompt_larger_than_a_minute_passes_when_the_bucket_is_full() -> None:
    u = usage(tokens_per_min=60)
    u.finish(admitted(u.begin("a", 500, 0.0, NOON)), 500, 0.0, NOON)
    assert refused(u.begin("a", 1, 0.0, NOON)).after_s == pytest.approx(441.0)


def test_requests_at_a_time_are_limited_until_they_end() -> None:
    u = usage(concurrent=2)
    first = admitted(u.begin("a", 1, 0.0, NOON))
    admitted(u.begin("a", 1, 0.0, NOON))
    assert refused(u.begin("a", 1, 0.0, NOON)).what == "concurrent"
    u.finish(first, 5, 0.0, NOON)
    admitted(u.begin("a", 1, 0.0, NOON))
    with pytest.raises(IllegalTransition):
        u.finish(first, 5, 0.0, NOON)


def test_a_day_ends_at_midnight_and_a_month_on_its_first_day() -> None:
    u = usage(tokens_per_day=100, tokens_per_month=150)
    u.finish(admitted(u.begin("a", 10, 0.0, NOON)), 100, 0.0, NOON)
    no = refused(u.begin("a", 1, 0.0, NOON))
    assert (no.what, no.after_s) == ("day", DAY_S / 2)
    u.finish(admitted(u.begin("a", 50, 0.0, NOON + DAY_S / 2)), 50, 0.0, NOON + DAY_S / 2)
    no = refused(u.begin("a", 1, 0.0, NOON + DAY_S / 2))
    assert (no.what, no.after_s) == ("month", 16 * DAY_S), "from the 16th to the 1st of February"
    admitted(u.begin("a", 100, 0.0, NOON + 17 * DAY_S))


def test_a_quota_counts_what_is_still_running() -> None:
    u = usage(tokens_per_day=100)
    admitted(u.begin("a", 60, 0.0, NOON))
    assert refused(u.begin("a", 60, 0.0, NOON)).what == "day"


def test_a_wall_clock_that_goes_back_forgets_nothing() -> None:
    u = usage(tokens_per_day=100)
    u.finish(admitted(u.begin("a", 100, 0.0, NOON)), 100, 0.0, NOON)
    assert refused(u.begin("a", 1, 0.0, NOON - DAY_S)).what == "day"


def test_processes_share_a_limit() -> None:
    shared = Allowance(60, 600, 3, 100, 0).share(2)
    assert (shared.requests_per_min, shared.tokens_per_min, shared.concurrent, shared.tokens_per_day) == (
        30,
        300,
        2,
        50,
    )
    assert shared.tokens_per_month == 0, "no limit stays none"


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0ms"), (0.0174, "17ms"), (1.5, "1.5s"), (59.96, "60s"), (360, "6m0s"), (7384, "2h3m4s")]
)
def test_durations_are_said_as_elsewhere(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_a_prompt_is_estimated_by_its_bytes_or_counted_by_its_ids() -> None:
    assert (estimated_tokens(0), estimated_tokens(9), estimated_tokens(0, 7)) == (1, 3, 7)


class UsageMachine(RuleBasedStateMachine):
    """Whatever comes and ends, whenever: the invariants hold, and nothing is refused for ever."""

    @initialize(rpm=st.integers(0, 30), tpm=st.integers(0, 300), concurrent=st.integers(0, 4), day=st.integers(0, 2000))
    def begin(self, rpm: int, tpm: int, concurrent: int, day: int) -> None:
        self.u = Usage(Allowance(rpm, tpm, concurrent, day, 0), {"free": Allowance()})
        self.now, self.open = 0.0, list[Ticket]()

    @rule(tenant=st.sampled_from(["a", "b", "free"]), tokens=st.integers(1, 200))
    def ask(self, tenant: str, tokens: int) -> None:
        found = self.u.begin(tenant, tokens, self.now, NOON + self.now)
        if isinstance(found, Ticket):
            self.open.append(found)
        else:
            assert tenant != "free" and found.after_s > 0

    @precondition(lambda self: self.open)
    @rule(used=st.integers(0, 400), which=st.integers(0, 100))
    def end(self, used: int, which: int) -> None:
        self.u.finish(self.open.pop(which % len(self.open)), used, self.now, NOON + self.now)

    @rule(seconds=st.floats(0, 5000))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "u"):
            self.u.validate()

    def teardown(self) -> None:
        if hasattr(self, "u"):
            for ticket in self.open:
                self.u.finish(ticket, 0, self.now, NOON + self.now)
            later = self.now + 100 * DAY_S
            for tenant in ("a", "b", "free"):
                found = self.u.begin(tenant, 1, later, NOON + later)
                assert isinstance(found, Ticket), f"still refused after a hundred days: {found}"


TestUsage = UsageMachine.TestCase
TestUsage.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


# ---- through HTTP --------------------------------------------------------------------------------------------------
KEYS = [{"key": "key-of-tenant-a", "tenant": "a"}, {"key": "key-of-tenant-b", "tenant": "b"}]


def as_tenant(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer key-of-tenant-{name}"}


def limited(**limits: Any) -> dict[str, Any]:
    return {"api_keys": KEYS, "tenant_limits": {"a": limits}}


async def chat(s: Stack, tenant: str, **more: Any) -> tuple[int, Any, Any]:
    return await s.chat("x" * 400, headers=as_tenant(tenant), **more)


async def test_over_the_requests_of_a_minute_is_a_429_that_says_when_and_others_are_served() -> None:
    async with stack(1, **limited(requests_per_min=3)) as s:
        left = []
        for _ in range(3):
            status, _, headers = await chat(s, "a")
            assert status == 200
            left.append(headers["x-ratelimit-remaining-requests"])
        assert left == ["2", "1", "0"] and headers["x-ratelimit-limit-requests"] == "3"
        assert "x-ratelimit-limit-tokens" not in headers, "what has no limit is not named"
        status, body, headers = await chat(s, "a")
        assert (status, body["error"]["code"], body["error"]["type"]) == (
            429,
            "rate_limit_exceeded",
            "rate_limit_error",
        )
        assert 1 <= int(headers["Retry-After"]) <= 20 and headers["x-ratelimit-remaining-requests"] == "0"
        assert "x-should-retry" not in headers
        status, _, headers = await chat(s, "b")
        assert status == 200 and not [name for name in headers if name.lower().startswith("x-ratelimit")]
        assert len(s.workers[0].submitted) == 4, "what is refused reaches no worker"


async def test_tokens_of_a_minute_are_settled_with_what_was_used() -> None:
    async with stack(1, **limited(tokens_per_min=1000)) as s:
        # The toy model's prompt is 406 tokens (a character each), estimated as 100; its answer is 5.
        status, answer, _ = await chat(s, "a")
        usage = answer["usage"]
        async with s.http.post(
            f"{s.url}/v1/chat/completions",
            json={"model": "toy", "messages": [{"role": "user", "content": "x"}], "stream": True},
            headers=as_tenant("a"),
        ) as r:
            assert (
                r.status == 200 and int(r.headers["x-ratelimit-remaining-tokens"]) == 1000 - usage["total_tokens"] - 1
            )
            await r.read()
        for _ in range(5):
            status, body, _ = await chat(s, "a")
            if status != 200:
                break
        assert (status, body["error"]["message"].startswith("more than 1000 tokens a minute")) == (429, True)


async def test_requests_at_a_time_are_limited_and_a_client_that_leaves_makes_room() -> None:
    async with stack(1, **limited(concurrent=1)) as s:
        s.workers[0].token_s = 0.05
        going = asyncio.create_task(chat(s, "a", max_tokens=500))
        await until(lambda: len(s.workers[0].submitted) == 1)
        status, body, headers = await chat(s, "a")
        assert (status, headers["Retry-After"]) == (429, "1") and "at a time" in body["error"]["message"]
        going.cancel()

        async def is_served() -> bool:
            return (await chat(s, "a", max_tokens=1))[0] == 200

        await until(is_served)


async def test_a_quota_is_a_429_that_clients_do_not_retry_by_themselves() -> None:
    async with stack(1, **limited(tokens_per_day=300)) as s:
        assert (await chat(s, "a"))[0] == 200
        status, body, headers = await chat(s, "a")
        assert (status, body["error"]["code"]) == (429, "insufficient_quota")
        assert headers["x-should-retry"] == "false" and 1 <= int(headers["Retry-After"]) <= DAY_S


async def test_a_request_that_was_refused_by_the_worker_costs_no_tokens() -> None:
    async with stack(1, **limited(tokens_per_min=5000)) as s:
        status, _, headers = await s.chat("x" * 9000, headers=as_tenant("a"))
        assert status == 400 and headers["x-ratelimit-remaining-tokens"] == "5000"


async def test_more_requests_than_the_gateway_answers_at_a_time_are_told_503() -> None:
    async with stack(1, max_requests=1, queue_s=0.1) as s:
        s.workers[0].token_s = 0.05
        going = asyncio.create_task(s.chat(max_tokens=500))
        await until(lambda: len(s.workers[0].submitted) == 1)
        status, body, headers = await s.chat()
        assert (status, body["error"]["code"], headers["Retry-After"]) == (503, "overloaded", "1")
        going.cancel()


async def test_bodies_of_all_requests_together_are_bounded() -> None:
    async with stack(1, body_memory_bytes=1 << 20, tenant_share=1) as s:
        assert s.gateway.parts is not None
        bodies = s.gateway.parts.bodies
        s.workers[0].token_s = 0.05
        text = "x" * 1500
        held = [asyncio.create_task(s.chat(text, max_tokens=500, user="u" * 150_000)) for _ in range(6)]
        await until(lambda: len(s.workers[0].submitted) == 6)
        assert 900_000 < bodies.held <= 1 << 20
        status, body, headers = await s.chat(user="u" * 150_000)
        assert (status, body["error"]["code"], headers["Retry-After"]) == (503, "overloaded", "1")
        assert (await s.chat(max_tokens=1))[0] == 200, "a small one still fits"
        for task in held:
            task.cancel()
        await until(lambda: bodies.held == 0)


async def test_connections_beyond_the_limit_are_told_503() -> None:
    async with stack(1, max_connections=8) as s:
        idle = [await asyncio.open_connection("127.0.0.1", s.config.gateway.port) for _ in range(8)]
        reader, writer = await asyncio.open_connection("127.0.0.1", s.config.gateway.port)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ") and b"overloaded" in answer
        writer.close()
        for _, w in idle:
            w.close()

        async def is_served() -> bool:
            return (await s.get("/health"))[0] == 200

        await until(is_served)


async def test_a_tenants_weight_goes_to_the_worker_with_each_of_its_requests() -> None:
    async with stack(1, **limited(weight=3.0), limits={"weight": 0.5}) as s:
        for tenant, weight in (("a", 3.0), ("b", 0.5)):
            status, _, _ = await chat(s, tenant)
            assert status == 200 and s.workers[0].submitted[-1].weight == weight
