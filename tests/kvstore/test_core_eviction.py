"""Victims, clause by clause: "class (invalidated or expired advisory; unadvised; advised), then least urgent priority,
then highest layer, then least recently used session, then latest chunk", and what is never one."""

from __future__ import annotations

from itertools import islice, pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from contracts.memory.layer_bands import band_of
from contracts.memory.victim_order import Rank, Standing
from kvstore.core.eviction import Victims, kind_of, protected, under
from kvstore.core.index import Chunk, Index
from kvstore.core.sessions import Advice, Sessions
from kvstore.core.state import CopyState, PieceState

UNUSED = Standing(Rank.UNADVISED, 0, float("-inf"))
NOW = 1000.0


class World:
    """An index and sessions, filled by hand."""

    def __init__(self, *, layer_priority: bool = True) -> None:
        self.index, self.sessions = Index(), Sessions()
        self.victims = Victims(self.index, self.sessions, layer_priority=layer_priority)

    def session(
        self, name: str, chunks: int, *, used: float = 1.0, layers: int = 2, ssd: CopyState = CopyState.PRESENT
    ) -> list[Chunk]:
        shape = KvShape.of_heads(bytes([layers]) * 32, layers, 1, 8, 16, "float32")
        keys = [f"{name}{i}".encode().ljust(32) for i in range(chunks)]
        made = [self.index.chunk(key, shape) for key in keys]
        self.index.set_manifest(Manifest(SessionKey("t", name), "m", shape.fingerprint, keys, 0, 0.0))
        self.sessions.used(SessionKey("t", name), used)
        for chunk in made:
            assert chunk is not None
            chunk.saved_here = True
            if ssd is not CopyState.ABSENT:
                self.index.set_copy(chunk, "ssd", ssd)
            for layer in range(layers):
                self.ready(chunk, layer)
        return made  # type: ignore[return-value]

    def ready(self, chunk: Chunk, layer: int) -> None:
        for state in (PieceState.QUEUED, PieceState.LOADING, PieceState.READY):
            self.index.set_piece(chunk, layer, state, layer)

    def advise(self, name: str, priority: int = 0, expires: float = NOW + 60) -> None:
        self.sessions.advise(SessionKey("t", name), Advice(priority, NOW, expires))

    def order(self, now: float = NOW, below: Rank | None = None) -> list[str]:
        """All victims as "chunk/layer", first to go first."""
        self.victims.refresh(now)
        kinds = {kind_of(c, layer) for c in self.index.resident.values() for layer in range(c.shape.layers)}
        found = []
        while True:
            firsts = [(first, kind) for kind in kinds if (first := self.victims.first(kind)) is not None]
            if not firsts:
                break
            (key, chunk, layer), kind = min(firsts, key=lambda f: f[0][0])
            if protected(key, under(below) if below is not None else None):
                break
            found.append(f"{chunk.key.decode().strip()}/{layer}")
            self.victims.skip(kind)
        self.victims.settle()
        return found


@pytest.fixture
def world() -> World:
    return World()


def test_the_highest_layer_goes_first_across_sessions_then_the_older_session_then_the_latest_chunk(world):
    world.session("a", 2, used=2.0)
    world.session("b", 2, used=1.0)
    assert world.order() == ["b1/1", "b0/1", "a1/1", "a0/1", "b1/0", "b0/0", "a1/0", "a0/0"]


def test_layers_are_compared_across_models_too(world):
    world.session("a", 1, used=1.0, layers=2)
    world.session("b", 1, used=9.0, layers=4)
    assert world.order() == ["b0/3", "b0/2", "a0/1", "b0/1", "a0/0", "b0/0"]


def test_without_layer_priority_whole_chunks_go():
    world = World(layer_priority=False)
    world.session("a", 2)
    assert world.order() == ["a1/1", "a1/0", "a0/1", "a0/0"]


