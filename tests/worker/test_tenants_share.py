"""Tenants on one engine: a flood of one is no wait for another, weights are kept, and a full queue is shared."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.worker.engine_harness import Harness, tiny_model
from tests.worker.engine_harness import random_prompt as real_prompt
from tests.worker.virtual_engine import VirtualEngine
from tests.worker.virtual_model import random_prompt


def prompt(seed: int, length: int) -> list[int]:
    return random_prompt(random.Random(seed), length)


# ---- in virtual time -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("pages", "batch"), [(3000, 8), (120, 64)])
def test_one_tenants_flood_is_no_wait_for_anothers_short_chats(pages: int, batch: int) -> None:
    """Places are short, or pages are."""
    e = VirtualEngine(pages=pages, max_batch=batch, mixed_step_s=0.02)
    for n in range(60):
        e.submit(prompt(n, 8), 40, session=f"a{n}", tenant="a")
    e.go(until=lambda: any(len(a.tokens) > 3 for a in e.answers.values()))
    waits_s = []
    for n in range(5):
        asked_s, chat = e.world.now(), e.submit(prompt(100 + n, 40), 4, session=f"b{n}", tenant="b")
        e.go(until=lambda: e.answers[chat].end is not None)  # noqa: B023
        waits_s.append(e.answers[chat].times_s[0] - asked_s)
    still = sum(e.answers[f"r{n}"].end is None for n in range(60))
    assert still > 30 and max(waits_s) < 0.15, f"alone it takes 42 ms: {waits_s}"
    e.finish()


def test_within_a_flood_a_tenant_with_one_long_prompt_goes_on() -> None:
    e = VirtualEngine(pages=900, max_batch=8, mixed_step_s=0.02)
    for n in range(40):
        e.submit(prompt(n, 24), 20, session=f"a{n}", tenant="a")
    long = e.submit(prompt(99, 400), 4, session="b", tenant="b")
    e.go(until=lambda: e.answers[long].end is not None)
    assert sum(e.answers[f"r{n}"].end is None for n in range(40)) > 10
    e.finish()


@pytest.mark.parametrize("batch", [4, 8])
def test_under_contention_tokens_are_by_weight(batch: int) -> None:
    e = VirtualEngine(pages=3000, max_batch=batch, mixed_step_s=0.02)
    dice = random.Random(4)
    for n in range(120):
        e.submit(
            prompt(n, 16),
            dice.choice([10, 20, 30]),
            session=f"s{n}",
            tenant="ab"[n % 2],
            weight=3.0 if n % 2 == 0 else 1.0,
        )
    e.go(until=lambda: sum(a.end is not None for a in e.answers.values()) >= 60)
    tokens = Counter[str]()
    for n, answer in enumerate(e.answers.values()):
        tokens["ab"[n % 2]] += len(answer.tokens) + (16 if answer.tokens else 0)
    assert 2.4 < tokens["a"] / tokens["b"] < 3.6
    assert e.engine.core.scheduling.preemptions < 15, "of 60 that have ended"
    e.finish()


def test_a_full_queue_gives_up_the_youngest_of_whoever_fills_it() -> None:
    e = VirtualEngine(pages=60, max_batch=1, max_waiting=4)
    running = e.submit(prompt(0, 10), 30, tenant="a", session="a0")
    e.go(until=lambda: bool(e.answers[running].tokens))
    flood = [e.submit(prompt(n, 10), 2, tenant="a", session=f"a{n}") for n in range(1, 7)]
    other = [e.submit(prompt(n, 10), 2, tenant="b", session=f"b{n}") for n in range(10, 13)]
    e.finish()
    ends = [e.answers[name].end for name in (*flood, *other)]
    assert ends == ["length"] * 2 + ["refused 503"] * 4 + ["length"] * 2 + ["refused 503"]


def test_classes_of_priority_do_not_multiply_the_queue() -> None:
    e = VirtualEngine(pages=60, max_batch=1, max_waiting=3)
    running = e.submit(prompt(0, 10), 30, session="first", priority=-9)
    e.go(until=lambda: bool(e.answers[running].tokens))
    names = [e.submit(prompt(n, 10), 1, session=f"s{n}", priority=20 - n) for n in range(1, 16)]
    e.turn()
    assert sum(e.answers[name].end is None for name in names) == 6
    e.finish()
    assert [e.answers[name].end for name in names] == ["refused 503"] * 9 + ["length"] * 6, (
        "the most urgent ones are those that stay"
    )


# ---- on the real engine ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    made = Harness(tiny_model(tmp_path_factory.mktemp("tiny")), pages=1200, max_batch=8, step_ms=2)
    yield made
    made.close()


def test_beside_200_requests_of_one_tenant_anothers_chats_begin_within_a_few_steps(harness: Harness) -> None:
    dice = random.Random(8)
    chats = [real_prompt(dice, 60) for _ in range(5)]
    alone = [harness.run(chat, 4, tenant="b", session=f"b{n}").tokens for n, chat in enumerate(chats)]
    flood = [harness.submit(real_prompt(dice, 10), 30, tenant="a", session=f"a{n}") for n in range(200)]
    while not harness.engine.counts.running:
        harness.wait(flood[0])
    for n, chat in enumerate(chats):
        before = harness.computed.steps
        assert harness.run(chat, 4, tenant="b", session=f"again{n}").tokens == alone[n]
        assert harness.computed.steps - before < 80, "the flood takes more than 700"
    assert sum(harness._results[name].finish is None for name in flood) > 100
    harness.wait(*flood)
    harness.settle()
