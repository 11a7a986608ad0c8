"""Where a turn's time went, as callers, metrics and schedulers hear of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from gateway_fakes import MODEL, Stack, stack, until

from contracts.ids import SessionKey
from contracts.turn_times import MOST_TOGETHER, Phase
from gateway import turn_reports
from gateway.core.turn_times import TurnTimes
from gateway.cors import cors_headers
from gateway.generate import Progress
from gateway.timing import HEADER

FIRST, LAST = {"queue": 0.001, "load-ssd": 0.002, "admit": 99.0, "evil\r\nX-Evil: 1": 1.0}, {"decode": 0.001}
ASKS = {"X-Upbeat-Timing": "1"}


@pytest.fixture
async def s() -> Any:
    async with stack() as running:
        for worker in running.workers:
            worker.times, worker.token_s = (FIRST, LAST), 0.01
        yield running


def read(value: str) -> dict[str, float]:
    """Milliseconds by name."""
    return {name: float(ms) for name, ms in re.findall(r"([a-z-]+);dur=([\d.]+)", value)}


async def stream(s: Stack, body: dict[str, Any], headers: dict[str, str]) -> tuple[dict[str, float], str]:
    """The header's, and the whole text."""
    ask = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "x"}], **body}
    async with s.http.post(f"{s.url}/v1/chat/completions", json=ask, headers=headers) as r:
        return read(r.headers[HEADER]), await r.text()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2}),
        ("/v1/completions", {"prompt": ["a", "b"]}),
    ],
)
async def test_a_whole_answer_says_all_of_it_and_the_phases_add_up(s: Stack, path: str, body: dict[str, Any]) -> None:
    status, _, headers = await s.post(path, {"model": MODEL, **body})
    said = read(headers[HEADER])
    assert status == 200 and set(said) == {"total", "admit", "place", "prepare", "queue", "load-ssd", "decode"}
    # On a busy machine the first token may come late, and decoding is then that much shorter: the total alone has a
    # least value.
    assert (said["queue"], said["load-ssd"]) == (1.0, 2.0) and said["decode"] > 1 and said["admit"] < 5_000
    assert said["total"] >= 50 and sum(said.values()) - said["total"] <= said["total"] + 0.5, (
        "others' choices may take longer"
    )
    assert "evil" not in headers[HEADER] and "X-Evil" not in headers


async def test_a_tokenizers_answer_says_it_too(s: Stack) -> None:
    _, _, headers = await s.post("/tokenize", {"model": MODEL, "prompt": "abc"})
    assert set(read(headers[HEADER])) == {"total", "admit", "prepare"}


async def test_a_stream_says_what_is_known_when_it_begins(s: Stack) -> None:
    known, text = await stream(s, {}, {})
    assert set(known) <= {"admit", "place", "prepare"} and "place" in known
    assert "server-timing" not in text and not re.search("^:", text, re.MULTILINE)


@pytest.mark.parametrize("asked", ["0", "", "true", "1, 1", "yes"])
async def test_only_one_word_asks_for_the_comment(s: Stack, asked: str) -> None:
    _, text = await stream(s, {}, {"X-Upbeat-Timing": asked})
    assert "server-timing" not in text


async def test_where_it_is_asked_for_the_whole_comes_right_before_the_end(s: Stack) -> None:
    _, text = await stream(s, {"stream_options": {"include_usage": True}}, ASKS)
    *_, usage, comment, done, nothing = text.split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "") and '"usage":{' in usage
    said = read(comment.removeprefix(": server-timing "))
    assert comment.startswith(": server-timing total;dur=") and "\n" not in comment
    assert set(said) == {"total", "admit", "place", "prepare", "queue", "load-ssd", "decode"}
    assert sum(said.values()) == pytest.approx(2 * said["total"], abs=20)


async def test_the_phases_of_a_turn_that_moved_are_of_all_its_attempts(s: Stack) -> None:
    s.workers[0].die_after = 2
    async with s.http.post(
        f"{s.url}/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 6}, headers=ASKS
    ) as r:
        text = await r.text()
    assert len(events_in(text)) >= 6 and text.endswith("data: [DONE]\n\n")
    said = read(text.split("\n\n")[-3])
    assert (said["queue"], said["load-ssd"]) == (2.0, 4.0), "both attempts'"
    await until(lambda: bool(s.scheduler.timed))
    (record,) = s.scheduler.timed[0].turns
    assert record.request_id == s.workers[1].submitted[0].request_id and record.request_id.endswith(".r1")
    assert record.until_first_s["queue"] == record.after_s["queue"] == 0.001


def events_in(text: str) -> list[str]:
    """The events of a stream's text."""
    return [block for block in text.split("\n\n") if block.startswith("data: ")]