def test_who_looks_at_all_chunks_while_victims_are_skipped_meets_none_of_those(world):
    world.session("a", 3)
    world.victims.refresh(NOW)
    heads = world.victims.heads(None)
    assert next(heads)[1].key.startswith(b"a2")
    (_, chunk, layer) = world.victims.first(kind := kind_of(*next(world.victims.heads(None))[1:]))
    world.victims.skip(kind)
    world.victims.skip(kind)
    assert (chunk.key[:2], layer) == (b"a2", 1)
    assert [(c.key[:2], n) for _, c, n in heads] == [(b"a0", 1), (b"a2", 0), (b"a1", 0), (b"a0", 0)]
    world.victims.settle()
    assert [(c.key[:2], n) for _, c, n in world.victims.heads(None)][:2] == [(b"a2", 1), (b"a1", 1)]


def test_the_class_comes_before_everything_else(world):
    for name, used in (("a", 0.0), ("u", 9.0), ("i", 99.0), ("e", 98.0)):
        world.session(name, 1, used=used)
    world.advise("a")
    world.advise("e", expires=NOW - 1)
    world.advise("i")
    world.sessions.invalidate(SessionKey("t", "i"))
    assert world.order() == ["e0/1", "i0/1", "e0/0", "i0/0", "u0/1", "u0/0", "a0/1", "a0/0"]
    assert world.order(below=Rank.ADVISED) == ["e0/1", "i0/1", "e0/0", "i0/0", "u0/1", "u0/0"]
    assert world.order(below=Rank.UNADVISED) == ["e0/1", "i0/1", "e0/0", "i0/0"]


def test_an_urgent_hint_displaces_less_urgent_ones_and_nobody_as_urgent(world):
    for name, priority in (("low", 5), ("mid", 0), ("top", -5)):
        world.session(name, 1)
        world.advise(name, priority)
    assert protected((1, Rank.ADVISED, 0, 0.0, 0.0, 0.0), under(Rank.ADVISED, 0))
    assert not protected((1, Rank.ADVISED, -5, 0.0, 0.0, 0.0), under(Rank.ADVISED, 0))
    assert not protected((1, Rank.UNADVISED, 9, 0.0, 0.0, 0.0), under(Rank.ADVISED, 5))
    assert world.order() == ["low0/1", "low0/0", "mid0/1", "mid0/0", "top0/1", "top0/0"]


def test_an_advisory_that_expires_lowers_its_session_without_any_other_event(world):
    world.session("a", 1)
    world.session("u", 1)
    world.advise("a")
    assert world.order()[0] == "u0/1"
    assert world.order(NOW + 60)[0] == "a0/1"


def test_the_least_urgent_priority_goes_first_within_a_class_whatever_the_layer(world):
    world.session("u", 1, used=1.0)
    world.session("l", 1, used=2.0)
    world.advise("u", -5)
    world.advise("l", 5)
    assert world.order() == ["l0/1", "l0/0", "u0/1", "u0/0"]


def test_a_chunk_of_two_sessions_stands_as_the_one_that_protects_it_most(world):
    (shared,) = world.session("a", 1)
    world.session("u", 1, used=5.0)
    other = SessionKey("t", "b")
    world.index.set_manifest(Manifest(other, "m", shared.shape.fingerprint, [shared.key], 0, 0.0))
    world.sessions.advise(other, Advice(0, NOW, NOW + 60))
    assert world.order() == ["u0/1", "u0/0", "a0/1", "a0/0"]
    world.index.drop_manifest(other)
    assert world.order() == ["a0/1", "u0/1", "a0/0", "u0/0"]


def test_what_no_slower_tier_has_or_will_have_goes_before_everything_whole_even_for_a_prefetch(world):
    world.session("d", 1)
    world.session("s", 1, ssd=CopyState.SKIPPED)
    world.advise("s")
    world.sessions.invalidate(SessionKey("t", "d"))
    assert world.order() == ["s0/1", "s0/0", "d0/1", "d0/0"]
    assert world.order(below=Rank.DROPPED) == ["s0/1", "s0/0"]


