"""Layers with a sliding window: what their pages take of HBM, what is loaded, and what a hint brings; and that answers
are those of a cold run whatever happens."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from contracts.convert import layers_from_bitmap
from contracts.ids import SessionKey
from contracts.kv import KvShape, chunk_keys, tenant_salt
from runtime.model_config import parse_config
from storelink.core.load_plan import LoadRate, Source
from tests.worker.test_engine_scheduling import anything, prompt
from tests.worker.test_gemma import FOUR_B
from tests.worker.virtual_engine import VirtualEngine
from tests.worker.virtual_model import CHUNK, LAYERS, NO_WINDOWS, SHAPE, Windows
from worker.core import events as ev
from worker.core import instructions as do
from worker.core.block import NO_PAGE, Block, SaveState
from worker.core.engine_core import EngineCore
from worker.core.hbm import HbmCache
from worker.core.pages import PagePool
from worker.core.policy import Policy
from worker.core.sequence import Event, State
from worker.core.state import CoreState
from worker.core.windowed import Windowed

#: As Gemma's, most layers with a window; as Qwen2's, the last ones; as Mistral's, all; and of two lengths.
MODELS: list[Windows] = [(9, 9, 0), (0, 6, 6), (5, 5, 5), (2, 0, 30)]
GEMMA = MODELS[0]
A, B = SessionKey("t", "a"), SessionKey("t", "b")


# ---- what is read ----------------------------------------------------------------------------------------------
@given(tokens=st.integers(0, 300), window=st.integers(1, 70), chunk=st.integers(1, 20))
def test_a_block_is_passed_when_no_later_token_sees_any_of_its_tokens(tokens: int, window: int, chunk: int) -> None:
    windowed = Windowed.of(KvShape.of_heads(b"", 2, 1, 1, chunk, "float32", (window, 0)))
    seen = [at for at in range(tokens) if at > tokens - max(window, 2)]
    first = seen[0] // chunk if seen else tokens // chunk
    passed = windowed.passed(tokens)
    assert passed <= first and (passed == first or not seen)
    steps = windowed.steps(tokens, 1000)
    assert windowed.passed(tokens + steps - 1) == passed < windowed.passed(tokens + steps)


def test_without_windows_nothing_is_ever_passed() -> None:
    windowed = Windowed.of(SHAPE)
    assert windowed.passed(10**9) == 0 and windowed.steps(10**9, 7) == 7 and windowed.pages(2, 5, 0) == 9


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12), window=st.integers(2, 20))
def test_the_most_usable_prefix_is_the_longest_that_reads_nothing_missing(
    rows: list[tuple[bool, bool]], window: int
) -> None:
    windowed = Windowed.of(KvShape.of_heads(b"", 2, 1, 1, 4, "float32", (window, 0)))
    cache = HbmCache(PagePool(12, 2, 2))
    blocks = [cache.new_block(n, A, range(2)) for n in range(len(rows))]
    for block, ready in zip(blocks, rows, strict=True):
        block.ready[:] = ready
    able = [
        count for count in range(len(rows) + 1)
        if all(rows[n][1] and (rows[n][0] or n < windowed.passed_after(count)) for n in range(count))
    ]  # fmt: skip
    assert windowed.most_usable(blocks) == max(able)


# ---- HBM -------------------------------------------------------------------------------------------------------
def make(chunks: int = 6) -> HbmCache:
    return HbmCache(PagePool(chunks, LAYERS, LAYERS), windowed=Windowed.of(replace(SHAPE, windows=GEMMA)))


def cached(cache: HbmCache, name: str, session: SessionKey, index: int, used_s: float = 0.0) -> Block:
    block = cache.new_block(index, session, range(LAYERS))
    cache.standings.used(session, used_s)
    block.ready[:] = True
    cache.mark(block, SaveState.BELOW)
    assert cache.enter(block, name.encode())
    return block


def here(block: Block) -> list[int]:
    return [int(layer) for layer in np.flatnonzero(block.pages != NO_PAGE)]


def test_what_all_sessions_have_passed_leaves_before_anything_else() -> None:
    cache = make(4)
    shared, old, hinted, cold = (
        cached(cache, name, session, index, used_s)
        for name, session, index, used_s in [("s", B, 0, 9), ("o", B, 1, 9), ("h", B, 2, 9), ("c", A, 1, 1)]
    )
    cache.want(shared, A)
    cache.standings.advise(B, 0, 100.0, 9)
    cache.standings.passes(B, 2)
    assert cache.make_room(2, now=10) and here(old) == [2], "of the advised session, before the unadvised, older one"
    assert cache.make_room(3, now=10) and here(cold) == [0, 1], "what one session has not passed is its"
    assert len(here(shared)) == len(here(hinted)) == 3
    cache.standings.passes(A, 1)
    assert cache.make_room(5, now=10) and here(shared) == [2]
    cache.validate()


def test_a_block_in_use_gives_its_windows_pages_when_its_last_user_has_passed_it() -> None:
    cache = make(2)
    block = cached(cache, "b", A, 0)
    for _ in range(2):
        cache.use(block)
    cache.pass_([block])
    assert cache.available() == 3 and not cache.make_room(4, now=1)
    cache.pass_([block])
    cache.validate()
    assert cache.available() == 5 and cache.make_room(5, now=1) and here(block) == [2]
    cache.release(block, passed=True)
    cache.release(block, passed=True)
    cache.validate()
    assert cache.available() == 6


@pytest.mark.parametrize("why", ["refused", "saving", "moving"])
def test_what_no_lower_tier_has_yet_stays_while_it_is_used(why: str) -> None:
    cache = make(1)
    block = cached(cache, "b", A, 0)
    cache.use(block)
    cache.pass_([block])
    cache.mark(block, {"refused": SaveState.REFUSED, "saving": SaveState.WAITING}.get(why, SaveState.BELOW))
    if why != "refused":
        cache.pin(block)
    cache.validate()
    assert not cache.make_room(1, now=1) and cache.coming() == (0 if why == "refused" else 2)


def test_a_private_block_gives_them_back_at_once() -> None:
    cache = make(1)
    block = cache.new_block(0, A, range(LAYERS))
    cache.use(block)
    cache.pass_([block])
    assert cache.pool.free == 2 and here(block) == [2]
    cache.validate([block])


# ---- requests --------------------------------------------------------------------------------------------------
def pieces_asked(e: VirtualEngine) -> list[list[list[int]]]:
    """Of each load, the layers of each chunk."""
    return [[layers_from_bitmap(chunk.layers, LAYERS) for chunk in load.chunks] for load in e.store.asked]


def turn(e: VirtualEngine, tokens: list[int], session: str = "s", count: int = 3) -> int:
    """A turn from beginning to end; returns its cached tokens."""
    name = e.submit(tokens, count, session=session)
    e.finish()
    return e.answers[name].cached


def emptied(windows: Windows = GEMMA, chunks: int = 20, **more: int) -> tuple[VirtualEngine, list[int]]:
    """An engine whose store has this prompt, and whose HBM is empty."""
    e, tokens = VirtualEngine(pages=300, windows=windows, **more), prompt(1, chunks * CHUNK + 1)
    turn(e, tokens)
    e.world.pass_(1.0)  # what was saved is known to the store
    e.store.asked.clear()
    e.engine.core.state.rates.seed(Source.DRAM, LoadRate(0.0, 0.0))
    return e, tokens


@pytest.mark.parametrize("windows", MODELS)
def test_a_request_loads_what_it_will_read_and_no_more(windows: Windows) -> None:
    e, tokens = emptied(windows)
    assert turn(e, tokens) == 20 * CHUNK
    windowed, (load,) = Windowed.of(replace(SHAPE, windows=windows)), pieces_asked(e)
    expected = [windowed.of_block(n < windowed.passed_after(20)) for n in range(20)]
    assert load == [layers for layers in expected if layers]


def test_a_shorter_prefix_reads_earlier_pages_which_are_loaded() -> None:
    e, tokens = emptied()
    running = e.submit(tokens, 60, session="long")
    e.go(until=lambda: len(e.answers[running].tokens) > 20)
    e.store.asked.clear()
    assert not any(here(b) == [0, 1, 2] for b in e.sequence(running).blocks[:15])
    short = e.submit([*tokens[: 10 * CHUNK], 5, 6, 7], 3, session="short")
    e.go(until=lambda: e.answers[short].end is not None)
    assert e.answers[short].cached == 10 * CHUNK
    (load,) = pieces_asked(e)
    assert load == [[0, 1]] * 2, "of two chunks, what the first request had passed"
    assert e.answers[running].end is None, "it went on meanwhile, in the same blocks"
    e.finish()


@pytest.mark.parametrize("lost", ["evicted", "damaged"])
def test_a_chunk_that_is_missing_below_is_computed_again_and_those_before_it_are_used(lost: str) -> None:
    e, tokens = emptied()
    keys = chunk_keys(tenant_salt(b"s" * 32, "t"), SHAPE, tokens)
    if lost == "evicted":
        del e.store.chunks[keys[18]]
    else:
        e.store.fault = lambda key, layer: key == keys[18] and layer == 1
    assert turn(e, tokens) == 18 * CHUNK
    assert e.engine.core.scheduling.recomputed_tokens.total() <= 2 * CHUNK


def test_without_a_store_the_longest_prefix_is_used_of_which_all_that_is_read_is_here() -> None:
    e, tokens = VirtualEngine(pages=300, windows=GEMMA, store=True), prompt(1, 20 * CHUNK + 1)
    name = e.submit(tokens, 3)
    e.go(until=lambda: e.answers[name].end is not None)
    e.go()
    keys = chunk_keys(tenant_salt(b"s" * 32, "t"), SHAPE, tokens)
    e.store.down()
    e.cache._purge(e.cache.standings.of(A, 0.0).rank, e.cache.index[keys[18]], [0, 1])
    again = e.submit(tokens, 3)
    e.finish()
    assert e.answers[again].cached == 18 * CHUNK, "a longer one would read what is missing, this one does not"


def test_a_store_that_forgot_everything_is_asked_twice_and_no_more() -> None:
    e, tokens = emptied()
    e.store.chunks.clear()
    assert turn(e, tokens) == 0 and len(e.store.asked) <= 2


@pytest.mark.parametrize(("windows", "preempts"), [(NO_WINDOWS, True), (GEMMA, False)])
def test_a_session_longer_than_the_window_leaves_room_for_others(windows: Windows, preempts: bool) -> None:
    e = VirtualEngine(pages=60, windows=windows)  # 20 chunks
    names = [e.submit(prompt(n, 21), 60, session=f"s{n}") for n in range(2)]  # 6 chunks each, in the end 21
    e.finish()
    assert (e.engine.core.scheduling.preemptions > 0) is preempts
    assert all(e.answers[name].end == "length" for name in names)


@pytest.mark.parametrize("cache", [True, False])
def test_a_long_answer_needs_no_more_pages_of_windows_than_the_window(cache: bool) -> None:
    e = VirtualEngine(pages=60, windows=(5, 5, 5))
    e.engine.core.state.policy = replace(e.engine.core.state.policy, cache=cache)
    name = e.submit(prompt(1, 20), 70)
    e.go(until=lambda: len(e.answers[name].tokens) == 69)
    held = [here(block) for block in e.sequence(name).blocks]
    if not cache:
        assert sum(map(len, held)) <= 3 * LAYERS
    assert e.cache.available() >= 60 - 3 * LAYERS
    e.finish()


def test_a_preempted_sequence_comes_back_with_what_it_reads() -> None:
    e = VirtualEngine(pages=60, windows=GEMMA)
    low = e.submit(prompt(1, 60), 12, session="low", priority=5)
    e.go(until=lambda: len(e.answers[low].tokens) > 4)
    e.store.asked.clear()
    e.submit(prompt(2, 70), 4, session="urgent", priority=-1)
    e.go(until=lambda: e.sequence(low).state is State.WAITING)
    e.finish()
    assert e.engine.core.scheduling.recomputed_tokens[Event.PREEMPTED] < CHUNK
    assert e.engine.core.scheduling.preemptions == 1


# ---- hints -----------------------------------------------------------------------------------------------------
def test_a_hint_brings_what_its_request_reads_and_the_request_then_loads_nothing() -> None:
    e, tokens = emptied()
    keys = chunk_keys(tenant_salt(b"s" * 32, "t"), SHAPE, tokens)
    e.store.hint("s", keys, expires_s=60.0)
    e.go()
    assert e.loader.loaded["hint"] == e.pool.taken == 20 + 2 * 2, "of layers with a window, the last two chunks"
    e.store.asked.clear()
    assert turn(e, tokens) == 20 * CHUNK and not e.store.asked
    assert e.cache.hints_used == 24 and not e.engine.core.prefetching.late


def brought(shape: KvShape, chunks: int) -> tuple[int, int]:
    """Pieces that a hint of a session loads, and pages that are then taken."""
    cache = HbmCache(PagePool(chunks, shape.layers, shape.layers), windowed=Windowed.of(shape))
    core = EngineCore(CoreState(shape, cache, Policy(), lambda tenant: bytes(32), "m"))
    core.handle(ev.StoreUp(), 0.0)
    core.handle(ev.Offered(A, tuple(n.to_bytes(32) for n in range(chunks)), 0, 0.0, 60.0), 0.0)
    pieces = 0
    while core.prefetching.due or core.state.loads:
        core.turn(0.0)
        for load in core.take():
            if isinstance(load, do.OpenLoad):
                rows = np.repeat(np.arange(len(load.keys)), [len(layers) for layers in load.layers])
                came = ev.PiecesCame(load.load_id, rows, np.concatenate(load.layers))
                core.handle(came, 0.0)
                core.handle(ev.LoadClosed(load.load_id, len(rows), 0.0, 0.0), 0.0)
                pieces += len(rows)
        core.validate()
    return pieces, cache.pool.taken


@pytest.mark.parametrize(("tokens", "before", "after"), [(1024, 544, 544), (8192, 4352, 1104), (32768, 17408, 3024)])
def test_what_a_hint_of_a_gemma_session_loads_and_takes_of_hbm(tokens: int, before: int, after: int) -> None:
    """Gemma 3 4B has 34 layers, 29 of them with a window of 1,024 tokens; a chunk has 64. A piece has 256 KiB."""
    windows = tuple(window or 0 for window in parse_config(FOUR_B).windows)
    plain = KvShape.of_heads(b"f" * 32, 34, 4, 256, 64, "bfloat16")
    assert brought(plain, tokens // 64) == (before, before)
    assert brought(replace(plain, windows=windows), tokens // 64) == (after, after)


# ---- anything --------------------------------------------------------------------------------------------------
@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 1 << 40))
def test_whatever_happens_every_request_ends_with_its_tokens_and_every_page_comes_back(seed: int) -> None:
    anything(seed, requests=14, windows=random.Random(seed).choice(MODELS)).finish()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=2000, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 1 << 40))
def test_whatever_happens_for_long_every_request_ends_with_its_tokens_and_every_page_comes_back(seed: int) -> None:
    anything(seed, requests=30, windows=random.Random(seed).choice(MODELS)).finish()
