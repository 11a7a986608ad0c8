"""Our nodes, which run the production cores of store and engine: they serve everybody and keep their invariants,
whatever is short."""

from dataclasses import replace

import pytest

from contracts.ids import DEFAULT_TENANT, SessionKey
from loadtest.habits import Habits
from loadtest.simulate.events import Events
from loadtest.simulate.fleet import VARIANTS, Fleet
from loadtest.simulate.mechanisms import BLOB, DRAM, HBM, Mechanisms
from loadtest.simulate.node import SimulatedNode
from loadtest.simulate.presets import PRESETS
from loadtest.simulate.request import Request
from loadtest.simulate.scenario import Run, scripts, simulate, trace_sessions
from loadtest.simulate.turns import coarse, coarsened, most_tokens
from scheduler.core.advisories import Hint

KIND = PRESETS["a100-llama-3.1-8b"]
RUN = Run(KIND, 2, VARIANTS["balanced"], users=36, seconds=90.0, warm_up_s=20.0)


def served(
    events: Events, fleet: Fleet, name: str, prompt: int, answer: int, history: int = 0, node: str = ""
) -> Request:
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


@pytest.mark.parametrize("variant", ["balanced", "sticky", "layer-priority", "no-cooperative"])
def test_everybody_is_served_and_every_core_keeps_its_invariants(variant: str) -> None:
    token = KIND.shape.token_bytes
    tight = replace(KIND, hbm_bytes=40_000.0 * token, dram_bytes=60_000.0 * token, ssd_bytes=400_000.0 * token)
    run = replace(
        RUN, kind=tight, variant=VARIANTS[variant], habits={DEFAULT_TENANT: Habits(spurious=0.5, expected=False)}
    )
    # validates every part at the end
    found = simulate(run, scripts(trace_sessions(None, sessions=160), max_tokens=20_000))
    requests = found.users.requests
    assert found.figures["unfinished"] == 0 and len(requests) > 40
    assert all(r.sent_s <= r.first_s <= r.end_s and r.cached_tokens <= r.history_tokens for r in requests)
    assert found.figures["cached_share_returning"] > 0.5
    assert all(isinstance(node, SimulatedNode) and not node.core.live for node in found.fleet.nodes.values())


def test_equal_seeds_give_equal_runs() -> None:
    said = scripts(trace_sessions(None, sessions=60), max_tokens=20_000)
    a, b = (simulate(replace(RUN, users=12), said).users.requests for _ in range(2))
    assert [(r.request_id, r.node, r.first_s, r.end_s) for r in a] == [
        (r.request_id, r.node, r.first_s, r.end_s) for r in b
    ]


def test_a_cache_comes_from_the_other_node_and_sooner_when_a_hint_said_so() -> None:
    waits = []
    for hinted in (False, True):
        events = Events()
        fleet = Fleet(events, KIND, 2, VARIANTS["balanced"])
        first = served(events, fleet, "r1", 8000, 200)
        other = next(n for n in fleet.nodes if n != first.node)
        if hinted:
            hint = Hint(SessionKey("t", "s"), "h", KIND.model, None, events.now + 60.0, pin=other)
            fleet.advise(hint)
            events.run(lambda: False, limit_s=events.now + 10.0)
        turn = served(events, fleet, "r2", 8300, 4, history=8200, node=other)
        assert turn.cached_tokens == 8192
        waits.append(turn.first_s - turn.sent_s)
    assert waits[1] < 0.1 * waits[0] and waits[0] < 1.05 * 8192 * KIND.shape.token_bytes / KIND.link_bytes_per_s


def test_a_step_whose_last_layers_come_while_it_computes_is_not_run_again() -> None:
    kind = replace(KIND, link_bytes_per_s=100e9, step_tokens=2048, mixed_step_s=0.0)
    events = Events()
    fleet = Fleet(events, kind, 2, VARIANTS["sticky"])
    first = served(events, fleet, "r1", 8000, 200)
    turn = served(events, fleet, "r2", 10_000, 4, history=8200, node=next(n for n in fleet.nodes if n != first.node))
    assert turn.cached_tokens == 8192
    assert turn.first_s - turn.sent_s < 1.2 * kind.costs.prefill_s(10_000 - 8192, 8192)


def test_one_that_can_never_fit_is_refused_and_the_longest_that_fits_is_served() -> None:
    events = Events()
    kind = replace(KIND, hbm_bytes=10_000.0 * KIND.shape.token_bytes)
    fleet, most = Fleet(events, kind, 1, VARIANTS["balanced"]), most_tokens(coarsened(kind))
    with pytest.raises(ValueError, match="does not fit"):
        served(events, fleet, "r0", most, 1, node="node-0")
    assert served(events, fleet, "r1", most - 10, 10, node="node-0").end_s > 0


@pytest.mark.parametrize("codec", [1.0, 7.0])
def test_without_disks_and_peers_a_cache_comes_from_the_slowest_tier_in_fewer_bytes_with_a_codec(codec: float) -> None:
    events = Events()
    has = Mechanisms(frozenset((HBM, DRAM, BLOB)), codec=codec, decode_bytes_per_s=20e9 if codec > 1 else 0.0)
    kind = replace(KIND, blob_bytes_per_s=5e9)
    fleet = Fleet(events, kind, 2, replace(VARIANTS["balanced"], has=has))
    first = served(events, fleet, "r1", 8000, 200)
    other = fleet.nodes[next(n for n in fleet.nodes if n != first.node)]
    turn = served(events, fleet, "r2", 8300, 4, history=8200, node=other.name)
    assert turn.cached_tokens > 0 and (other.link.bytes, other.disk.bytes) == (0, 0)
    assert other.blob.bytes == pytest.approx(turn.cached_tokens * KIND.shape.token_bytes / codec, rel=0.05)