def test_what_waits_to_be_saved_is_never_a_victim_and_is_one_again_when_it_has_been(world):
    (waiting,) = world.session("w", 1, ssd=CopyState.WAITING)
    (for_blob,) = world.session("b", 1, ssd=CopyState.SKIPPED)
    world.index.set_copy(for_blob, "blob", CopyState.WAITING)
    for_blob.leaving = True
    assert world.order() == []
    world.index.set_copy(waiting, "ssd", CopyState.PRESENT)
    assert world.order() == ["w0/1", "w0/0"]
    world.index.set_copy(for_blob, "blob", CopyState.PRESENT)
    assert world.order() == ["b0/1", "w0/1", "b0/0", "w0/0"] or world.order() == ["w0/1", "b0/1", "w0/0", "b0/0"]


def test_a_piece_that_left_uncovers_the_layers_below_it(world):
    (chunk,) = world.session("a", 1, layers=8)
    assert world.order()[0] == "a0/7"
    for layer in (7, 6, 5):
        world.index.set_piece(chunk, layer, PieceState.ABSENT)
    assert world.order() == [f"a0/{layer}" for layer in (4, 3, 2, 1, 0)]
    world.ready(chunk, 6)
    assert world.order()[0] == "a0/6"


def test_a_chunk_that_thousands_name_is_not_ranked_by_all_of_them_each_time(world, monkeypatch):
    (shared,), _ = world.session("shared", 1, used=5.0), world.session("own", 1, used=6.0)
    names, asked, standing = [SessionKey("t", f"{n}") for n in range(3000)], [0], Sessions.standing

    def name(session: SessionKey) -> None:
        world.index.set_manifest(Manifest(session, "m", shared.shape.fingerprint, [shared.key], 0, 0.0))

    def counted(self: Sessions, *args: object) -> Standing:
        asked[0] += 1
        return standing(self, *args)

    for session in names:
        name(session)
    assert world.order() == ["shared0/1", "own0/1", "shared0/0", "own0/0"]
    monkeypatch.setattr(Sessions, "standing", counted)
    for n in range(50):
        world.sessions.used(names[n], 10.0 + n)
        assert world.order(NOW + n / 1000)[0] == "own0/1", "the latest use counts at once"
    assert asked[0] < 2 * len(names), "all of them once a second"
    world.sessions.advise(late := SessionKey("t", "late"), Advice(0, NOW, NOW + 3))
    world.order(NOW + 0.1)
    name(late)
    assert world.order(NOW + 0.2)[-1] == "shared0/0", "who names it later protects it too"
    heads = list(world.victims.heads(under(Rank.ADVISED)))
    assert heads and all(chunk is not shared for _, chunk, _ in heads), "the advisory protects it"
    for session in names[:50]:
        world.sessions.forget(session)
    assert world.order(NOW + 4)[0] == "shared0/1", "and it is dropped with the advisory once it is ranked anew"


def test_an_advisory_protects_until_it_expires_is_invalidated_or_its_request_comes():
    sessions, s = Sessions(), SessionKey("t", "s")
    assert sessions.standing(s, 0.0).rank is Rank.UNADVISED
    sessions.advise(s, Advice(priority=-3, arrival=5.0, expires=60.0))
    assert sessions.standing(s, 59.0) == Standing(Rank.ADVISED, 3, float("-inf"))
    assert sessions.standing(s, 60.0).rank is Rank.DROPPED
    sessions.used(s, 61.0)
    assert sessions.standing(s, 62.0) == Standing(Rank.UNADVISED, 0, 61.0)
    sessions.invalidate(s)
    assert sessions.standing(s, 63.0).rank is Rank.DROPPED


def test_hints_of_sessions_that_nobody_knows_leave_nothing():
    sessions, unknown, known = Sessions(), SessionKey("t", "unknown"), SessionKey("t", "known")
    for s in (unknown, known):
        sessions.advise(s, Advice(priority=0, arrival=5.0, expires=60.0))
    sessions.advise(withdrawn := SessionKey("t", "withdrawn"), Advice(priority=0, arrival=5.0, expires=1e9))
    sessions.invalidate(withdrawn)
    sessions.invalidate(SessionKey("t", "never hinted"))
    sessions.trim(59.0, {known})
    assert set(sessions.advice) == {unknown, known}
    sessions.trim(61.0, {known})
    assert set(sessions.advice) == {known}
    assert sessions.standing(known, 61.0).rank is Rank.DROPPED
    sessions.trim(62.0)
    assert not sessions.advice, "the last that knew it is gone"


