"""Other users' systems in the simulator: what each decides, on small fleets reckoned by hand; and that what moves
arrives."""

from dataclasses import replace

import pytest

from contracts.ids import SessionKey
from loadtest.simulate.events import Events
from loadtest.simulate.fleet import VARIANTS, Fleet
from loadtest.simulate.mechanisms import Mechanisms
from loadtest.simulate.presets import PRESETS
from loadtest.simulate.request import Request
from loadtest.simulate.systems.contract import Active, Paused, View
from loadtest.simulate.systems.infercept import (
    DISCARD,
    PRESERVE,
    SWAP,
    InferCept,
    LlumnixInferCept,
    MigratingInferCept,
    min_waste,
)
from loadtest.simulate.systems.llumnix import Llumnix, freeness
from loadtest.simulate.systems.parrot import IN_HBM, Parrot

KIND = PRESETS["a100-llama-3.1-8b"]


def key(name: str) -> SessionKey:
    return SessionKey("t", name)


def view(name: str, requests: int, used: float, *, waiting: int = 0, queued: float = 0.0) -> View:
    return View(name, requests, requests - waiting, 1000.0, used, queued)


def paused(name: str = "s", **changes: float) -> Paused:
    return replace(Paused(key(name), 1000, 0.1, 0.01, 4000, 1), **changes)  # type: ignore[arg-type]


# ---- Llumnix ----------------------------------------------------------------------------------------------------
def test_freeness_is_unused_memory_a_request_and_counts_what_waits_first() -> None:
    assert freeness(view("a", 4, 200.0)) == 200.0
    assert freeness(view("a", 0, 0.0)) == 1000.0
    assert freeness(view("a", 4, 900.0, waiting=2, queued=50.0)) == 12.5
    assert freeness(view("a", 4, 900.0, waiting=2, queued=300.0)) < 0


def test_where_nothing_is_free_the_longest_queue_is_not_the_freest() -> None:
    full = [view("long", 30, 900.0, waiting=20, queued=300.0), view("short", 12, 950.0, waiting=2, queued=300.0)]
    assert Llumnix().place(key("s"), "", 0.0, full) == "short"
    assert Llumnix().place(key("s"), "", 0.0, [*full, view("room", 40, 900.0)]) == "room"


def test_llumnix_places_where_there_is_most_freeness_whoever_had_the_session() -> None:
    llumnix = Llumnix()
    views = [view("a", 2, 900.0), view("b", 4, 100.0), view("c", 9, 100.0)]
    assert llumnix.place(key("s"), "", 0.0, views) == "b"
    assert llumnix.ended(paused(), "b", 1.0) == frozenset()
    assert llumnix.place(key("s"), "", 2.0, [view("a", 0, 0.0), *views[1:]]) == "a"


def test_llumnix_moves_the_least_urgent_and_shortest_from_the_least_free_node_to_the_freest() -> None:
    active = {
        "a": [Active("long", 300.0), Active("short", 100.0), Active("urgent", 50.0, -1), Active("late", 200.0, 1)],
        "b": [],
        "c": [],
    }
    views = [view("a", 4, 650.0), view("b", 1, 100.0), view("c", 2, 300.0)]
    (move,) = Llumnix().migrations(views, active)
    assert (move.request_id, move.source, move.target) == ("late", "a", "b")
    active["a"] = active["a"][:3]
    assert Llumnix().migrations(views, active)[0].request_id == "short"
    assert Llumnix().migrations([view("a", 4, 650.0), view("b", 3, 600.0)], active) == [], "they are nearly alike"
    assert Llumnix().migrations([view("a", 4, 650.0), view("b", 1, 990.0)], active) == [], "there is no room"


# ---- InferCept --------------------------------------------------------------------------------------------------
def test_a_pause_is_preserved_when_short_swapped_when_long_and_discarded_where_swapping_is_slow() -> None:
    assert min_waste(paused(), pause_s=0.01) == PRESERVE
    assert min_waste(paused(), pause_s=60.0) == SWAP
    assert min_waste(paused(swap_s=10.0), pause_s=60.0) == DISCARD


