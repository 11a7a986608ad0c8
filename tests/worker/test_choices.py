"""Several choices of one prompt share its KV, and each is what it would be alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.request import GenerateRequest, Sampling
from tests.worker.engine_harness import CHUNK, Harness, random_prompt, tiny_model
from worker.core.sequence import Sequence
from worker.core.shared_prompt import awaits_prompt


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def harness(model: Path) -> Iterator[Harness]:
    made = Harness(model, step_tokens=64)  # a long prompt takes several steps
    yield made
    made.settle()
    made.close()


@pytest.mark.parametrize("length", [10, CHUNK, 200, 13 * CHUNK, 13 * CHUNK + 1])
def test_later_choices_compute_only_what_no_full_chunk_holds(harness: Harness, length: int) -> None:
    prompt, n, generated = random_prompt(random.Random(length), length), 4, 6
    asked = [harness.submit(prompt, generated, group="g", choice=i) for i in range(n)]
    results = harness.wait(*asked)
    shared = (length - 1) // CHUNK * CHUNK
    assert [r.cached for r in results] == [0] + [shared] * (n - 1)
    assert harness.computed.tokens == length + (n - 1) * (length - shared) + n * (generated - 1)
    assert len({tuple(r.tokens) for r in results}) == 1, "greedy choices are equal"


def test_requests_that_are_no_choices_of_one_prompt_do_not_wait(harness: Harness) -> None:
    prompt = random_prompt(random.Random(1), 200)
    results = harness.wait(
        harness.submit(prompt, 4, group="g"), harness.submit(prompt, 4, group="h"), harness.submit(prompt, 4)
    )
    assert [r.cached for r in results] == [0, 0, 0]


def test_choices_go_on_when_the_one_that_computes_is_cancelled(harness: Harness) -> None:
    prompt = random_prompt(random.Random(2), 300)
    first, second, third = (harness.submit(prompt, 4, group="g", choice=i) for i in range(3))
    harness.cancel(first)
    results = harness.wait(first, second, third)
    assert [r.finish for r in results] == ["cancelled", "length", "length"]
    assert results[1].tokens == results[2].tokens and results[2].cached == 288


def test_choices_that_were_resumed_share_the_prompt_too(harness: Harness) -> None:
    prompt = random_prompt(random.Random(3), 200)
    alone = harness.run(prompt, 10)
    harness.purge()
    before = harness.computed.tokens
    assert harness.store is not None
    harness.store.chunks.clear()  # another node has nothing of it
    asked = [harness.submit(prompt, 10, group="g", choice=i, resume=alone.tokens[: 3 + i]) for i in range(3)]
    assert [r.tokens for r in harness.wait(*asked)] == [alone.tokens[3 + i :] for i in range(3)]
    assert harness.computed.tokens - before < 2 * len(prompt)


def test_choices_are_preempted_and_still_end_right(model: Path) -> None:
    wide = Harness(model)
    prompt = random_prompt(random.Random(4), 100)
    expected = [wide.run(prompt, 60, temperature=1.0, seed=i).tokens for i in range(4)]
    wide.close()
    narrow = Harness(model, pages=64, step_tokens=32)
    asked = [narrow.submit(prompt, 60, group="g", choice=i, temperature=1.0, seed=i) for i in range(4)]
    assert [r.tokens for r in narrow.wait(*asked)] == expected
    narrow.settle()
    narrow.close()


def test_only_the_first_choice_names_the_sessions_cache(harness: Harness) -> None:
    prompt = random_prompt(random.Random(5), 40)
    harness.wait(
        *(harness.submit(prompt, 30, group="g", choice=i, temperature=1.0, seed=i, session="n") for i in range(3))
    )
    harness.settle()
    assert harness.store is not None
    assert [m.session.session_id for m in harness.store.manifests] == ["n"]


def test_without_a_cache_each_choice_computes_the_prompt(model: Path) -> None:
    harness = Harness(model, cache=False)
    prompt = random_prompt(random.Random(6), 100)
    results = harness.wait(*(harness.submit(prompt, 5, group="g", choice=i) for i in range(2)))
    assert [r.cached for r in results] == [0, 0] and results[0].tokens == results[1].tokens
    harness.close()


def test_who_waits_for_whom() -> None:
    def sequence(arrival: int, group: str, computed: int = 0, prompt: int = 40) -> Sequence:
        request = GenerateRequest(f"r{arrival}", "t", "s", "m", Sampling(), group=group)
        return Sequence(request, prompt, [0] * prompt, 10, arrival, computed=computed)

    first, second, other = sequence(0, "g"), sequence(1, "g"), sequence(2, "h")
    everyone = [first, second, other]
    assert [awaits_prompt(s, everyone, CHUNK) for s in everyone] == [False, True, False]
    first.computed = 31
    assert awaits_prompt(second, everyone, CHUNK)
    first.computed = 32
    assert not awaits_prompt(second, everyone, CHUNK)
    assert not awaits_prompt(sequence(4, "k", prompt=CHUNK), [sequence(3, "k", prompt=CHUNK)], CHUNK), (
        "no full chunk is shared"
    )


def test_a_seeded_answer_does_not_depend_on_what_runs_beside_it(harness: Harness) -> None:
    prompt = random_prompt(random.Random(7), 50)
    settings = {"temperature": 1.1, "top_p": 0.95, "seed": 77, "presence_penalty": 0.3, "repetition_penalty": 1.1}
    alone = harness.run(prompt, 30, session="seeded", **settings)
    dice = random.Random(8)
    for beside in (1, 3, 7):
        others = [
            harness.submit(
                random_prompt(dice, dice.randrange(5, 150)),
                dice.randrange(1, 40),
                session=f"o{i}",
                temperature=dice.choice([0.0, 1.0]),
            )
            for i in range(beside)
        ]
        again = harness.submit(prompt, 30, session=f"again{beside}", **settings)
        results = harness.wait(again, *others)
        assert results[0].tokens == alone.tokens and results[0].text == alone.text
