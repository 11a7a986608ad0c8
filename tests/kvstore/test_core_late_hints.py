"""What a hint wants too late gives way to what others want in time, and ends when its request is here."""

from __future__ import annotations

import pytest

from contracts.convert import session_to_wire
from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from contracts.v1 import common_pb2
from contracts.v1 import scheduler_pb2 as pb
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.events import LoadKind
from kvstore.core.fetches import RUNNING_LIMIT
from kvstore.core.prefetch import rank
from kvstore.core.rates import SSD
from kvstore.core.store import Store
from kvstore.core.usefulness import Usefulness
from kvstore.directory import _advised

SHAPE = KvShape.of_heads(b"f" * 32, 4, 2, 128, 64, "float32")  # pieces of 128 KiB, each of a band and a read of its own
CHUNKS = {"large": 40, "small": 4, "other": 4}
KEYS = {name: [bytes([i]) + name.encode().ljust(31) for i in range(count)] for name, count in CHUNKS.items()}


def key(name: str) -> SessionKey:
    return SessionKey("t", name)


@pytest.fixture
def store():
    made = Store("node-0", 64 << 20, write_back_limit_bytes=1 << 20)
    made.handle(ev.ShapesDeclared("w", [SHAPE], 0.0))
    made.handle(ev.Recovered([ev.FoundCopy(k, SHAPE, (1, 2, 3, 4)) for keys in KEYS.values() for k in keys]))
    manifests = [Manifest(key(name), "m", SHAPE.fingerprint, keys, 16 * len(keys), 1.0) for name, keys in KEYS.items()]
    made.handle(ev.ManifestsListed(manifests, 0.0))
    yield made
    made.validate()


def fetches(out):
    return [i for i in out if isinstance(i, do.Fetch)]


def hint(store, name: str, arrival_s: float, priority: int = 0):
    return fetches(store.handle(ev.Advised(key(name), priority, arrival_s, 60.0, (), 1.0)))


def order(store, running) -> list[str]:
    """Whose fetches start as those that run end, one after the other."""
    started = []
    while running:
        more = fetches(store.handle(ev.FetchDone(running.pop(0).fetch, {}, 1.0)))
        started += [next(name for name, keys in KEYS.items() if f.pieces[0].key in keys) for f in more]
        running += more
    return started


def takes_s(store, name: str) -> float:
    """How long the SSD would take, with nothing before it."""
    return store.meter.rates.estimate_s(SSD, CHUNKS[name] * SHAPE.chunk_bytes, 1.0)


def test_of_one_priority_what_is_late_comes_last_whatever_its_layer():
    at = {"arrival": 1.0, "order": 1, "position": 0}
    in_time = rank(LoadKind.ADVISED, layer=3, priority=0, **at)
    late = rank(LoadKind.ADVISED, layer=0, priority=0, late=True, **at)
    urgent = rank(LoadKind.ADVISED, layer=0, priority=-1, late=True, **at)
    assert urgent < in_time < late
    assert rank(LoadKind.DEMAND, layer=0, priority=0, late=True, **at) == rank(
        LoadKind.DEMAND, layer=0, priority=0, **at
    )


def test_a_hint_that_can_be_in_time_goes_before_one_that_cannot(store):
    running = hint(store, "large", takes_s(store, "large") / 2)
    assert len(running) == RUNNING_LIMIT[ev.SourceKind.SSD], "with nothing else to do it is brought all the same"
    hint(store, "small", 1.0)
    assert order(store, running)[: 4 * CHUNKS["small"]] == ["small"] * 4 * CHUNKS["small"]


def test_what_is_late_is_not_counted_as_before_what_is_in_time(store):
    running = hint(store, "large", takes_s(store, "large") / 2)
    hint(store, "small", takes_s(store, "small") + 0.001)
    hint(store, "other", takes_s(store, "small") + takes_s(store, "other") + 0.001)
    assert "large" not in order(store, running)[: 4 * (CHUNKS["small"] + CHUNKS["other"])]


