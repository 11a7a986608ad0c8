"""What a body counts, when it is too slow, and who makes way."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.context import ContextBound
from contracts.errors import RequestError
from contracts.frames import Commands, encode_submit, together
from contracts.request import GenerateRequest, Sampling
from gateway.asked_wire import decode_answer, decode_question, encode_answer, encode_question
from gateway.bodies import _Pool
from gateway.core.admission import parse_json
from gateway.core.bodies import LIGHT_BYTES, LIGHT_TEXT_BYTES, Arrivals, Tally, most_useful_bytes
from gateway.core.shares import Shares
from gateway.fleet import bounds_of
from gateway.openai.asked import MAX_ALL_CALLS, Told, ask

TOLD = Told("a", False, {}, {})
MESSAGE = b'{"role":"user","content":""}'


def tally(body: bytes, piece: int = 65_536) -> Tally:
    made = Tally()
    for start in range(0, len(body), piece):
        made.add(body[start : start + piece])
    return made


def filled(before: bytes, unit: bytes, after: bytes, size: int) -> bytes:
    return before + unit * ((size - len(before) - len(after)) // len(unit)) + after


VALUES = {
    "numbers": b"0,",
    "floats": b"1e9,",
    "objects": b"{},",
    "lists": b"[],",
    "nested lists": b"[[[[1]]]],",
    "nulls": b"null,",
    "entries": b'{"a":1,"b":2,"c":3},',
    "parts": b'{"type":"text","text":""},',
    "long numbers": b"1234567890123,",
    "short texts": b'"ab",',
}


@pytest.mark.parametrize("what", VALUES)
def test_no_body_takes_more_memory_than_is_reckoned(what: str) -> None:
    body = filled(b"[", VALUES[what], b"0]", 1 << 20)
    count = tally(body)
    tracemalloc.start()
    value = parse_json(body)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert value and most <= 1.25 * (count.length + count.decoded), f"{most / len(body):.1f} bytes for each"


@given(st.binary(max_size=300), st.integers(1, 50))
def test_a_body_counts_the_same_however_it_comes(body: bytes, piece: int) -> None:
    whole, pieces = tally(body or b" "), tally(body or b" ", piece)
    assert (whole.length, whole.values, whole.decoded) == (pieces.length, pieces.values, pieces.decoded)


LIGHT = {
    "many messages": filled(b'{"model":"m","messages":[', MESSAGE + b",", MESSAGE + b"]}", LIGHT_BYTES),
    "many values": filled(b'{"model":"m","messages":[' + MESSAGE + b'],"metadata":[', b"{},", b"0]}", LIGHT_BYTES),
    "messages of a larger body": b'{"model":"m","messages":['
    + b",".join([MESSAGE[:-2] + b"a" * 100 + b'"}'] * 1300)
    + b"]}",
    "text": filled(b'{"model":"m","messages":[{"role":"user","content":"', b"a", b'"}]}', LIGHT_TEXT_BYTES),
    "a prompt": filled(b'{"model":"m","prompt":"', "é".encode(), b'"}', LIGHT_TEXT_BYTES),
    "token ids": filled(b'{"model":"m","prompt":[', b"1,", b"1]}", LIGHT_BYTES),
    "a schema": filled(
        b'{"model":"m","messages":['
        + MESSAGE
        + b'],"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"enum":[',
        b"0,",
        b"0]}}}}",
        LIGHT_BYTES,
    ),
}


@pytest.mark.parametrize("what", LIGHT)
def test_what_is_read_on_the_event_loop_holds_it_for_milliseconds(what: str) -> None:
    body, took = LIGHT[what], []
    assert tally(body).light
    for _ in range(5):
        began = time.thread_time()
        ask("completion" if b'"prompt"' in body else "chat", body, TOLD)
        took.append(time.thread_time() - began)
    assert min(took) < 0.03, took


def test_heavy_is_what_is_long_or_holds_many_values() -> None:
    assert tally(b" " * LIGHT_TEXT_BYTES).light
    assert not tally(b" " * (LIGHT_TEXT_BYTES + 1)).light
    assert tally(b"," * LIGHT_BYTES).light
    assert not tally(b"," * (LIGHT_BYTES + 1)).light


# ---- arriving ------------------------------------------------------------------------------------------------------
def test_a_body_has_time_to_begin_to_rest_and_to_end() -> None:
    arrivals = Arrivals()
    body = arrivals.begin("a", 100.0)
    assert body.due_s() == 110.0
    body.held, body.last_s = 64 << 10, 109.0
    assert body.due_s() == 111.0, "a second more for 64 KiB"
    body.held, body.last_s = 16 << 20, 109.0
    assert body.due_s() == 119.0, "nothing may rest for longer than ten seconds"
    body.last_s = 158.0
    assert body.due_s() == 160.0, "nothing takes longer than a minute"


def test_of_an_owners_bodies_the_slowest_that_rests_makes_way() -> None:
    arrivals = Arrivals()
    fast, slow, other, empty = (arrivals.begin(owner, 0.0) for owner in ("a", "a", "b", "a"))
    fast.held, slow.held, other.held = 2000, 1000, 1
    assert arrivals.slowest("a", 0.5) is None, "nobody rests yet"
    assert arrivals.slowest("a", 1.5) is slow and arrivals.slowest("b", 1.5) is other and empty.held == 0
    slow.last_s = 1.0
    assert arrivals.slowest("a", 1.5) is fast, "the other one has just said something"
    for arrival in (fast, slow, empty, empty):
        arrivals.end(arrival)
    assert arrivals.slowest("a", 9.0) is None and len(arrivals) == 1


async def test_a_body_that_needs_the_room_of_several_drops_each_of_them_once() -> None:
    """One that was dropped stays listed until its own task runs. To drop it again frees nothing: that went on for
    ever, on the loop."""
    pool = _Pool(100, 1.0)
    for amount in (10, 20, 30, 40):
        arrival = pool.arrivals.begin("a", asyncio.get_running_loop().time() - 60.0)
        arrival.held = amount
        assert pool.shares.take("a", amount)
        pool.stop[arrival] = lambda amount=amount: pool.shares.give("a", amount)  # type: ignore[misc]
    dropped = 0
    while not pool.shares.take("a", 55):
        assert pool.make_room("a", 55) and dropped < 4
        dropped += 1
    assert dropped == 3 and pool.shares.of("a") == 40 + 55
    assert pool.make_room("a", 55) and not pool.make_room("a", 55), "nothing is left to drop"


def test_the_one_that_holds_most_is_known() -> None:
    shares = Shares(10, 1)
    assert shares.greediest() is None
    for owner, amount in (("a", 3), ("b", 4), ("c", 1)):
        assert shares.take(owner, amount)
    assert shares.greediest() == "b"


# ---- models --------------------------------------------------------------------------------------------------------
def test_the_longest_useful_body_is_known_only_when_all_models_are() -> None:
    small, large = ContextBound(1000, 10, 10), ContextBound(4000, 10, 10)
    assert most_useful_bytes([], 1) is None
    assert most_useful_bytes([small, ContextBound(1000, 10, 0)], 1) is None
    one, several = most_useful_bytes([small, large], 1), most_useful_bytes([small, large], 32)
    assert one is not None and several is not None and 2 * 6 * 40_000 < one < several


def test_what_one_node_takes_is_not_refused_for_another_nodes_sake() -> None:
    class Info:
        def __init__(self, name: str, *told: int) -> None:
            self.name, (self.max_tokens, self.longest_token_bytes, self.message_token_bytes) = name, told

    found = bounds_of([Info("m", 100, 8, 8), Info("m", 200, 4, 0), Info("n", 50, 8, 8)])
    assert found == {"m": ContextBound(200, 8, 0), "n": ContextBound(50, 8, 8)}


# ---- across processes ----------------------------------------------------------------------------------------------
def test_a_question_and_its_answer_survive_the_way() -> None:
    told = Told("tenant", True, {"X-Dynamo-Session-Final": "true"}, {"m": ContextBound(100, 5, 4)})
    body = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "hällo"}], "logit_bias": {"5": 1}, "stop": "x"}
    ).encode()
    kind, same, known, stored = decode_question(encode_question("chat", body, told))
    assert (kind, same, known, stored) == ("chat", body, told, None)
    found, expected = decode_answer(encode_answer(ask(kind, same, known))), ask(kind, body, told)
    prompt, wanted = found.prompts[0], expected.prompts[0]
    assert (prompt.estimate, prompt.history, found.sampling, found.said) == (
        wanted.estimate,
        wanted.history,
        expected.sampling,
        expected.said,
    )
    frame = encode_submit(GenerateRequest("r", "t", "s", "m", Sampling(seed=3), packed=prompt.packed, priority=2))
    assert Commands().take(together([frame])) == [
        GenerateRequest("r", "t", "s", "m", Sampling(seed=3), messages=wanted.messages, priority=2)
    ]


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ({"model": "m"}, "messages"),
        ({"model": "m", "messages": [{"role": "user", "content": "x" * 500}]}, "messages"),
        ([], None),
    ],
)
def test_what_is_wrong_is_said_the_same_from_afar(data: Any, param: str | None) -> None:
    told, body = Told("a", False, {}, {"m": ContextBound(100, 5, 4)}), json.dumps(data).encode()
    with pytest.raises(RequestError) as near:
        ask("chat", body, told)
    with pytest.raises(RequestError) as far:
        decode_answer(encode_answer(near.value))
    assert far.value.envelope() == near.value.envelope() and near.value.param == param


def test_calls_of_all_messages_together_are_bounded() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "tool_calls": [call] * 128}
    body = json.dumps({"model": "m", "messages": [message] * (MAX_ALL_CALLS // 128 + 1)}).encode()
    with pytest.raises(RequestError) as caught:
        ask("chat", body, TOLD)
    assert caught.value.param == "messages"
