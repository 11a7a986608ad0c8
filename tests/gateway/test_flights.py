"""What the gateway decides of requests on workers: what goes out next, who is to blame for a death, who has waited long
enough."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from gateway_fakes import QUICK, Stack, stack, until
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import InvalidRequest
from contracts.frames import PART_BYTES, Commands, StepFrame, together
from contracts.request import Failed, GenerateRequest, Sampling
from gateway.core import quarantine
from gateway.core.outbox import Outbox
from gateway.core.overdue import HEARD_S, Waits, abandoned, late
from gateway.core.quarantine import MOST_OF_A_TENANT, REFUSED_S, Quarantine, Verdict, judge
from gateway.core.retry import Again, Attempts, GiveUp, RetryLimits


def request(name: str = "r", size: int = 10, **more: Any) -> GenerateRequest:
    return GenerateRequest(
        name, more.pop("tenant", "t"), "s", "m", more.pop("sampling", Sampling(seed=1)), prompt="x" * size, **more
    )


def test_a_large_prompt_is_known_by_what_it_says_too() -> None:
    """It is packed already where it comes from, and stands in no field."""
    one, other = (replace(request(), prompt=None, packed={"prompt": text}) for text in (b"\xa3one", b"\xa3two"))
    known = Quarantine()
    known.condemn(one, 0.0)
    known.check(other, 1.0)
    with pytest.raises(InvalidRequest) as refused:
        known.check(replace(one, request_id="again"), 1.0)
    assert refused.value.code == "poisonous_request"


# ---- the outbox ------------------------------------------------------------------------------------------------------
def drained(outbox: Outbox) -> list[list[Any]]:
    """What the worker takes out of each message."""
    heard, found = Commands(), []
    while outbox:
        message = outbox.next()
        outbox.validate()
        if message.commands:
            assert sum(map(len, message.commands)) <= 2 * PART_BYTES + 1000
            found.append(heard.take(together(message.commands)))
            heard.validate()
    return found


def test_a_small_command_waits_for_one_part_of_a_large_one_at_most() -> None:
    outbox = Outbox()
    for n in range(5):
        outbox.submit(request(f"large{n}", 15 << 20))
    outbox.next()
    outbox.submit(request("small"))
    outbox.cancel("other")
    first, *rest = drained(outbox)
    assert first == [request("small"), "other"]
    assert sorted(c.request_id for message in rest for c in message) == [f"large{n}" for n in range(5)]


def test_large_submits_share_the_stream_and_one_that_is_cancelled_is_no_longer_sent() -> None:
    outbox = Outbox(window_bytes=3 * PART_BYTES)
    for name in ("a", "b", "c"):
        outbox.submit(request(name, PART_BYTES + 10))
    outbox.next()
    outbox.cancel("a")
    outbox.cancel("c")
    assert [c if isinstance(c, str) else c.request_id for message in drained(outbox) for c in message] == [
        "a",
        "c",
        "b",
    ]


def test_what_cannot_be_sent_is_refused_by_itself() -> None:
    outbox = Outbox()
    outbox.submit(GenerateRequest("half", "t", "s", "m", Sampling(), prompt="\ud800"))
    outbox.submit(request("whole"))
    message = outbox.next()
    assert message.sent == ["whole"] and [(name, e.status) for name, e in message.refused] == [("half", 400)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 1000, PART_BYTES - 50, PART_BYTES + 1, 3 * PART_BYTES]), st.booleans()),
        max_size=20,
    )
)
def test_everything_arrives_once_and_small_ones_in_their_order(entries: list[tuple[int, bool]]) -> None:
    outbox, kept, small = Outbox(window_bytes=4 * PART_BYTES), set(), []
    for n, (size, cancelled) in enumerate(entries):
        outbox.submit(request(str(n), size))
        if cancelled:
            outbox.cancel(str(n))
        elif size < PART_BYTES - 200:
            small.append(str(n))
        kept |= set() if cancelled else {str(n)}
    came = [c.request_id for message in drained(outbox) for c in message if isinstance(c, GenerateRequest)]
    assert len(came) == len(set(came)) and kept <= set(came)
    assert [name for name in came if name in small] == small


# ---- blame -----------------------------------------------------------------------------------------------------------
SENT = {"a": True, "b": True, "c": False}


def test_a_death_during_a_trial_is_the_fault_of_the_request_on_trial_and_of_nobody_else() -> None:
    assert judge(SENT, "a") == {"a": Verdict.GUILTY, "b": Verdict.INNOCENT, "c": Verdict.INNOCENT}
    assert set(judge(SENT, "another gateway's").values()) == {Verdict.INNOCENT}


def test_any_other_death_makes_suspects_of_what_the_worker_had() -> None:
    assert judge(SENT, "") == {"a": Verdict.SUSPECT, "b": Verdict.SUSPECT, "c": Verdict.INNOCENT}


def test_nobody_is_to_blame_for_an_orderly_end_and_nobody_is_guilty_of_silence() -> None:
    assert set(judge(SENT, "a", leaving=True).values()) == {Verdict.INNOCENT}
    assert judge(SENT, "a", silent=True) == {"a": Verdict.SUSPECT, "b": Verdict.SUSPECT, "c": Verdict.INNOCENT}


def test_a_condemned_request_is_refused_for_a_while_whatever_its_seed_and_session_and_no_other_tenants() -> None:
    held = Quarantine()
    assert held.condemn(request(), 0.0).code == "poisonous_request"
    held.validate()
    for same in (
        request(),
        request(sampling=Sampling(seed=2)),
        replace(request(), session_id="else", request_id="q", priority=3),
    ):
        with pytest.raises(InvalidRequest, match="engine"):
            held.check(same, REFUSED_S - 1)
    for other in (request(tenant="u"), request(size=11), request(sampling=Sampling(temperature=0.5))):
        held.check(other, 1.0)
    held.check(request(), REFUSED_S + 1)
    assert len(held) == 0 and not held.remembers("t")
    held.validate()


def test_the_quarantine_is_bounded_by_tenant_and_one_cannot_empty_anothers() -> None:
    held = Quarantine()
    held.condemn(request(tenant="victim"), 0.0)
    for n in range(MOST_OF_A_TENANT + 50):
        held.condemn(request(size=n, tenant="attacker"), float(n) / 1000)
    held.validate()
    assert len(held) == MOST_OF_A_TENANT + 1 and held.remembers("victim")
    for n in range(quarantine.MOST_TENANTS + 5):
        held.condemn(request(tenant=f"t{n}"), 1.0)
    held.validate()
    assert len(held) == quarantine.MOST_TENANTS


# ---- waiting ---------------------------------------------------------------------------------------------------------
def test_acceptance_and_the_first_token_have_deadlines_of_their_own() -> None:
    waits = Waits(accept_s=10, first_token_s=100)
    assert not late(waits, 9, 0, None, False, alone=False) and "accepted within 10 s" in late(
        waits, 11, 0, None, False, alone=False
    )
    assert not late(waits, 109, 0, 10, False, alone=False) and "token within 100 s" in late(
        waits, 111, 0, 10, False, alone=False
    )
    assert not late(waits, 11, 0, None, False, alone=True), "it waits for its trial, behind others"
    assert late(waits, 101, 0, None, False, alone=True) and not late(waits, 1e9, 0, 10, True, alone=False)
    assert not late(Waits(0, 0), 1e9, 0, None, False, alone=False)


def test_a_stalled_worker_is_given_up_at_once_for_another_and_late_when_it_is_the_only_one() -> None:
    assert abandoned(10, 9.5, 5, 25, others=True) and not abandoned(10, 9.5, 5, 25, others=False)
    assert abandoned(40, 9.5, 5, 25, others=False)
    assert not abandoned(10, 9.5, 10 - HEARD_S / 2, 25, others=True), "it sends"
    assert not abandoned(10, None, 0, 25, others=True)


def test_innocent_attempts_are_not_counted_and_a_token_begins_the_time_anew() -> None:
    attempts = Attempts(RetryLimits(attempts=2, total_s=10))
    for n in range(9):
        assert isinstance(attempts.innocent("n0", float(n), "lost"), Again) and attempts.failed == 0
    assert isinstance(attempts.innocent("n0", 10.0, "lost"), GiveUp)
    attempts.progressed()
    assert isinstance(attempts.innocent("n0", 100.0, "lost"), Again) and not attempts.last
    attempts.lost("n0", 101.0, "lost", ran=True)
    assert attempts.last


# ---- a gateway and its workers
# -----------------------------------------------------------------------------------------
async def streamed(s: Stack, text: str = "hello", **more: Any) -> tuple[int, Any, Any]:
    return await s.chat(text, temperature=0, **more)


async def test_the_request_on_trial_is_refused_when_its_worker_dies_and_the_others_go_on_uncounted() -> None:
    async with stack(3) as s:
        expected = (await streamed(s, max_tokens=40))[1]["choices"]
        s.workers[0].token_s = 1e3
        going = asyncio.create_task(streamed(s, max_tokens=40))
        blamed = asyncio.create_task(streamed(s, "poison", max_tokens=40))
        await until(lambda: len(s.workers[0].submitted) == 3)
        trial = next(
            r.request_id for r in s.workers[0].submitted if r.messages and "poison" in r.messages[0]["content"]
        )
        s.workers[0].tell(StepFrame(trial=trial))
        await asyncio.sleep(0.1)
        await s.workers[0].kill()
        status, answer, _ = await blamed
        assert (status, answer["error"]["code"]) == (400, "poisonous_request")
        assert (await going)[1]["choices"] == expected
        assert [r.alone for r in s.workers[1].submitted] == [False]
        count = sum(len(w.submitted) for w in s.workers)
        status, answer, _ = await streamed(s, "poison", max_tokens=40, seed=9)
        assert (status, answer["error"]["code"]) == (400, "poisonous_request")
        assert sum(len(w.submitted) for w in s.workers) == count, "no worker hears of it again"


async def test_after_an_orderly_end_nobody_is_on_trial() -> None:
    async with stack(2) as s:
        s.workers[0].token_s = 0.02
        going = asyncio.create_task(streamed(s, max_tokens=20))
        await until(lambda: len(s.workers[0].submitted) == 1)
        s.workers[0].tell(StepFrame(leaving=True))
        await asyncio.sleep(0.1)
        await s.workers[0].kill()
        assert (await going)[0] == 200 and [r.alone for r in s.workers[1].submitted] == [False]


async def test_a_worker_that_never_accepts_loses_the_request_to_another() -> None:
    async with stack(2, retry_limits=replace(QUICK, accept_s=0.5)) as s:
        s.workers[0].silent = True
        status, _, headers = await s.chat()
        assert (status, headers["X-Upbeat-Node"]) == (200, "node-1")
        await until(lambda: len(s.workers[0].cancelled) == 1)


async def test_a_worker_that_is_told_to_stand_still_loses_its_requests_and_one_that_sends_does_not() -> None:
    async with stack(2) as s:
        expected = (await streamed(s, max_tokens=60))[1]["choices"]
        for w in s.workers:
            w.token_s = 0.05
        going = asyncio.create_task(streamed(s, max_tokens=60))
        await until(lambda: len(s.workers[0].submitted) == 2)
        s.scheduler.set_stalled("node-0")
        await asyncio.sleep(1.5)
        assert not s.workers[0].cancelled, "it sends, whatever the scheduler has seen"
        s.workers[0].token_s = 1e3
        answer = await going
        assert answer[1]["choices"] == expected and [r.alone for r in s.workers[1].submitted] == [True]
        await until(lambda: len(s.workers[0].cancelled) == 1)


async def test_large_prompts_are_refused_one_by_one_while_a_small_one_passes_them() -> None:
    async with stack(1) as s:
        assert s.gateway.parts is not None
        worker = s.workers[0]
        stream = s.gateway.parts.workers.stream(worker.node, worker.address)
        sent = [request(f"large{n}", 15 << 20) for n in range(5)] + [
            request("small", 5, sampling=Sampling(max_tokens=2))
        ]
        flights = [await stream.submit(r, 1.0) for r in sent]
        order = []

        async def ended(flight: Any) -> Any:
            while not flight.ended or flight.waiting:
                event = await flight.next()
            order.append(flight.request_id)
            return event

        events = await asyncio.gather(*(ended(flight) for flight in flights))
        assert order[0] == "small" and all(isinstance(e, Failed) and e.error[0] == 400 for e in events[:5])
        assert stream.connected and [r.model for r in worker.submitted] == ["m"] * 6