async def test_a_worker_that_tells_nothing_is_no_harm(s: Stack) -> None:
    s.workers[0].times = None, None
    _, text = await stream(s, {}, ASKS)
    assert set(read(text.split("\n\n")[-3])) <= {"total", "admit", "place", "prepare", "decode"}


@pytest.mark.parametrize(
    "told", [["queue"], "queue", 7, {"queue": "1"}, {"queue": float("nan"), "compute": -1.0, 3: 4.0}]
)
async def test_neither_is_one_that_tells_nonsense(s: Stack, told: Any) -> None:
    s.workers[0].times = told, told
    status, _, headers = await s.chat()
    assert status == 200 and set(read(headers[HEADER])) <= {"total", "admit", "place", "prepare", "decode"}


# ---- pages


def test_pages_that_may_read_an_answer_may_see_its_times() -> None:
    allowed = cors_headers("/v1/chat/completions", "https://a.org", ("https://a.org",))
    assert (
        allowed["Timing-Allow-Origin"] == "https://a.org"
        and "Server-Timing" in allowed["Access-Control-Expose-Headers"]
    )
    assert cors_headers("/v1/chat/completions", "https://a.org", ("*",))["Timing-Allow-Origin"] == "*"
    for path, origin in (("/v1/chat/completions", "https://b.org"), ("/v1/advisory", "https://b.org")):
        assert "Timing-Allow-Origin" not in cors_headers(path, origin, ("https://a.org",))


# ---- metrics


async def test_each_phase_of_a_turn_is_counted_once_by_model(s: Stack) -> None:
    async def count(phase: str) -> float:
        async with s.http.get(f"{s.url}/metrics") as r:
            text = await r.text()
        found = re.search(
            rf'^upbeat_gateway_turn_seconds_count{{model="{MODEL}",phase="{phase}"}} (.*)$', text, re.MULTILINE
        )
        return float(found.group(1)) if found else 0.0

    before = {phase: await count(phase) for phase in Phase}
    await s.chat(n=2)
    await s.chat(temperature=9)
    seen = {"admit", "place", "prepare", "queue", "load-ssd", "decode"}
    assert {phase: await count(phase) - before[phase] for phase in Phase} == {
        phase: float(phase in seen) for phase in Phase
    }


# ---- to the scheduler


async def test_the_scheduler_that_placed_a_turn_is_told_a_second_later_and_no_other() -> None:
    async with stack(schedulers=3) as s:
        for i in range(6):
            await s.chat(session_id=f"s{i}")
        await s.chat(headers={"X-Session-Id": "w", "X-Upbeat-Workflow": "flow", "X-Upbeat-Agent": "qa"})
        await until(lambda: sum(len(m.turns) for d in s.schedulers for m in d.timed) == 7)
        for decider in s.schedulers:
            assert {t.request_id for m in decider.timed for t in m.turns} == {p.request_id for p in decider.placed}
            assert len(decider.timed) <= 2, "they go together"
        told = next(t for d in s.schedulers for m in d.timed for t in m.turns)
        assert told.session.session_id and told.until_first_s["place"] > 0


async def test_no_turn_goes_elsewhere_because_a_record_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_reports, "EVERY_S", 0.05)
    monkeypatch.setattr(turn_reports, "TELL_TIMEOUT_S", 0.1)
    async with stack(schedulers=2) as s:
        for decider in s.schedulers:
            decider.ignores_times = True
        for _ in range(3):
            placed = sum(len(d.placed) for d in s.schedulers)
            assert (await s.chat())[0] == 200
            assert sum(len(d.placed) for d in s.schedulers) == placed + 1
            seen = sum(len(d.timed) for d in s.schedulers)
            await until(lambda seen=seen: sum(len(d.timed) for d in s.schedulers) > seen)
        schedulers = s.gateway.parts.fleet.schedulers
        assert len(schedulers.of(None)) == 2


async def test_what_waits_is_bounded_and_so_is_a_message() -> None:
    async with stack() as s:
        reports, spoken = s.gateway.parts.turn_reports, TurnTimes(0.0)
        reports.note(SessionKey("t", "s"), Progress(TurnTimes(0.0), "silent"))
        assert len(reports) == 0, "one that never spoke"
        spoken.spoke({"queue": 1.0}, 1.0)
        for i in range(turn_reports.QUEUE_LIMIT + 10):
            reports.note(SessionKey("t", "s"), Progress(spoken, f"r{i}"))
        assert len(reports) == turn_reports.QUEUE_LIMIT
        await until(lambda: sum(len(m.turns) for m in s.scheduler.timed) == turn_reports.QUEUE_LIMIT)
        assert {len(m.turns) for m in s.scheduler.timed} == {MOST_TOGETHER}
        assert s.scheduler.timed[0].turns[0].request_id == "r10", "the oldest were dropped"