def test_hints_renewed_without_end_leave_few_expiries():
    sessions, s = Sessions(), SessionKey("t", "s")
    for i in range(20_000):
        sessions.advise(s, Advice(priority=0, arrival=5.0, expires=1e5 + i))
    assert len(sessions._expiries) < 5000
    sessions.expire(2e5)
    assert s in sessions.changed


def test_many_advisories_that_expire_together_end_in_parts():
    sessions = Sessions()
    for i in range(2500):
        sessions.advise(SessionKey("t", f"{i}"), Advice(priority=0, arrival=5.0, expires=60.0))
    sessions.changed.clear()
    sessions.expire(61.0)
    assert len(sessions.changed) == 1000
    sessions.expire(61.0)
    sessions.expire(61.0)
    assert len(sessions.changed) == 2500


def test_a_use_is_remembered_for_a_day_and_longer_while_the_session_is_known():
    sessions, known = Sessions(), {SessionKey("t", f"{i}") for i in range(0, 100, 2)}
    for i in range(100):
        sessions.used(SessionKey("t", f"{i}"), float(i))
    for _ in range(20):
        sessions.trim(86_450.5, known)
    kept = {s for s in (SessionKey("t", f"{i}") for i in range(100)) if sessions.standing(s, 86_451.0) != UNUSED}
    assert kept == known | {SessionKey("t", f"{i}") for i in range(51, 100)}


def test_few_of_many_old_uses_are_looked_at_together():
    sessions = Sessions()
    for i in range(1000):
        sessions.used(SessionKey("t", f"{i}"), float(i))
    sessions.trim(200_000.0)
    assert 900 < sum(sessions.is_used(SessionKey("t", f"{i}")) for i in range(1000)) < 1000


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["use", "advise", "invalidate", "drop", "piece", "look"]), st.integers(0, 2), st.integers(0, 9)
    ),
    max_size=40,
)


@given(STEPS)
@settings(deadline=None)
def test_the_order_that_is_kept_is_the_order_that_ranking_everything_anew_gives(steps):
    world = World()
    chunks = {name: world.session(name, 2, used=float(i), layers=5) for i, name in enumerate("abc")}
    now = NOW
    for what, which, number in steps:
        name, now = "abc"[which], now + 1
        session = SessionKey("t", name)
        if what == "use":
            world.sessions.used(session, now)
        elif what == "advise":
            world.sessions.advise(session, Advice(number - 5, now, now + number))
        elif what == "invalidate":
            world.sessions.invalidate(session)
        elif what == "drop":
            world.index.drop_manifest(session)
        elif what == "piece":
            chunk, layer = chunks[name][number % 2], number // 2
            if chunk.state(layer) is PieceState.READY:
                world.index.set_piece(chunk, layer, PieceState.ABSENT)
            else:
                world.ready(chunk, layer)
        else:
            kept = world.order(now)
            anew = Victims(world.index, world.sessions, layer_priority=True)
            world.index.stirred.update(dict.fromkeys(world.index.resident))
            before, world.victims = world.victims, anew
            ranked = world.order(now)
            keys = {
                f"{c.key.decode().strip()}/{layer}": anew.key(c, layer)
                for cs in chunks.values()
                for c in cs
                for layer in range(5)
            }
            world.victims = before
            assert sorted(kept) == sorted(ranked)
            places = {name: key for name, key in keys.items() if key is not None}
            assert all(places[a] <= places[b] for a, b in pairwise(kept))
            heads = list(world.victims.heads(None))
            assert all(a[0] <= b[0] for a, b in pairwise(heads))
            ready = [(c, n) for cs in chunks.values() for c in cs for n in range(5) if c.state(n) is PieceState.READY]
            tops = {(c.key, band_of(n, 5)): n for c, n in ready}  # of each band the last, its highest
            assert {(c.key, band_of(n, 5)): n for _, c, n in heads} == tops
            assert list(islice(world.victims.heads(None), 3)) == heads[:3] and list(world.victims.heads(None)) == heads
