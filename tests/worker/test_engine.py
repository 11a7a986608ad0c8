"""Whatever is cached, loaded, purged, lost or cancelled: greedy tokens are those of a cold, unbatched run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.worker.engine_house import CHUNK, House, random_prompt, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def cold(model: Path) -> Iterator[Callable[[list[int], int], list[int]]]:
    """Tokens of a run with nothing cached and nothing beside it."""
    house = House(model, store=False, cache=False)
    known: dict[tuple[int, ...], list[int]] = {}

    def run(prompt: list[int], count: int) -> list[int]:
        key = tuple(prompt)
        if len(known.get(key, [])) < count:
            known[key] = house.run(prompt, max(count, 24)).tokens
        return known[key][:count]

    yield run
    house.close()


@pytest.fixture
def house(model: Path) -> Iterator[House]:
    made = House(model)
    yield made
    made.settle()
    made.close()


Cold = Callable[[list[int], int], list[int]]


def test_a_second_turn_uses_what_the_first_left_in_hbm(house: House, cold: Cold) -> None:
    prompt = random_prompt(random.Random(1), 70)
    first = house.run(prompt, 20)
    longer = prompt + first.tokens + [5, 6, 7]
    second = house.run(longer, 10)
    assert first.tokens == cold(prompt, 20) and second.tokens == cold(longer, 10)
    assert (first.cached, second.cached) == (0, 80)


def test_a_purged_session_is_loaded_layer_by_layer(house: House, cold: Cold) -> None:
    prompt = random_prompt(random.Random(2), 100)
    house.run(prompt, 4)
    house.purge()
    again = house.run(prompt, 12)
    assert house.store is not None and house.store.delivered == 6 * 4
    assert again.cached == 96 and again.tokens == cold(prompt, 12)


def test_layers_that_left_are_loaded_and_those_that_stayed_are_used_in_place(house: House, cold: Cold) -> None:
    prompt = random_prompt(random.Random(3), 100)
    house.run(prompt, 4)
    house.settle()
    assert house.cache.make_room(house.pool.free + 9, 1e9)  # the last layer of all six chunks, and half of the one before
    again = house.run(prompt, 12)
    assert house.store is not None and 9 <= house.store.delivered < 24
    assert again.cached == 96 and again.tokens == cold(prompt, 12)


def test_another_engine_takes_the_session_over(house: House, model: Path, cold: Cold) -> None:
    prompt = random_prompt(random.Random(4), 90)
    first = house.run(prompt, 10)
    house.settle()
    other = House(model, store=False)
    assert house.store is not None
    house.loop.stop()
    other.attach(house.store)
    longer = prompt + first.tokens
    second = other.run(longer, 10)
    assert second.cached == 96 and second.tokens == cold(longer, 10)
    other.close()


@pytest.mark.parametrize("bad_layer", [0, 2, 3])
def test_a_bad_piece_costs_a_recomputation_and_nothing_else(house: House, cold: Cold, bad_layer: int) -> None:
    prompt = random_prompt(random.Random(5), 100)
    house.run(prompt, 4)
    house.purge()
    assert house.store is not None
    spoiled = list(house.store.chunks)[3]
    house.store.fault = lambda key, layer: not (key == spoiled and layer == bad_layer)
    again = house.run(prompt, 12)
    assert again.tokens == cold(prompt, 12) and again.cached == 48


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_moved_bytes_are_identical_and_logits_agree(model: Path, dtype: str) -> None:
    house, prompt = House(model, dtype=dtype), random_prompt(random.Random(20), 100)
    first = house.run(prompt, 8, logprobs=0)
    house.settle()
    before = house.contents()
    house.purge()
    assert not house.contents()
    again = house.run(prompt, 8, logprobs=0)
    house.settle()
    after = house.contents()
    assert again.cached == 96 and len(before) == 6 * 4
    assert all(after[piece] == before[piece] for piece in before)
    if first.tokens == again.tokens:
        assert again.logprobs == pytest.approx(first.logprobs, abs=0.05 if dtype == "bfloat16" else 1e-4)
    else:
        assert dtype == "bfloat16" and again.logprobs[0] == pytest.approx(first.logprobs[0], abs=0.05)
    house.close()


def test_slow_layers_are_waited_for_one_at_a_time(house: House, cold: Cold) -> None:
    prompt = random_prompt(random.Random(6), 200)
    house.run(prompt, 4)
    house.purge()
    assert house.store is not None
    house.store.delay_s = 0.02
    beside = house.submit(random_prompt(random.Random(7), 20), 24)
    again = house.submit(prompt, 12)
    loaded, other = house.wait(again, beside)
    assert loaded.tokens == cold(prompt, 12) and loaded.cached == 192
    assert other.tokens == cold(random_prompt(random.Random(7), 20), 24)


def test_a_dead_store_is_survived_before_during_and_after_a_load(house: House, cold: Cold) -> None:
    prompt = random_prompt(random.Random(8), 100)
    house.run(prompt, 4)
    house.purge()
    assert house.store is not None
    house.store.delay_s = 0.05
    request = house.submit(prompt, 12)
    house.detach()
    assert house.wait(request)[0].tokens == cold(prompt, 12)
    assert house.run([*prompt, 9], 6).tokens == cold([*prompt, 9], 6)


def test_what_the_store_refuses_is_offered_again_with_the_next_turn(house: House) -> None:
    prompt = random_prompt(random.Random(9), 64)
    assert house.store is not None
    house.store.refuse = lambda key: True
    house.run(prompt, 4)
    house.settle()
    assert not house.store.chunks and not house.store.manifests
    house.store.refuse = lambda key: False
    house.run(prompt, 4)
    house.settle()
    assert len(house.store.chunks) == 4 and len(house.store.manifests[-1].keys) == 4


def test_a_manifest_follows_its_last_chunk_and_names_the_whole_turn(house: House) -> None:
    prompt = random_prompt(random.Random(10), 64)
    result = house.run(prompt, 33, session="named")
    house.settle()
    assert house.store is not None
    manifest = house.store.manifests[-1]
    assert manifest.session.session_id == "named" and manifest.tokens == 96 == len(manifest.keys) * CHUNK
    assert set(manifest.keys) <= set(house.store.chunks) and len(result.tokens) == 33


def test_cancellation_frees_every_page(house: House) -> None:
    requests = [house.submit(random_prompt(random.Random(i), 50), 500, session=f"c{i}") for i in range(4)]
    for request in requests:
        house.cancel(request)
    assert {r.finish for r in house.wait(*requests)} == {"cancelled"}
    house.purge()
    assert house.pool.free == house.pool.total


def test_an_erased_session_leaves_hbm_whatever_became_of_its_chunks(house: House, cold: Cold) -> None:
    assert house.store is not None
    kept, prompt = random_prompt(random.Random(30), 64), random_prompt(random.Random(31), 64)
    house.run(kept, 4, session="kept")
    house.store.refuse = lambda key: True
    house.run(prompt, 20, session="gone")
    house.settle()
    before = house.pool.free
    house.store.erase("gone", [])
    assert house.run(kept, 8, session="kept").tokens == cold(kept, 8)
    house.settle()
    assert house.pool.free == before + 5 * 4, "nobody below knows these chunks, and they have left"
    assert house.run(prompt, 20, session="other").cached == 0


def test_a_turn_that_runs_while_its_session_is_erased_ends_well_and_keeps_nothing(model: Path, cold: Cold) -> None:
    house, prompt = House(model, step_ms=5), random_prompt(random.Random(32), 64)
    assert house.store is not None
    running = house.submit(prompt, 40, session="gone")
    while house.computed.tokens < 80:
        time.sleep(0.005)
    house.store.refuse = lambda key: True  # as the store does with late saves
    house.store.erase("gone", list(house.store.chunks))
    assert house.wait(running)[0].tokens == cold(prompt, 40)
    house.settle()
    assert house.pool.free == house.pool.total and not house.store.manifests
    house.close()


def test_a_turn_that_was_cut_off_in_its_prompt_does_not_shorten_what_its_session_has(model: Path) -> None:
    house, prompt = House(model, step_ms=30, step_tokens=32), random_prompt(random.Random(33), 400)
    assert house.store is not None
    house.run(prompt[:200], 2, session="s")
    house.settle()
    begun = house.computed.tokens
    again = house.submit([7, *prompt], 4, session="s")
    while house.computed.tokens < begun + 64:
        time.sleep(0.005)
    house.cancel(again)
    assert house.wait(again)[0].finish == "cancelled"
    house.settle()
    assert [m.tokens for m in house.store.manifests] == [192]
    house.close()


def test_a_cancelled_request_is_in_no_step_after_the_one_that_runs(model: Path) -> None:
    house = House(model, step_ms=30)
    request = house.submit(random_prompt(random.Random(3), 20), 500)
    while house.computed.tokens < 25:
        time.sleep(0.005)
    house.cancel(request)
    begun = house.computed.tokens
    (result,) = house.wait(request)
    assert result.finish == "cancelled"
    # One step may have been past taking events when the cancellation came, and not yet counted.
    assert house.computed.tokens <= begun + 1
    after = house.computed.tokens
    other = house.submit(random_prompt(random.Random(4), 8), 2)
    house.wait(other)
    assert house.computed.tokens <= after + 8 + 2, "nothing of it is computed beside others either"


def test_more_sequences_than_fit_are_preempted_and_finish_right(model: Path, cold: Cold) -> None:
    house = House(model, pages=64, step_tokens=64)
    prompts = [random_prompt(random.Random(100 + i), 60) for i in range(6)]
    requests = [house.submit(p, 40, session=f"p{i}") for i, p in enumerate(prompts)]
    for prompt, result in zip(prompts, house.wait(*requests), strict=True):
        assert result.tokens == cold(prompt, 40)
    house.settle()
    house.close()


def test_a_resumed_request_goes_on_where_the_other_worker_stopped(house: House, cold: Cold) -> None:
    prompt = random_prompt(random.Random(11), 40)
    whole = cold(prompt, 20)
    resumed = house.run(prompt, 20, resume=whole[:8])
    assert resumed.tokens == whole[8:]
    sampled = {"temperature": 1.0, "seed": 5}
    full = house.run(prompt, 20, session="x", **sampled)
    rest = house.run(prompt, 20, session="x", resume=full.tokens[:9], **sampled)
    assert rest.tokens == full.tokens[9:] and rest.text == full.text[len(full.text) - len(rest.text) :]


def test_stop_strings_and_limits_end_a_request(house: House) -> None:
    prompt = random_prompt(random.Random(12), 30)
    full = house.run(prompt, 20)
    assert full.finish == "length" and len(full.tokens) == 20
    stop = full.text[len(full.text) // 2 :][:3]
    stopped = house.run(prompt, 20, stop=[stop])
    assert stopped.finish == "stop" and stopped.text == full.text[: full.text.find(stop)]


def test_with_the_cache_off_nothing_is_kept(model: Path) -> None:
    house = House(model, cache=False)
    prompt = random_prompt(random.Random(13), 64)
    house.run(prompt, 4)
    assert house.run(prompt, 4).cached == 0
    house.settle()
    assert house.pool.free == house.pool.total and house.store is not None and not house.store.chunks
    house.close()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_mix_of_everything_gives_the_tokens_of_a_cold_run(model: Path, cold: Cold, data: st.DataObject) -> None:
    house = House(model, pages=data.draw(st.sampled_from([48, 96, 400])), step_tokens=data.draw(st.sampled_from([16, 48, 1024])))
    assert house.store is not None
    faulty = data.draw(st.integers(0, 3)) == 0
    dice = random.Random(data.draw(st.integers(0, 10_000)))
    if faulty:
        house.store.fault = lambda key, layer: dice.random() > 0.05
    house.store.delay_s = data.draw(st.sampled_from([0.0, 0.0, 0.003]))
    pending: list[tuple[str, list[int], int]] = []
    for _ in range(data.draw(st.integers(3, 10))):
        base = random_prompt(random.Random(data.draw(st.integers(0, 3))), data.draw(st.sampled_from([10, 33, 64, 100])))
        prompt, count = base + random_prompt(dice, data.draw(st.sampled_from([0, 1, 20]))), data.draw(st.integers(1, 24))
        request = house.submit(prompt, count, session=f"s{dice.randrange(3)}")
        action = data.draw(st.sampled_from(["go on", "go on", "wait", "cancel", "purge"]))
        if action == "cancel":
            house.cancel(request)
            house.wait(request)
        else:
            pending.append((request, prompt, count))
        if action in ("wait", "purge"):
            for (_, p, n), result in zip(pending, house.wait(*(r for r, _, _ in pending)), strict=True):
                assert result.tokens == cold(p, n)
            pending.clear()
        if action == "purge":
            house.purge()
    for (_, p, n), result in zip(pending, house.wait(*(r for r, _, _ in pending)), strict=True):
        assert result.tokens == cold(p, n)
    house.settle()
    house.close()
