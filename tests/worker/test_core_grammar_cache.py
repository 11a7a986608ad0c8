"""A tenant's own cached verdicts leave before those of other tenants."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.core.grammar_cache import GrammarCache

A, B, C = b"a", b"b", b"c"


def test_what_is_known_is_known_to_its_tenant_until_it_expires() -> None:
    cache: GrammarCache[str] = GrammarCache(100, 0.5)
    cache.put("t", A, "for ever", 10)
    cache.put("t", B, "for a while", 10, until_s=5.0)
    assert cache.get("t", A, 1e9) == "for ever" and cache.get("u", A, 0.0) is None
    assert cache.get("t", B, 4.9) == "for a while" and cache.get("t", B, 5.0) is None
    assert cache.held == 10


def test_what_was_used_longest_ago_leaves_first() -> None:
    cache: GrammarCache[int] = GrammarCache(60, 0.5)
    cache.put("t", A, 1, 10)
    cache.put("t", B, 2, 10)
    cache.get("t", A, 0.0)
    cache.put("t", C, 3, 20)
    assert cache.get("t", A, 0.0) == 1 and cache.get("t", B, 0.0) is None and cache.get("t", C, 0.0) == 3


def test_a_flood_of_one_tenant_takes_nothing_from_another() -> None:
    cache: GrammarCache[int] = GrammarCache(100, 0.5)
    cache.put("quiet", A, 1, 30)  # below a third
    for n in range(1000):
        cache.put("flood", n.to_bytes(4, "big"), n, 10)
        cache.put("flood too", n.to_bytes(4, "big"), n, 1)
        cache.validate()
    assert cache.get("quiet", A, 0.0) == 1


def test_what_is_larger_than_a_share_is_not_kept() -> None:
    cache: GrammarCache[int] = GrammarCache(100, 0.5)
    cache.put("t", A, 1, 10)
    cache.put("t", B, 2, 51)
    assert cache.get("t", B, 0.0) is None and cache.get("t", A, 0.0) == 1


@given(
    st.lists(st.tuples(st.sampled_from("xyz"), st.binary(min_size=1, max_size=1), st.integers(0, 70), st.booleans()))
)
def test_the_books_balance(moves: list[tuple[str, bytes, int, bool]]) -> None:
    cache: GrammarCache[int] = GrammarCache(100, 0.5)
    for now, (tenant, digest, cost, put) in enumerate(moves):
        if put:
            cache.put(tenant, digest, cost, cost, until_s=now + cost)
            assert (cache.get(tenant, digest, now) == cost) is (0 < cost <= 50)
        else:
            cache.get(tenant, digest, now)
        cache.validate()