def test_a_hint_behind_others_in_time_may_be_late_and_who_asks_is_served_at_once(store):
    running = hint(store, "large", 1.0)
    hint(store, "small", takes_s(store, "small") + 0.001)  # it would be in time if there were nothing else
    wants = [(k, ()) for k in KEYS["small"]]
    store.handle(ev.LoadWanted(("w", "1"), LoadKind.DEMAND, key("small"), SHAPE.fingerprint, wants, (), 0, 1.0))
    assert order(store, running)[: 4 * CHUNKS["small"]] == ["small"] * 4 * CHUNKS["small"]


def test_a_hint_without_a_time_is_never_late(store):
    running = hint(store, "large", float("inf"))
    hint(store, "small", takes_s(store, "small") / 2)
    assert order(store, running)[-1] == "small"


def test_a_request_that_is_here_ends_what_its_hint_wanted_beyond_it(store):
    running = hint(store, "large", 1.0)
    wants = [(k, ()) for k in KEYS["large"][:10]]
    running += fetches(
        store.handle(ev.LoadWanted(("w", "1"), LoadKind.DEMAND, key("large"), SHAPE.fingerprint, wants, (), 0, 1.0))
    )
    began = len(running)
    assert began + len(order(store, running)) < 4 * CHUNKS["large"]
    brought = [
        k for k in KEYS["large"] if all(store.index.chunks[k].state(layer).name == "READY" for layer in range(4))
    ]
    assert brought[:10] == KEYS["large"][:10] and len(brought) < 40
    assert not store.meter.rates.ahead(SSD)


def test_a_command_without_a_time_says_none_and_lives_as_long_as_it_says():
    def said(**more: float) -> ev.Advised:
        advisory = common_pb2.Advisory(session=session_to_wire(key("small")), advisory_id="a", ttl_s=30.0, **more)
        return _advised(pb.PrefetchCommand(advisory=advisory), 1.0)

    assert (said().arrival_s, said().lifetime_s) == (float("inf"), 30.0)
    assert (said(expected_arrival_s=0.0).arrival_s, said(expected_arrival_s=5.0).lifetime_s) == (0.0, 35.0)


def test_what_is_offered_for_a_hint_without_a_time_may_be_wanted_at_once(store):
    running, offers = hint(store, "small", float("inf")), []
    while running:
        out = store.handle(ev.FetchDone(running.pop(0).fetch, {}, 1.0))
        offers += [i for i in out if isinstance(i, do.Offer)]
        running += fetches(out)
    assert [offer.arrival_s for offer in offers] == [0.0]


def test_a_hint_of_a_name_that_nobody_knows_is_forgotten_once_blob_has_said_so(store):
    for n in range(100):
        made_up = key(f"made up {n}")
        store.handle(ev.Advised(made_up, 0, 1.0, 172_800.0, (), 1.0))
        assert store.sessions.live(made_up, 1.0), "until then it may be known elsewhere"
        store.handle(ev.ManifestFetched(made_up, None, 1.0))
    assert not store.sessions.advice and not store.hints.sessions
    hint(store, "small", 60.0)
    assert key("small") in store.hints.sessions


def test_hints_that_expire_together_end_over_several_ticks_though_nothing_else_needs_ticks(store):
    manifests = [Manifest(key(f"s{n}"), "m", SHAPE.fingerprint, [], 0, 1.0) for n in range(2500)]
    store.handle(ev.ManifestsListed(manifests, 0.0))
    for manifest in manifests:
        store.handle(ev.Advised(manifest.session, 0, 1.0, 60.0, (), 1.0))
    left = []
    store.handle(ev.Tick(62.0))
    while store.busy:
        left.append(len(store.hints.sessions))
        store.handle(ev.Tick(62.0))
    assert left == [1500, 500] and not store.hints.sessions


def test_a_hint_given_again_and_again_costs_a_look_at_each_chunk_that_is_here_and_not_at_each_piece(store, monkeypatch):
    assert order(store, hint(store, "large", 1.0))
    looks, found = [0], Usefulness.found

    def counted(self, *args):
        looks[0] += 1
        found(self, *args)

    monkeypatch.setattr(Usefulness, "found", counted)
    for _ in range(5):
        store.handle(ev.Invalidated(key("large"), 1.0))
        out = store.handle(ev.Advised(key("large"), 0, 1.0, 60.0, (), 1.0))
        assert [i.keys for i in out if isinstance(i, do.Offer)] == [tuple(KEYS["large"])]
    assert not looks[0]