def test_infercept_sticks_to_the_node_of_the_first_turn_and_learns_how_long_pauses_are() -> None:
    system = InferCept()
    busy = [view("a", 3, 0.0), view("b", 1, 0.0)]
    assert system.place(key("s"), "", 0.0, busy) == "b"
    assert system.place(key("s"), "", 1.0, [view("a", 0, 0.0), view("b", 50, 0.0)]) == "b"
    before = system.pause_s
    system.ended(paused(), "b", 10.0)
    system.place(key("s"), "", 10.1, busy)
    assert system.pause_s < before and not system.migrations(busy, {})


def test_with_llumnix_a_session_follows_its_migrated_cache() -> None:
    system = LlumnixInferCept()
    views = [view("a", 3, 0.0), view("b", 1, 0.0)]
    assert system.place(key("s"), "", 0.0, views) == "b" and system.migrates_every_s > 0
    system.ended(paused(), "a", 5.0)
    assert system.place(key("s"), "", 6.0, views) == "a"


def test_migrating_infercept_places_by_load_and_names_where_the_cache_is() -> None:
    system = MigratingInferCept()
    views = [view("a", 3, 0.0), view("b", 1, 0.0)]
    system.place(key("s"), "", 0.0, views)
    system.ended(paused(), "a", 5.0)
    assert system.place(key("s"), "", 6.0, views) == "b" and system.sources(key("s")) == ("a",)


# ---- Parrot -----------------------------------------------------------------------------------------------------
def test_parrot_keeps_a_run_together_and_its_cache_in_hbm() -> None:
    parrot = Parrot()
    idle = [view("a", 0, 0.0), view("b", 2, 0.0)]
    assert parrot.place(key("run:engineer"), "run", 0.0, idle) == "a"
    full = [view("a", 90, 900.0), view("b", 0, 0.0)]
    assert parrot.place(key("run:reviewer"), "run", 1.0, full) == "a"
    assert parrot.place(key("other:reviewer"), "other", 1.0, full) == "b"
    assert parrot.ended(paused(), "a", 2.0) == IN_HBM


# ---- on a fleet -------------------------------------------------------------------------------------------------
def ask(
    fleet: Fleet, events: Events, name: str, prompt: int, answer: int, history: int = 0, session: str = ""
) -> Request:
    request = Request(name, key(session or name), int(history > 0), prompt, history, answer, events.now, lambda r: None)
    fleet.ask(request)
    return request


def test_a_running_request_moves_and_goes_on_where_it_was() -> None:
    """Two long answers on one node of two: one moves, decodes as many tokens as it was asked for, and sooner than both
    on one node."""
    events = Events()
    fleet = Fleet(events, replace(KIND, hbm_bytes=40_000.0 * KIND.shape.token_bytes), 2, VARIANTS["llumnix"])
    first = [ask(fleet, events, f"r{n}", 9000, 900) for n in range(2)]
    later = [ask(fleet, events, f"s{n}", 9000, 900) for n in range(2)]
    # All that was placed on the second node ends; the first keeps its own.
    assert {r.node for r in first} == {"node-0", "node-1"}
    events.run(lambda: all(r.end_s >= 0 for r in [*first, *later]), limit_s=600.0)
    fleet.validate()
    crowded = [ask(fleet, events, f"c{n}", 6000, 1500) for n in range(2)]
    for r in crowded[1:]:
        node = fleet.nodes[r.node]
        sequence = node.outstanding[r.request_id]
        events.run(lambda s=sequence: s.decoding_from >= 0 and s.generated > 10)  # type: ignore[misc]
        other = fleet.nodes["node-1" if r.node == "node-0" else "node-0"]
        assert other.expect(sequence.need_bytes)
        generated = sequence.generated
        node.engine.leave(sequence, lambda there, n=node, o=other, s=sequence: (n.hand_over(s), o.receive(s)))  # type: ignore[misc]
        events.run(lambda r=r: r.end_s >= 0, limit_s=events.now + 600.0)  # type: ignore[misc]
        assert r.node == other.name and r.end_s > 0 and generated < sequence.generated
    events.run(lambda: all(r.end_s >= 0 for r in crowded), limit_s=events.now + 600.0)
    fleet.validate()
    assert all(not n.outstanding and n.incoming_bytes == 0 for n in fleet.nodes.values())


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("infercept", 1.0),
        ("infercept-ssd", 1.0),
        ("llumnix", 0.0),
        ("parrot", 1.0),
        ("lmcache", 1.0),
        ("lmcache-ssd", 1.0),
        ("prefix-caching", 1.0),
    ],
)
def test_what_a_system_keeps_between_turns(variant: str, expected: float) -> None:
    events = Events()
    fleet = Fleet(events, KIND, 2, VARIANTS[variant])
    first = ask(fleet, events, "r1", 6000, 400, session="s")
    events.run(lambda: 0 <= first.end_s < events.now - 1.0, limit_s=100.0)  # and nodes have reported
    second = ask(fleet, events, "r2", 6500, 2, history=6400, session="s")
    events.run(lambda: second.end_s >= 0, limit_s=200.0)
    assert second.cached_tokens == expected * 6400


