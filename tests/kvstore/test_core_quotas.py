"""What a tenant may hold, and what goes when it holds too much, as sentences."""

from __future__ import annotations

import pytest

from contracts.errors import ConfigError
from contracts.ids import SessionKey
from contracts.kv import KvShape, Manifest
from kvstore.core import events as ev
from kvstore.core import instructions as do
from kvstore.core.store import Store
from runtime.config_file import load_config

SHAPE = KvShape.of_heads(b"f" * 32, 2, 1, 8, 16, "float32")


def key(name: str, tenant: str = "t") -> SessionKey:
    return SessionKey(tenant, name)


def keys(tag: int, count: int) -> list[bytes]:
    return [bytes([tag, i]) * 16 for i in range(count)]


def make(chunks: int, *, default: int = 0) -> Store:
    """A store where tenant t may hold so many chunks, and others `default`."""
    size = SHAPE.chunk_bytes
    quotas = {"t": chunks * size}
    store = Store(
        "node-0", 64 * 4096, write_back_limit_bytes=1 << 20, default_quota_bytes=default * size, quota_bytes=quotas
    )
    store.handle(ev.ShapesDeclared("w", [SHAPE], 0.0))
    return store


def save(
    store: Store, session: SessionKey, wanted: list[bytes], now: float, *, turn: bool = True
) -> tuple[do.Grant, list[do.Instruction]]:
    out = store.handle(ev.SaveWanted(("w", int(now)), session, SHAPE.fingerprint, wanted, now))
    grant = next(i for i in out if isinstance(i, do.Grant))
    for s in [i for i in store.handle(ev.SaveEnded(("w", int(now)), grant.indices, (), now)) if isinstance(i, do.Sum)]:
        store.handle(ev.Summed(s.key, (1, 2), now))
    for i in grant.indices:
        store.handle(ev.SsdWritten(wanted[i], ev.Wrote.OK, now))
        store.handle(ev.BlobWritten(wanted[i], ev.Wrote.OK, now))
    if turn:
        below = [wanted[i] for i in sorted([*grant.indices, *grant.held])]
        store.handle(ev.TurnEnded(Manifest(session, "m", SHAPE.fingerprint, below, 16 * len(below), now), now))
    store.validate()
    return grant, out


def test_the_tenants_least_recently_used_session_makes_way():
    store = make(4)
    save(store, key("a"), keys(1, 2), 1.0)
    save(store, key("b"), keys(2, 2), 2.0)
    grant, out = save(store, key("c"), keys(3, 2), 3.0)
    assert len(grant.indices) == 2
    assert [i.session for i in out if isinstance(i, do.DeleteManifest)] == [key("a")]
    assert {i.key for i in out if isinstance(i, do.DeleteBlob)} == set(keys(1, 2))
    assert store.quotas.used_bytes("t") == 4 * SHAPE.chunk_bytes


def test_another_tenants_chunks_are_never_touched():
    store = make(2)
    save(store, key("x", "other"), keys(9, 4), 1.0)
    save(store, key("a"), keys(1, 2), 2.0)
    _, out = save(store, key("b"), keys(2, 2), 3.0)
    assert [i.session for i in out if isinstance(i, do.DeleteManifest)] == [key("a")]
    assert store.quotas.used_bytes("other") == 4 * SHAPE.chunk_bytes


def test_a_session_that_alone_exceeds_the_quota_is_saved_as_far_as_it_goes_and_the_rest_is_refused_and_counted():
    store = make(3)
    grant, out = save(store, key("a"), keys(1, 5), 1.0)
    assert grant.indices == (0, 1, 2) and grant.refused == (3, 4)
    assert [i.amount for i in out if isinstance(i, do.Counted) and i.what == "saves_over_quota"] == [2]
    grant, out = save(store, key("a"), [*keys(1, 3), *keys(4, 1)], 2.0)
    assert grant.held == (0, 1, 2) and grant.refused == (3,)
    assert not [i for i in out if isinstance(i, do.DeleteManifest)]


def test_a_session_whose_turn_is_running_does_not_make_way():
    store = make(2)
    save(store, key("a"), keys(1, 2), 1.0, turn=False)
    grant, out = save(store, key("b"), keys(2, 1), 5.0)
    assert grant.refused == (0,) and not [i for i in out if isinstance(i, do.DeleteManifest)]


def test_chunks_that_two_sessions_share_are_counted_once():
    store = make(10)
    save(store, key("a"), keys(1, 2), 1.0)
    save(store, key("b"), [*keys(1, 2), *keys(2, 1)], 2.0)
    assert store.quotas.used_bytes("t") == 3 * SHAPE.chunk_bytes


def test_sessions_of_other_nodes_are_counted_when_they_are_listed():
    store = make(3)
    store.handle(
        ev.ManifestsListed([Manifest(key("far"), "m", SHAPE.fingerprint, keys(7, 3), 48, 1.0)], 1.0, True, 1.0)
    )
    assert store.quotas.used_bytes("t") == 3 * SHAPE.chunk_bytes
    _, out = save(store, key("a"), keys(1, 1), 5.0)
    assert [i.session for i in out if isinstance(i, do.DeleteManifest)] == [key("far")]


def test_the_default_holds_for_tenants_that_have_no_quota_of_their_own():
    store = make(0, default=1)
    assert len(save(store, key("a"), keys(1, 3), 1.0)[0].indices) == 3, "0 is no limit"
    assert save(store, key("x", "other"), keys(2, 3), 2.0)[0].refused == (1, 2)


