"""Several models share a device's memory: it goes where it is needed, and every answer is a cold run's."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.worker.virtual_device import VirtualDevice
from tests.worker.virtual_model import CHUNK, NO_WINDOWS, Windows, random_prompt

#: Slabs hold one chunk of a model: a page for each layer.
SLABS = 24


def prompt(seed: int, chunks: int) -> list[int]:
    return random_prompt(random.Random(seed), chunks * CHUNK)


def used(device: VirtualDevice) -> list[int]:
    return [model.pool.used for model in device.models]


def test_a_model_alone_uses_the_whole_device() -> None:
    device = VirtualDevice(2, SLABS)
    a, _ = device.models
    name = a.submit(prompt(1, SLABS - 3), 2 * CHUNK)
    device.finish()
    assert a.answers[name].end == "length"


def test_memory_of_a_cache_that_nobody_uses_goes_to_the_model_that_needs_it() -> None:
    device = VirtualDevice(2, SLABS)
    a, b = device.models
    for n in range(4):
        a.submit(prompt(n, 4), 2, session=f"s{n}")
    device.go()
    assert used(device)[0] > 14 and not b.pool.limit
    b.submit(prompt(9, 12), 2)
    device.go()
    assert used(device)[1] >= 12 >= used(device)[0]
    device.finish()


def test_parts_of_models_with_equal_constant_loads_stay() -> None:
    """Prism, figure 14: sharing costs them nothing, as slabs hardly change hands."""
    device, dice, mapped = VirtualDevice(2, 2 * SLABS), random.Random(1), Counter[int]()
    for number, model in enumerate(device.models):
        model.pages.map_slab = functools.partial(_counted, mapped, number, model.pages.map_slab)  # type: ignore[method-assign]
    for n in range(300):
        if n == 100:
            assert sum(used(device)) == 2 * SLABS, "the memory is full"
            mapped.clear()
        dice.choice(device.models).submit(prompt(n, 5), CHUNK, session=f"s{n}")
        if dice.random() < 0.7:
            device.go()
    device.finish()
    assert mapped.total() < 0.1 * 200 * 6, "of 6 slabs that each request fills"


def _counted(mapped: Counter[int], number: int, map_slab: Callable[[int], None], slab: int) -> None:
    mapped[number] += 1
    map_slab(slab)


def test_the_least_recently_used_pages_of_the_device_leave_first_whoever_asks() -> None:
    device = VirtualDevice(2, SLABS)
    a, b = device.models
    old = a.submit(prompt(1, 6), 2, session="old")
    device.go()
    device.world.pass_(1000.0)
    kept = b.submit(prompt(2, 6), 2, session="kept")
    device.go()
    b.submit(prompt(3, 16), 2, session="new")  # of the 18 slabs it finds 12 unused and needs 4 more
    device.go()
    assert a.cache.purged and not b.cache.purged, "the asker kept its own, newer pages"
    a.submit(a.answers[old].prompt + a.answers[old].tokens, 2, session="old")
    b.submit(b.answers[kept].prompt + b.answers[kept].tokens, 2, session="kept")
    device.finish()


def test_a_less_urgent_models_cache_leaves_before_the_askers_own() -> None:
    device = VirtualDevice(2, SLABS, priorities=(0, 5))
    a, b = device.models
    old = a.submit(prompt(1, 10), 2, session="old")
    device.go()
    device.world.pass_(10.0)
    b.submit(prompt(2, 10), 2, session="s")
    device.go()
    a.submit(prompt(3, 8), 2, session="new")
    device.go()
    assert used(device)[0] == 18
    again = a.submit(a.answers[old].prompt + a.answers[old].tokens, 2, session="old")
    device.go()
    assert a.answers[again].cached == 10 * CHUNK
    device.finish()


def test_a_more_urgent_request_of_another_model_takes_the_pages_of_running_ones() -> None:
    device = VirtualDevice(2, SLABS)
    a, b = device.models
    late = [a.submit(prompt(n, 9), 30, session=f"s{n}", priority=3) for n in range(2)]
    device.go(until=lambda: all(a.answers[name].tokens for name in late))
    urgent = b.submit(prompt(9, 10), 4, session="u")
    device.go(until=lambda: b.answers[urgent].end is not None)
    assert a.engine.core.scheduling.preemptions and not all(a.answers[name].end for name in late)
    device.finish()


def test_equally_urgent_requests_wait_for_another_models_pages() -> None:
    device = VirtualDevice(2, SLABS)
    a, b = device.models
    first = a.submit(prompt(1, 20), 6, session="a")
    device.go(until=lambda: bool(a.answers[first].tokens))
    second = b.submit(prompt(2, 10), 4, session="b")
    device.go(until=lambda: a.answers[first].end is not None)
    assert not b.answers[second].tokens and not a.engine.core.scheduling.preemptions
    device.finish()
    assert b.answers[second].end == "length"


def test_two_models_that_grow_until_neither_has_room_both_end() -> None:
    device = VirtualDevice(2, SLABS)
    names = [m.submit(prompt(n, 10), 10 * CHUNK, session="s") for n, m in enumerate(device.models)]
    device.finish()
    assert [m.answers[name].end for m, name in zip(device.models, names, strict=True)] == ["length", "length"]
    assert (
        device.models[1].engine.core.scheduling.preemptions and not device.models[0].engine.core.scheduling.preemptions
    )


def test_a_trainer_has_what_serving_leaves_and_gives_it_back_before_anybody_waits() -> None:
    device = VirtualDevice(1, SLABS, trains=random.Random(3))
    [model], trainer = device.models, device.trainer
    assert trainer is not None
    trainer.layers, trainer.fixed, trainer.reserve = 8, 3, 0
    model.submit(prompt(1, 3), 40)
    device.go()
    assert device.balloon.loan.held == 11, "nobody else needs memory"
    name = model.submit(prompt(2, SLABS - 2), CHUNK)
    device.go(until=lambda: model.answers[name].end is not None)
    assert device.balloon.loan.ended == 1, "and now somebody does"
    assert not model.engine.core.scheduling.preemptions
    device.finish()


def test_cached_kv_gives_way_to_a_trainer_but_layers_beyond_the_least_give_way_to_new_kv() -> None:
    device = VirtualDevice(1, SLABS, trains=random.Random(3))
    [model], trainer = device.models, device.trainer
    assert trainer is not None
    trainer.layers, trainer.fixed, trainer.reserve = 8, 3, 0
    for n in range(9):
        model.submit(prompt(n, 3), 2, session=f"s{n}")
        device.go()
    assert device.balloon.loan.held == 5, "the least that it needs"
    assert used(device)[0] >= SLABS - 6, "the rest is cached KV"
    device.finish()


def anything(seed: int, requests: int, windows: Windows = NO_WINDOWS) -> VirtualDevice:
    """As `test_engine_scheduling.anything`, for two or three models."""
    dice = random.Random(seed)
    models = dice.choice([2, 3])
    device = VirtualDevice(
        models,
        dice.choice([16, 20, 30, 100]),
        priorities=tuple(dice.choice([0, 0, 1]) for _ in range(models)),
        store=dice.choice([True, True, True, False]),
        step_tokens=dice.choice([16, 40, 1024]),
        max_batch=dice.choice([1, 2, 5, 64]),
        targets=tuple(dice.choice([0.0, 0.0, 0.05, 1.0]) for _ in range(models)),
        trains=random.Random(seed) if seed % 2 else None,
        windows=windows,
    )
    device.suffer(dice, requests, span_s=requests * 0.05)
    return device


@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 1 << 40))
def test_whatever_happens_to_models_of_one_device_every_request_ends_with_its_tokens(seed: int) -> None:
    anything(seed, requests=10).finish()


@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 1 << 40), windows=st.sampled_from([(9, 9, 0), (5, 5, 5)]))
def test_whatever_happens_to_models_with_windows_every_request_ends_with_its_tokens(
    seed: int, windows: Windows
) -> None:
    anything(seed, requests=10, windows=windows).finish()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=2000, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 1 << 40))
def test_whatever_happens_for_long_to_models_of_one_device(seed: int) -> None:
    anything(seed, requests=20).finish()
