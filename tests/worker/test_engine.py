"""Whatever is cached, loaded, purged, lost or cancelled: greedy tokens are those of a cold, unbatched run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.worker.engine_harness import CHUNK, Harness, random_prompt, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def cold(model: Path) -> Iterator[Callable[[list[int], int], list[int]]]:
    """Tokens of a run with nothing cached and nothing beside it."""
    harness = Harness(model, store=False, cache=False)
    known: dict[tuple[int, ...], list[int]] = {}

    def run(prompt: list[int], count: int) -> list[int]:
        key = tuple(prompt)
        if len(known.get(key, [])) < count:
            known[key] = harness.run(prompt, max(count, 24)).tokens
        return known[key][:count]

    yield run
    harness.close()


@pytest.fixture
def harness(model: Path) -> Iterator[Harness]:
    made = Harness(model)
    yield made
    made.settle()
    made.close()


Cold = Callable[[list[int], int], list[int]]


def test_a_second_turn_uses_what_the_first_left_in_hbm(harness: Harness, cold: Cold) -> None:
    prompt = random_prompt(random.Random(1), 70)
    first = harness.run(prompt, 20)
    longer = prompt + first.tokens + [5, 6, 7]
    second = harness.run(longer, 10)
    assert first.tokens == cold(prompt, 20) and second.tokens == cold(longer, 10)
    assert (first.cached, second.cached) == (0, 80)


def test_a_purged_session_is_loaded_layer_by_layer(harness: Harness, cold: Cold) -> None:
    prompt = random_prompt(random.Random(2), 100)
    harness.run(prompt, 4)
    harness.purge()
    again = harness.run(prompt, 12)
    assert harness.store is not None and harness.store.delivered == 6 * 4
    assert again.cached == 96 and again.tokens == cold(prompt, 12)


def test_layers_that_left_are_loaded_and_those_that_stayed_are_used_in_place(harness: Harness, cold: Cold) -> None:
    prompt = random_prompt(random.Random(3), 100)
    harness.run(prompt, 4)
    harness.settle()
    # the last layer of all six chunks, and half of the one before
    assert harness.cache.make_room(harness.pool.free + 9, 1e9)
    again = harness.run(prompt, 12)
    assert harness.store is not None and 9 <= harness.store.delivered < 24
    assert again.cached == 96 and again.tokens == cold(prompt, 12)


def test_another_engine_takes_the_session_over(harness: Harness, model: Path, cold: Cold) -> None:
    prompt = random_prompt(random.Random(4), 90)
    first = harness.run(prompt, 10)
    harness.settle()
    other = Harness(model, store=False)
    assert harness.store is not None
    harness.loop.stop()
    other.attach(harness.store)
    longer = prompt + first.tokens
    second = other.run(longer, 10)
    assert second.cached == 96 and second.tokens == cold(longer, 10)
    other.close()


@pytest.mark.parametrize("bad_layer", [0, 2, 3])
def test_a_bad_piece_costs_a_recomputation_and_nothing_else(harness: Harness, cold: Cold, bad_layer: int) -> None:
    prompt = random_prompt(random.Random(5), 100)
    harness.run(prompt, 4)
    harness.purge()
    assert harness.store is not None
    spoiled = list(harness.store.chunks)[3]
    harness.store.fault = lambda key, layer: not (key == spoiled and layer == bad_layer)
    again = harness.run(prompt, 12)
    assert again.tokens == cold(prompt, 12) and again.cached == 48


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_moved_bytes_are_identical_and_logits_agree(model: Path, dtype: str) -> None:
    harness, prompt = Harness(model, dtype=dtype), random_prompt(random.Random(20), 100)
    first = harness.run(prompt, 8, logprobs=0)
    harness.settle()
    before = harness.contents()
    harness.purge()
    assert not harness.contents()
    again = harness.run(prompt, 8, logprobs=0)
    harness.settle()
    after = harness.contents()
    assert again.cached == 96 and len(before) == 6 * 4
    assert all(after[piece] == before[piece] for piece in before)
    if first.tokens == again.tokens:
        assert again.logprobs == pytest.approx(first.logprobs, abs=0.05 if dtype == "bfloat16" else 1e-4)
    else:
        assert dtype == "bfloat16" and again.logprobs[0] == pytest.approx(first.logprobs[0], abs=0.05)
    harness.close()


def test_slow_layers_are_waited_for_one_at_a_time(harness: Harness, cold: Cold) -> None:
    prompt = random_prompt(random.Random(6), 200)
    harness.run(prompt, 4)
    harness.purge()
    assert harness.store is not None
    harness.store.delay_s = 0.02
    beside = harness.submit(random_prompt(random.Random(7), 20), 24)
    again = harness.submit(prompt, 12)
    loaded, other = harness.wait(again, beside)
    assert loaded.tokens == cold(prompt, 12) and loaded.cached == 192
    assert other.tokens == cold(random_prompt(random.Random(7), 20), 24)


def test_a_dead_store_is_survived_before_during_and_after_a_load(harness: Harness, cold: Cold) -> None:
    prompt = random_prompt(random.Random(8), 100)
    harness.run(prompt, 4)
    harness.purge()
    assert harness.store is not None
    harness.store.delay_s = 0.05
    request = harness.submit(prompt, 12)
    harness.detach()
    assert harness.wait(request)[0].tokens == cold(prompt, 12)
    assert harness.run([*prompt, 9], 6).tokens == cold([*prompt, 9], 6)


def test_what_the_store_refuses_is_offered_again_with_the_next_turn(harness: Harness) -> None:
    prompt = random_prompt(random.Random(9), 64)
    assert harness.store is not None
    harness.store.refuse = lambda key: True
    harness.run(prompt, 4)
    harness.settle()
    assert not harness.store.chunks and not harness.store.manifests
    harness.store.refuse = lambda key: False
    harness.run(prompt, 4)
    harness.settle()
    assert len(harness.store.chunks) == 4 and len(harness.store.manifests[-1].keys) == 4


def test_a_manifest_follows_its_last_chunk_and_names_the_whole_turn(harness: Harness) -> None:
    prompt = random_prompt(random.Random(10), 64)
    result = harness.run(prompt, 33, session="named")
    harness.settle()
    assert harness.store is not None
    manifest = harness.store.manifests[-1]
    assert manifest.session.session_id == "named" and manifest.tokens == 96 == len(manifest.keys) * CHUNK
    assert set(manifest.keys) <= set(harness.store.chunks) and len(result.tokens) == 33


def test_cancellation_frees_every_page(harness: Harness) -> None:
    requests = [harness.submit(random_prompt(random.Random(i), 50), 500, session=f"c{i}") for i in range(4)]
    for request in requests:
        harness.cancel(request)
    assert {r.finish for r in harness.wait(*requests)} == {"cancelled"}
    harness.purge()
    assert harness.pool.free == harness.pool.total


def test_an_erased_session_leaves_hbm_whatever_became_of_its_chunks(harness: Harness, cold: Cold) -> None:
    assert harness.store is not None
    kept, prompt = random_prompt(random.Random(30), 64), random_prompt(random.Random(31), 64)
    harness.run(kept, 4, session="kept")
    harness.store.refuse = lambda key: True
    harness.run(prompt, 20, session="gone")
    harness.settle()
    before = harness.pool.free
    harness.store.erase("gone", [])
    assert harness.run(kept, 8, session="kept").tokens == cold(kept, 8)
    harness.settle()
    assert harness.pool.free == before + 5 * 4, "nobody below knows these chunks, and they have left"
    assert harness.run(prompt, 20, session="other").cached == 0


def test_a_turn_that_runs_while_its_session_is_erased_ends_well_and_keeps_nothing(model: Path, cold: Cold) -> None:
    harness, prompt = Harness(model, step_ms=5), random_prompt(random.Random(32), 64)
    assert harness.store is not None
    running = harness.submit(prompt, 40, session="gone")
    while harness.computed.tokens < 80:
        time.sleep(0.005)
    harness.store.refuse = lambda key: True  # as the store does with late saves
    harness.store.erase("gone", list(harness.store.chunks))
    assert harness.wait(running)[0].tokens == cold(prompt, 40)
    harness.settle()
    assert harness.pool.free == harness.pool.total and not harness.store.manifests
    harness.close()


def test_a_turn_that_was_cut_off_in_its_prompt_does_not_shorten_what_its_session_has(model: Path) -> None:
    harness, prompt = Harness(model, step_ms=30, step_tokens=32), random_prompt(random.Random(33), 400)
    assert harness.store is not None
    harness.run(prompt[:200], 2, session="s")
    harness.settle()
    begun = harness.computed.tokens
    again = harness.submit([7, *prompt], 4, session="s")
    while harness.computed.tokens < begun + 64:
        time.sleep(0.005)
    harness.cancel(again)
    assert harness.wait(again)[0].finish == "cancelled"
    harness.settle()
    assert [m.tokens for m in harness.store.manifests] == [192]
    harness.close()


def test_a_cancelled_request_is_in_no_step_after_the_one_that_runs(model: Path) -> None:
    harness = Harness(model, step_ms=30)
    request = harness.submit(random_prompt(random.Random(3), 20), 500)
    while harness.computed.tokens < 25:
        time.sleep(0.005)
    harness.cancel(request)
    begun = harness.computed.tokens
    (result,) = harness.wait(request)
    assert result.finish == "cancelled"
    # One step may have been past taking events when the cancellation came, and not yet counted.
    assert harness.computed.tokens <= begun + 1
    after = harness.computed.tokens
    other = harness.submit(random_prompt(random.Random(4), 8), 2)
    harness.wait(other)
    assert harness.computed.tokens <= after + 8 + 2, "nothing of it is computed beside others either"


def test_more_sequences_than_fit_are_preempted_and_finish_right(model: Path, cold: Cold) -> None:
    harness = Harness(model, pages=64, step_tokens=64)
    prompts = [random_prompt(random.Random(100 + i), 60) for i in range(6)]
    requests = [harness.submit(p, 40, session=f"p{i}") for i, p in enumerate(prompts)]
    for prompt, result in zip(prompts, harness.wait(*requests), strict=True):
        assert result.tokens == cold(prompt, 40)
    harness.settle()
    harness.close()


def test_a_resumed_request_goes_on_where_the_other_worker_stopped(harness: Harness, cold: Cold) -> None:
    prompt = random_prompt(random.Random(11), 40)
    whole = cold(prompt, 20)
    resumed = harness.run(prompt, 20, resume=whole[:8])
    assert resumed.tokens == whole[8:]
    sampled = {"temperature": 1.0, "seed": 5}
    full = harness.run(prompt, 20, session="x", **sampled)
    rest = harness.run(prompt, 20, session="x", resume=full.tokens[:9], **sampled)
    assert rest.tokens == full.tokens[9:] and rest.text == full.text[len(full.text) - len(rest.text) :]


def test_stop_strings_and_limits_end_a_request(harness: Harness) -> None:
    prompt = random_prompt(random.Random(12), 30)
    full = harness.run(prompt, 20)
    assert full.finish == "length" and len(full.tokens) == 20
    stop = full.text[len(full.text) // 2 :][:3]
    stopped = harness.run(prompt, 20, stop=[stop])
    assert stopped.finish == "stop" and stopped.text == full.text[: full.text.find(stop)]


def test_with_the_cache_off_nothing_is_kept(model: Path) -> None:
    harness = Harness(model, cache=False)
    prompt = random_prompt(random.Random(13), 64)
    harness.run(prompt, 4)
    assert harness.run(prompt, 4).cached == 0
    harness.settle()
    assert harness.pool.free == harness.pool.total and harness.store is not None and not harness.store.chunks
    harness.close()


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_any_mix_of_everything_gives_the_tokens_of_a_cold_run(model: Path, cold: Cold, data: st.DataObject) -> None:
    harness = Harness(
        model, pages=data.draw(st.sampled_from([48, 96, 400])), step_tokens=data.draw(st.sampled_from([16, 48, 1024]))
    )
    assert harness.store is not None
    faulty = data.draw(st.integers(0, 3)) == 0
    dice = random.Random(data.draw(st.integers(0, 10_000)))
    if faulty:
        harness.store.fault = lambda key, layer: dice.random() > 0.05
    harness.store.delay_s = data.draw(st.sampled_from([0.0, 0.0, 0.003]))
    pending: list[tuple[str, list[int], int]] = []
    for _ in range(data.draw(st.integers(3, 10))):
        base = random_prompt(random.Random(data.draw(st.integers(0, 3))), data.draw(st.sampled_from([10, 33, 64, 100])))
        prompt, count = (
            base + random_prompt(dice, data.draw(st.sampled_from([0, 1, 20]))),
            data.draw(st.integers(1, 24)),
        )
        request = harness.submit(prompt, count, session=f"s{dice.randrange(3)}")
        action = data.draw(st.sampled_from(["go on", "go on", "wait", "cancel", "purge"]))
        if action == "cancel":
            harness.cancel(request)
            harness.wait(request)
        else:
            pending.append((request, prompt, count))
        if action in ("wait", "purge"):
            for (_, p, n), result in zip(pending, harness.wait(*(r for r, _, _ in pending)), strict=True):
                assert result.tokens == cold(p, n)
            pending.clear()
        if action == "purge":
            harness.purge()
    for (_, p, n), result in zip(pending, harness.wait(*(r for r, _, _ in pending)), strict=True):
        assert result.tokens == cold(p, n)
    harness.settle()
    harness.close()
