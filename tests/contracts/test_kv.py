"""Shapes, fingerprints and chunk keys: what they depend on, and that what they were stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.convert import shape_from_wire, shape_to_wire
from contracts.errors import InvalidRequest
from contracts.kv import KvShape, chunk_key, chunk_keys, fingerprint, leading, request_extras, tenant_salt
from contracts.v1 import common_pb2

SHAPE = KvShape.of_heads(fingerprint(b"weights", dtype="float32", chunk_tokens=4), 6, 2, 32, 4, "float32")
SALT = tenant_salt(b"s" * 32, "tenant")
ROOT = bytes(32)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)
#: Such as could be taken for tokens, or for the end of a body.
extras = st.binary(max_size=20) | st.lists(st.integers(0, 5), max_size=8).map(
    lambda n: b"".join(i.to_bytes(4, "little") for i in n)
)


@given(tokens, tokens)
def test_equal_prefixes_have_equal_keys_and_different_ones_have_none_in_common(a: list[int], b: list[int]) -> None:
    keys_a, keys_b = chunk_keys(SALT, SHAPE, a), chunk_keys(SALT, SHAPE, b)
    assert len(keys_a) == len(a) // 4
    same = leading(x == y for x, y in zip(a, b, strict=False)) // 4
    assert keys_a[:same] == keys_b[:same]
    assert not set(keys_a[same:]) & set(keys_b[same:])


@given(tokens, st.integers(0, 10), st.dictionaries(st.integers(0, 10), extras))
def test_known_keys_are_continued(a: list[int], known: int, more: dict[int, bytes]) -> None:
    keys = chunk_keys(SALT, SHAPE, a, extras=more)
    assert chunk_keys(SALT, SHAPE, a, keys[:known], more) == keys


@given(tokens, tokens, st.text(max_size=20), st.text(max_size=20))
def test_requests_of_two_scopes_share_no_key_and_those_of_one_share_all(
    a: list[int], b: list[int], one: str, other: str
) -> None:
    keys_a, keys_b = (chunk_keys(SALT, SHAPE, t, (), request_extras(s)) for t, s in ((a, one), (b, other)))
    assert chunk_keys(SALT, SHAPE, a, keys_a[:1], request_extras(one)) == keys_a, "also when computed bit by bit"
    if one != other:
        assert not set(keys_a) & set(keys_b)
    else:
        same = leading(x == y for x, y in zip(a, b, strict=False)) // 4
        assert keys_a[:same] == keys_b[:same]


@given(tokens, *(st.tuples(st.text(max_size=20), st.sampled_from([b"", b"a" * 32, b"b" * 32])) for _ in range(2)))
def test_two_adapters_or_scopes_share_no_key_whatever_the_other_says(
    a: list[int], one: tuple[str, bytes], other: tuple[str, bytes]
) -> None:
    keys = [chunk_keys(SALT, SHAPE, a, (), request_extras(*each)) for each in (one, other)]
    assert chunk_keys(SALT, SHAPE, a, keys[0][:1], request_extras(*one)) == keys[0]
    assert keys[0] == keys[1] if one == other else not set(keys[0]) & set(keys[1])


def test_a_scope_that_looks_like_an_adapter_is_none_and_a_digest_has_one_length() -> None:
    salts = ("", "cache_salt", "adapter" + "a" * 32)
    assert len({request_extras(s, d)[0] for s in salts for d in (b"a" * 32, b"b" * 32)}) == 6  # type: ignore[index]
    with pytest.raises(ValueError, match="32 bytes"):
        request_extras("", b"a")


def test_keys_are_the_same_on_every_machine() -> None:
    assert (
        chunk_keys(SALT, SHAPE, [1, 2, 3, 4])[0].hex()
        == "46aeea53d19d34fc641868da1e00ac3503228410abbf7b6e158391c5a932cf6d"
    )
    with_extra = chunk_keys(SALT, SHAPE, [1, 2, 3, 4], extras={0: b"adapter"})[0]
    assert with_extra.hex() == "a1114fa213527995f7fab9118da7e3f1f828f5f882856a064d3c06ab0d1a1bdb"
    assert SHAPE.fingerprint.hex() == "4c240198d153eb04d40b4cc0856b1ad8dd944e7b6791711e406b2840acc44d06"


def test_tenants_and_models_share_no_key() -> None:
    other = KvShape.of_heads(fingerprint(b"weights", dtype="bfloat16", chunk_tokens=4), 6, 2, 32, 4, "bfloat16")
    salts = (SALT, tenant_salt(b"s" * 32, "tenant2"), tenant_salt(b"t" * 32, "tenant"))
    keys = [chunk_keys(salt, shape, [1, 2, 3, 4])[0] for salt in salts for shape in (SHAPE, other)]
    assert len(set(keys)) == len(keys)


@given(st.tuples(tokens, extras), st.tuples(tokens, extras))
def test_no_two_pairs_of_tokens_and_extra_have_one_key(a: tuple[list[int], bytes], b: tuple[list[int], bytes]) -> None:
    keys = [chunk_key(SALT, SHAPE.fingerprint, ROOT, *pair) for pair in (a, b)]
    assert (keys[0] == keys[1]) == (a == b)


@given(tokens, st.integers(0, 9), extras)
def test_an_extra_changes_its_chunk_and_all_later_ones(a: list[int], at: int, extra: bytes) -> None:
    plain, other = chunk_keys(SALT, SHAPE, a), chunk_keys(SALT, SHAPE, a, extras={at: extra})
    same = at if extra else len(plain)
    assert plain[:same] == other[:same] and not set(plain[same:]) & set(other[same:])


def test_engines_that_order_a_piece_otherwise_have_another_fingerprint() -> None:
    prints = {fingerprint(b"w", dtype="float32", chunk_tokens=4, layout=layout) for layout in (b"", b"a", b"b")}
    assert len(prints) == 3
    assert fingerprint(b"w", dtype="float32", chunk_tokens=4, layout=b"") == fingerprint(
        b"w", dtype="float32", chunk_tokens=4
    )


def test_a_piece_has_the_bytes_of_its_shape() -> None:
    assert (
        SHAPE.piece_bytes == 2 * 2 * 4 * 32 * 4 and SHAPE.chunk_bytes == 6 * SHAPE.piece_bytes == 4 * SHAPE.token_bytes
    )
    latent = replace(SHAPE, piece_bytes=4 * 576 * 2)
    assert (
        latent.chunk_bytes == 6 * 4 * 576 * 2 == 4 * latent.token_bytes and SHAPE.is_of_heads and not latent.is_of_heads
    )


@pytest.mark.parametrize(
    "shape", [SHAPE, replace(SHAPE, piece_bytes=4608), replace(SHAPE, dtype="float8_e4m3fn", piece_bytes=512)]
)
def test_a_shape_goes_over_the_wire(shape: KvShape) -> None:
    assert shape_from_wire(shape_to_wire(shape)) == shape


def test_a_peer_that_says_no_size_means_k_and_v_of_every_head() -> None:
    message = shape_to_wire(SHAPE)
    message.ClearField("piece_bytes")
    assert shape_from_wire(message) == SHAPE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fingerprint", b"short"),
        ("layers", 0),
        ("layers", 1 << 20),
        ("kv_heads", 0),
        ("head_dim", 0),
        ("chunk_tokens", 0),
        ("dtype", "Float 32"),
        ("dtype", ""),
        ("piece_bytes", 3),
        ("piece_bytes", 1 << 31),
    ],
)
def test_a_shape_that_cannot_be_is_refused_by_field(field: str, value: object) -> None:
    message = shape_to_wire(SHAPE)
    setattr(message, field, value)
    with pytest.raises(InvalidRequest, match=field) as e:
        shape_from_wire(message)
    assert e.value.param == field


def test_elements_of_a_size_that_is_not_known_need_a_size_of_the_piece() -> None:
    with pytest.raises(InvalidRequest, match="piece_bytes = 0"):
        shape_from_wire(
            common_pb2.KvShape(
                fingerprint=bytes(32), layers=1, kv_heads=1, head_dim=1, chunk_tokens=1, dtype="float8_e4m3fn"
            )
        )