@pytest.mark.parametrize("variant", ["infercept-ssd", "lmcache-ssd"])
def test_an_ssd_keeps_what_host_memory_lost_and_is_read_at_its_pace(variant: str) -> None:
    events = Events()
    fleet = Fleet(events, KIND, 2, VARIANTS[variant])
    first = ask(fleet, events, "r1", 6000, 400, session="s")
    events.run(lambda: first.end_s >= 0, limit_s=100.0)
    node, bytes_ = fleet.nodes[first.node], 6400 * KIND.shape.token_bytes
    assert node.ssd.bytes_of(key("s")) == 0, "being written"
    events.run(lambda: node.ssd.bytes_of(key("s")) > 0, limit_s=200.0)
    assert events.now - first.end_s == pytest.approx(bytes_ / KIND.ssd_bytes_per_s) and node.writes.bytes == bytes_
    node.hbm.take(key("s"))
    node.dram.take(key("s"))
    events.run(lambda: events.now > 10 + first.end_s, limit_s=200.0)
    second = ask(fleet, events, "r2", 6500, 400, history=6400, session="s")
    events.run(lambda: second.end_s >= 0, limit_s=200.0)
    assert second.node == first.node and second.cached_tokens == 6400
    assert second.first_s - second.sent_s > bytes_ / KIND.ssd_bytes_per_s and node.disk.bytes == bytes_
    events.run(lambda: node.ssd.bytes_of(key("s")) > bytes_, limit_s=200.0)
    assert node.writes.bytes == 6900 // 64 * 64 * KIND.shape.token_bytes, "what is there is not written again"
    fleet.validate()


def test_a_codec_shrinks_what_comes_from_far_and_takes_the_device() -> None:
    def waited_s(has: Mechanisms) -> float:
        events = Events()
        fleet = Fleet(events, replace(KIND, blob_bytes_per_s=1e9), 1, replace(VARIANTS["lmcache"], has=has))
        first = ask(fleet, events, "r1", 6000, 400, session="s")
        events.run(lambda: first.end_s >= 0, limit_s=100.0)
        fleet.nodes["node-0"].hbm.take(key("s"))
        second = ask(fleet, events, "r2", 6500, 2, history=6400, session="s")
        events.run(lambda: second.end_s >= 0, limit_s=200.0)
        return second.first_s - second.sent_s

    coded = VARIANTS["lmcache"].has
    free = replace(coded, decode_bytes_per_s=0.0)
    bytes_ = 6400 * KIND.shape.token_bytes
    assert waited_s(coded) - waited_s(free) == pytest.approx(bytes_ / coded.decode_bytes_per_s, rel=0.01)
    assert waited_s(free) < 0.5 * waited_s(replace(free, codec=1.0))