@pytest.mark.parametrize(
    "kv", [{"tenant_quota_gib": {"a": -1}}, {"tenant_quota_gib": {"a/b": 1}}, {"default_tenant_quota_gib": "much"}]
)
def test_a_wrong_quota_stops_the_start_and_names_itself(kv):
    with pytest.raises(ConfigError, match=r"kv\.(default_)?tenant_quota_gib"):
        load_config(None, {"kv": kv})


# ---- all tenants together


def make_small(chunks: int) -> Store:
    """A store whose blob tier has room for so many chunks; nobody has a quota."""
    store = Store("node-0", 256 * 4096, write_back_limit_bytes=1 << 20)
    store.handle(ev.ShapesDeclared("w", [SHAPE], 0.0))
    store.handle(ev.TierSized("blob", chunks * SHAPE.chunk_bytes, 0.0))
    return store


def left(out: list[do.Instruction]) -> list[SessionKey]:
    return [i.session for i in out if isinstance(i, do.DeleteManifest)]


def test_when_the_blob_tier_is_full_the_session_that_was_not_used_for_longest_makes_way():
    store = make_small(6)
    for n in range(3):
        save(store, key(f"s{n}"), keys(n + 1, 2), n + 1.0)
    _, out = save(store, key("s0"), keys(1, 2), 4.0)
    assert not left(out)
    grant, out = save(store, key("new"), keys(9, 2), 5.0)
    assert len(grant.indices) == 2 and left(out) == [key("s1")]
    assert [i.amount for i in out if isinstance(i, do.Counted) and i.what == "sessions_over_blob"] == [1]
    assert store.quotas.held_bytes == store.quotas.named_bytes == 6 * SHAPE.chunk_bytes


def test_the_tenant_that_holds_most_makes_way_so_that_nobody_drives_out_the_others():
    store = make_small(8)
    save(store, key("old", "small"), keys(9, 2), 1.0)
    for n in range(20):
        _, out = save(store, key(f"s{n}", "large"), keys(n + 10, 2), n + 2.0)
        assert all(session.tenant == "large" for session in left(out))
    assert store.quotas.used_bytes("small") == 2 * SHAPE.chunk_bytes
    assert store.quotas.used_bytes("large") == 6 * SHAPE.chunk_bytes


def test_a_session_that_alone_is_larger_than_the_blob_tier_is_saved_as_far_as_it_goes_and_the_rest_is_counted():
    store = make_small(4)
    save(store, key("other"), keys(9, 1), 1.0)
    grant, out = save(store, key("long"), keys(1, 6), 2.0)
    assert len(grant.indices) == 4 and left(out) == [key("other")]
    grant, out = save(store, key("long"), [*keys(1, 4), *keys(2, 2)], 3.0)
    assert not grant.indices and not left(out)
    assert [i.amount for i in out if isinstance(i, do.Counted) and i.what == "saves_over_blob"] == [2]


def test_running_turns_stay_and_a_chunk_of_two_sessions_counts_once():
    store = make_small(4)
    save(store, key("a"), keys(1, 2), 1.0, turn=False)
    save(store, key("b"), keys(1, 2), 2.0)
    assert store.quotas.held_bytes == 2 * SHAPE.chunk_bytes
    grant, out = save(store, key("c"), keys(3, 3), 3.0)
    assert len(grant.indices) == 2 and left(out) == [key("b")], "that of a turn which is running is not even asked"


def test_without_a_size_nobody_makes_way():
    store = make_small(2)
    store.handle(ev.TierSized("blob", None, 0.5))
    for n in range(5):
        _, out = save(store, key(f"s{n}"), keys(n + 1, 2), n + 1.0)
        assert not left(out)


def test_what_the_shell_measures_counts_and_what_is_erased_is_counted_off():
    store = make_small(6)
    save(store, key("a"), keys(1, 2), 1.0)
    save(store, key("b"), keys(2, 2), 2.0)
    # others have saved three more
    store.handle(ev.TierSized("blob", 8 * SHAPE.chunk_bytes, 3.0, 7 * SHAPE.chunk_bytes))
    grant, out = save(store, key("c"), keys(3, 2), 4.0)
    assert left(out) == [key("a")] and len(grant.indices) == 2
    assert store.quotas.held_bytes == 7 * SHAPE.chunk_bytes
    store.handle(ev.SessionErased(key("b"), 5.0, 5.0))
    assert store.quotas.held_bytes == 5 * SHAPE.chunk_bytes


def test_a_save_that_finds_no_room_in_the_arena_does_not_count():
    store = make_small(6)
    for n in range(50):
        out = store.handle(ev.SaveWanted(("w", n), key("a"), b"another model", keys(1, 2), float(n)))
        assert next(i for i in out if isinstance(i, do.Grant)).refused == (0, 1)
    huge = [bytes([n // 256, n % 256]) * 16 for n in range(600)]
    store.handle(ev.TierSized("blob", 1000 * SHAPE.chunk_bytes, 60.0))
    for n in range(100, 110):
        out = store.handle(ev.SaveWanted(("w", n), key("b"), SHAPE.fingerprint, huge, float(n)))
    assert store.quotas.held_bytes == store.quotas.named_bytes < 600 * SHAPE.chunk_bytes
