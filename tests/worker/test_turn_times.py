"""Where a turn's time went: by phase, without gaps, until its first token and after it."""

from __future__ import annotations

import numpy as np
import pytest

from contracts.turn_times import Phase
from storelink.core.load_plan import Source
from tests.worker.test_core_engine import LAYERS, PROMPT, core_of, done, sequence
from worker.core import events as ev
from worker.core import instructions as do
from worker.core.engine_core import EngineCore
from worker.core.turn_times import TurnTimes


def timed(core: EngineCore) -> dict[Phase, float]:
    [found] = [dict(asked.times) for asked in core.take() if isinstance(asked, do.Timed)]
    return found


def test_a_step_is_divided_into_its_wait_its_delay_and_the_rest() -> None:
    times = TurnTimes(1.0)
    times.load(Source.SSD, 2.0)
    times.enter(Phase.COMPUTE, 2.5)
    times.stepped(4.0, None, 0.5, 0.25)
    assert times.take(4.5, Phase.DECODE) == {
        Phase.QUEUE: 1.0,
        Phase.LOAD_SSD: 1.0,
        Phase.SLOWED: 0.25,
        Phase.COMPUTE: 0.75,
        Phase.OTHERS: 0.5,
    }
    assert times.take(5.0, Phase.DECODE) == {Phase.DECODE: 0.5}


def test_a_delay_never_counts_for_more_than_the_step_took() -> None:
    times = TurnTimes(0.0, Phase.COMPUTE)
    times.stepped(1.0, Phase.OTHERS, 3.0, 2.0)
    assert times.take(1.0, Phase.DECODE) == {Phase.OTHERS: 1.0}


@pytest.mark.parametrize("source", Source)
def test_a_turn_says_how_long_it_waited_for_the_store_the_load_and_its_own_step(source: Source) -> None:
    core = core_of(load_plan=False)
    core.handle(ev.StoreUp(), 0.0)
    core.handle(ev.Submitted(sequence("a", PROMPT, 3)), 1.0)
    core.turn(2.0)
    load = next(asked for asked in core.take() if isinstance(asked, do.OpenLoad))
    core.handle(ev.Found(load.load_id, 2, (Source.DRAM, source)), 2.5)
    for layer in range(LAYERS):
        core.handle(ev.PiecesCame(load.load_id, np.array([0, 1]), np.array([layer, layer])), 4.0)
    core.handle(ev.LoadClosed(load.load_id, 4, 2.5, 4.0), 4.0)
    step = core.turn(4.0)
    assert step is not None
    core.handle(done(step), 4.25)
    until = timed(core)
    assert until == {
        Phase.QUEUE: 1.0,
        Phase.LOCATE: 0.5,
        Phase(f"load-{source.name.lower()}"): 1.5,
        Phase.COMPUTE: 0.25,
    }
    for at in (5.0, 6.0):
        step = core.turn(at)
        assert step is not None
        core.handle(done(step), at + 0.5)
    assert timed(core) == {Phase.DECODE: 2.25}


def test_who_does_not_fit_waits_for_memory_and_who_is_behind_it_in_the_queue() -> None:
    core = core_of(load_plan=False)
    pages = core.state.cache.pool.total // LAYERS
    core.handle(ev.Submitted(sequence("a", list(range(pages * 4 - 8)), 2)), 0.0)
    step = core.turn(0.0)
    for number, name in enumerate("bc"):
        core.handle(ev.Submitted(sequence(name, [number] * 8, 1)), 0.0)
    assert step is not None
    core.handle(done(step), 1.0)
    step = core.turn(1.0)
    assert step is not None and [s.request.request_id for s, _ in step.batch] == ["a"]
    core.handle(done(step), 2.0)
    core.take()
    step = core.turn(2.0)
    assert step is not None and {s.request.request_id for s, _ in step.batch} == {"b", "c"}
    core.handle(done(step), 3.0)
    found = {asked.request_id: dict(asked.times) for asked in core.take() if isinstance(asked, do.Timed)}
    assert found["b"] == {Phase.QUEUE: 1.0, Phase.MEMORY: 1.0, Phase.COMPUTE: 1.0}
    assert found["c"] == {Phase.QUEUE: 2.0, Phase.COMPUTE: 1.0}
