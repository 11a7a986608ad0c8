"""The vocabulary: keys that hold everywhere, hints that are checked, frames that come back as they went."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.advisory import Advisory, parse_advisories, parse_advisory
from contracts.convert import advisory_from_wire, advisory_to_wire, layers_from_bitmap, layers_to_bitmap
from contracts.errors import InvalidRequest, NotFound, from_wire, to_wire
from contracts.frames import (
    MOST_COMMANDS,
    StepFrame,
    decode_step,
    decode_to_worker,
    encode_cancel,
    encode_step,
    encode_submit,
    joined,
    together,
)
from contracts.ids import check_session_id
from contracts.kv import KvShape, chunk_keys, fingerprint, leading, tenant_salt
from contracts.request import Accepted, Failed, GenerateRequest, Output, Sampling, TokenLogprob, ToolCallDelta, ToolUse

SHAPE = KvShape(fingerprint(b"weights", dtype="float32", chunk_tokens=4), 6, 2, 32, 4, "float32")
SALT = tenant_salt(b"s" * 32, "tenant")
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(tokens, tokens)
def test_equal_prefixes_have_equal_keys_and_different_ones_have_none_in_common(a: list[int], b: list[int]) -> None:
    keys_a, keys_b = chunk_keys(SALT, SHAPE, a), chunk_keys(SALT, SHAPE, b)
    assert len(keys_a) == len(a) // 4
    same = leading(x == y for x, y in zip(a, b, strict=False)) // 4
    assert keys_a[:same] == keys_b[:same]
    assert not set(keys_a[same:]) & set(keys_b[same:])


@given(tokens, st.integers(0, 10))
def test_known_keys_are_continued(a: list[int], known: int) -> None:
    keys = chunk_keys(SALT, SHAPE, a)
    assert chunk_keys(SALT, SHAPE, a, keys[:known]) == keys


def test_keys_are_the_same_on_every_machine() -> None:
    key = chunk_keys(SALT, SHAPE, [1, 2, 3, 4])[0]
    assert key.hex() == "46aeea53d19d34fc641868da1e00ac3503228410abbf7b6e158391c5a932cf6d"


def test_tenants_and_models_share_no_key() -> None:
    other = KvShape(fingerprint(b"weights", dtype="bfloat16", chunk_tokens=4), 6, 2, 32, 4, "bfloat16")
    salts = (SALT, tenant_salt(b"s" * 32, "tenant2"), tenant_salt(b"t" * 32, "tenant"))
    keys = [chunk_keys(salt, shape, [1, 2, 3, 4])[0] for salt in salts for shape in (SHAPE, other)]
    assert len(set(keys)) == len(keys)


def test_a_piece_has_the_bytes_of_its_shape() -> None:
    assert SHAPE.piece_bytes == 2 * 2 * 4 * 32 * 4 and SHAPE.chunk_bytes == 6 * SHAPE.piece_bytes == 4 * SHAPE.token_bytes


@pytest.mark.parametrize("bad", ["", "a/b", "../x", "..", ".", "a\x00b", "ä", "a b", "x" * 129, 7, None, ["a"], "a\n"])
def test_illegal_session_ids_are_refused_by_name(bad: object) -> None:
    with pytest.raises(InvalidRequest) as e:
        check_session_id(bad)
    assert e.value.param == "session_id"


@pytest.mark.parametrize("good", ["a", "user:42", "A.b_c-d", "x" * 128, "a..b"])
def test_legal_session_ids_pass(good: str) -> None:
    assert check_session_id(good) == good


def test_an_advisory_needs_only_its_session() -> None:
    assert parse_advisory({"session_id": "s"}) == Advisory("s")
    full = {"session_id": "s", "model_id": "m", "expected_arrival": 2, "ordered": True, "priority": -3, "ttl_s": 5}
    assert parse_advisory(full) == Advisory("s", "m", 2.0, True, -3, 5.0) and parse_advisory(full).lifetime_s == 7.0


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ([], None),
        ({}, "session_id"),
        ({"session_id": "s", "priority": "1"}, "priority"),
        ({"session_id": "s", "priority": True}, "priority"),
        ({"session_id": "s", "expected_arrival": -1}, "expected_arrival"),
        ({"session_id": "s", "expected_arrival": float("nan")}, "expected_arrival"),
        ({"session_id": "s", "ordered": 1}, "ordered"),
        ({"session_id": "s", "text": "secret"}, "text"),
        ({"advisories": []}, "advisories"),
        ({"advisories": [{"session_id": "s"}, {"session_id": "/"}]}, "advisories[1].session_id"),
        ({"advisories": [{"session_id": "s"}], "priority": 1}, "priority"),
    ],
)
def test_a_wrong_advisory_names_the_field(data: Any, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as e:
        parse_advisories(data)
    assert e.value.param == param


@given(st.one_of(st.none(), st.floats(0, 1000)), st.integers(-5, 5), st.booleans())
def test_advisories_survive_the_wire(arrival: float | None, priority: int, ordered: bool) -> None:
    advisory = Advisory("s", None, arrival, ordered, priority, 9.0)
    assert advisory_from_wire(advisory_to_wire(advisory, "t", "id")) == advisory


@given(st.sets(st.integers(0, 39)), st.integers(1, 40))
def test_layer_bitmaps_survive_the_wire(layers: set[int], count: int) -> None:
    wanted = sorted(layer for layer in layers if layer < count)
    assert layers_from_bitmap(layers_to_bitmap(wanted, count), count) == wanted


def test_frames_come_back_as_they_went() -> None:
    sampling = Sampling(temperature=0.5, stop=["x"], logit_bias={5: -1.0}, seed=7)
    request = GenerateRequest("r", "t", "s", "m", sampling, messages=[{"role": "user", "content": "hé"}], resume_tokens=[1, 2])
    assert decode_to_worker(encode_submit(request)) == [request]
    called = GenerateRequest("r", "t", "s", "m", sampling, messages=[], tool_use=ToolUse("[]", "required", "f", False), group="g", choice=2)
    assert decode_to_worker(encode_submit(called)) == [called]
    assert decode_to_worker(encode_cancel("r")) == ["r"]
    several = [encode_submit(request), encode_cancel("r"), encode_submit(called)]
    assert decode_to_worker(together(several)) == [request, "r", called]
    assert decode_to_worker(together(several[:1])) == [request]
    assert len(decode_to_worker(together([encode_cancel("r")] * MOST_COMMANDS))) == MOST_COMMANDS
    step = StepFrame(
        [Accepted("a", 5)],
        [
            Output("b", "é", [1], 64, [TokenLogprob("é".encode(), -0.5, [(b"\xc3", -1.5)])], None),
            Output("c", "", [], 0, None, "stop", [ToolCallDelta(0, "i", "f", "{")]),
        ],
        [Failed("d", to_wire(NotFound("no", param="model")))],
    )
    assert decode_step(encode_step(step)) == step and not StepFrame() and step


def test_steps_that_are_joined_keep_each_requests_order() -> None:
    steps = [
        StepFrame([Accepted("a", 5)], [Output("b", "1", [1])], [Failed("c", to_wire(NotFound("no", param="model")))]),
        StepFrame([Accepted("d", 6)], [Output("a", "2", [2]), Output("b", "3", [3], finish_reason="stop")]),
        StepFrame([], [Output("a", "4", [4], finish_reason="length")]),
    ]
    one = joined(steps)
    assert one.accepted == [Accepted("a", 5), Accepted("d", 6)] and [f.request_id for f in one.failed] == ["c"]
    assert [(o.request_id, o.text) for o in one.outputs] == [("b", "1"), ("a", "2"), ("b", "3"), ("a", "4")]
    assert joined(steps[:1]) == steps[0] and len(steps[0].outputs) == 1, "nothing is changed"


@pytest.mark.parametrize("bad", [b"\x80", b"\x90", b"\x92\x81\xa6cancel\xa1r\x01", b"\xc1", b"\x81\xa6submit\x01"])
def test_a_bad_frame_is_a_value_error(bad: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decode_to_worker(bad)


def test_errors_survive_the_wire_with_their_class() -> None:
    error = from_wire(*to_wire(NotFound("gone", param="model", code="model_not_found")))  # type: ignore[arg-type]
    assert isinstance(error, NotFound) and error.envelope()["error"] == {
        "message": "gone", "type": "not_found_error", "param": "model", "code": "model_not_found"
    }  # fmt: skip
