"""Nodes that run the production cores of store and HBM: they serve everybody, keep their invariants, and agree with aggregated ones."""

from dataclasses import replace

import pytest

from contracts.ids import DEFAULT_TENANT, SessionKey
from loadtest.habits import Habits
from loadtest.simulate.core_node import CoreNode
from loadtest.simulate.core_turns import coarse
from loadtest.simulate.events import Events
from loadtest.simulate.fleet import VARIANTS, Fleet
from loadtest.simulate.presets import PRESETS
from loadtest.simulate.scenario import Run, scripts, simulate, trace_sessions
from loadtest.simulate.sequences import Request
from scheduler.core.advisories import Hint

KIND = PRESETS["a100-llama-3.1-8b"]
RUN = Run(KIND, 2, VARIANTS["balanced"], people=36, seconds=90.0, warm_up_s=20.0, every_core=True)


def served(events: Events, fleet: Fleet, name: str, prompt: int, answer: int, history: int = 0, node: str = "") -> Request:
    request = Request(name, SessionKey("t", "s"), int(history > 0), prompt, history, answer, events.now, lambda r: None)
    if node:
        request.node = node
        fleet.nodes[node].submit(request, tuple(n for n in fleet.nodes if n != node))
    else:
        fleet.ask(request)
    events.run(lambda: request.end_s >= 0, limit_s=events.now + 300.0)
    events.run(lambda: False, limit_s=events.now + 5.0)  # write-back, reports
    fleet.validate()
    return request


def test_a_coarse_shape_has_as_many_bytes_a_token() -> None:
    shape = coarse(KIND.shape)
    assert shape.token_bytes == KIND.shape.token_bytes and (shape.layers, shape.chunk_tokens) == (4, 256)


@pytest.mark.parametrize("variant", ["balanced", "sticky", "no-layer-priority", "no-cooperative"])
def test_everybody_is_served_and_every_core_keeps_its_invariants(variant: str) -> None:
    token = KIND.shape.token_bytes
    tight = replace(KIND, hbm_bytes=40_000.0 * token, dram_bytes=60_000.0 * token, ssd_bytes=400_000.0 * token)
    run = replace(RUN, kind=tight, variant=VARIANTS[variant], habits={DEFAULT_TENANT: Habits(spurious=0.5, expected=False)})
    found = simulate(run, scripts(trace_sessions(None, sessions=160), max_tokens=20_000))  # validates every part at the end
    requests = found.users.requests
    assert found.figures["unfinished"] == 0 and len(requests) > 40
    assert all(r.sent_s <= r.first_s <= r.end_s and r.cached_tokens <= r.history_tokens for r in requests)
    assert found.figures["cached_share_returning"] > 0.5
    assert all(isinstance(node, CoreNode) and not node.core.live for node in found.fleet.nodes.values())


def test_it_agrees_with_the_aggregated_nodes_where_nothing_is_short() -> None:
    said = scripts(trace_sessions(None, sessions=100), max_tokens=20_000)
    full, sums = (simulate(replace(RUN, every_core=each), said).figures for each in (True, False))
    assert full["normalised_s"]["mean"] == pytest.approx(sums["normalised_s"]["mean"], rel=0.1)
    assert full["cached_share_returning"] == pytest.approx(sums["cached_share_returning"], abs=0.1)


def test_equal_seeds_give_equal_runs() -> None:
    said = scripts(trace_sessions(None, sessions=60), max_tokens=20_000)
    a, b = (simulate(replace(RUN, people=12), said).users.requests for _ in range(2))
    assert [(r.request_id, r.node, r.first_s, r.end_s) for r in a] == [(r.request_id, r.node, r.first_s, r.end_s) for r in b]


def test_a_cache_comes_from_the_other_node_and_sooner_when_a_hint_said_so() -> None:
    waits = []
    for hinted in (False, True):
        events = Events()
        fleet = Fleet(events, KIND, 2, VARIANTS["balanced"], every_core=True)
        first = served(events, fleet, "r1", 8000, 200)
        other = next(n for n in fleet.nodes if n != first.node)
        if hinted:
            hint = Hint(SessionKey("t", "s"), "h", KIND.model, None, events.now + 60.0, pin=other)
            fleet.advise(hint)
            events.run(lambda: False, limit_s=events.now + 10.0)
        turn = served(events, fleet, "r2", 8300, 4, history=8200, node=other)
        # Over the link, the load plan has a part computed meanwhile.
        whole = 8200 // 256 * 256
        assert turn.cached_tokens == whole if hinted else 0.5 * whole < turn.cached_tokens < whole
        waits.append(turn.first_s - turn.sent_s)
    assert waits[1] < 0.5 * waits[0]


def test_what_is_not_ours_has_no_cores_to_run() -> None:
    for name in ("llumnix", "lmcache"):
        with pytest.raises(ValueError, match="no cores of ours"):
            Fleet(Events(), KIND, 2, VARIANTS[name], every_core=True)
