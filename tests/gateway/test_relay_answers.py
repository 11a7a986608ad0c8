"""What is read of an engine's answer as it passes, and how a conversation is recognised by it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_sidecar import CACHED_TOKENS, PROMPT_TOKENS, FakeSidecar, Heard
from hypothesis import given
from hypothesis import strategies as st

from contracts.v1 import worker_pb2 as pb
from gateway.asked_wire import decode_answer, decode_question, encode_answer, encode_reading
from gateway.core.conversations import after, read
from gateway.core.relay_answers import MOST_EVENT_BYTES, MOST_KEPT_BYTES, Reading, Stated
from gateway.core.relay_events import MOST_HELD_BYTES, Events, data_of
from gateway.core.relay_routes import APIS, RelayKind

TURNS: list[RelayKind] = [kind for kind, api in APIS.items() if api.turn]


def engine(kind: RelayKind, **fields: Any) -> tuple[FakeSidecar, Heard]:
    sidecar = FakeSidecar("node-0")
    body = {"stream_options": {"include_usage": True}} | fields
    return sidecar, Heard(pb.HttpRequest(path=APIS[kind].path), json.dumps(body).encode())


def events_of(kind: RelayKind, call: tuple[str, str] | None = None, **fields: Any) -> list[bytes]:
    sidecar, heard = engine(kind, **fields)
    sidecar.call = call
    return sidecar._events(heard)


def whole_of(kind: RelayKind, call: tuple[str, str] | None = None) -> bytes:
    sidecar, heard = engine(kind)
    sidecar.call = call
    return sidecar._whole(heard)


def streamed(kind: RelayKind, events: list[bytes]) -> Reading:
    reading = Reading(kind, keeps=True)
    for event in events:
        reading.push(event)
    return reading


def complete(kind: RelayKind, body: bytes) -> Reading:
    reading = Reading(kind, keeps=True)
    reading.whole(body)
    return reading


# ---- tokens ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", TURNS)
def test_an_answer_states_its_tokens_streamed_or_not(kind: RelayKind) -> None:
    for reading in (streamed(kind, events_of(kind)), complete(kind, whole_of(kind))):
        assert reading.stated == Stated(PROMPT_TOKENS, 3, CACHED_TOKENS)
        assert reading.prompt_tokens(99) == PROMPT_TOKENS and reading.completion_tokens == 3
        assert reading.spoken and reading.ended and reading.turn == "Hello my friend"


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_stream_that_does_not_is_counted_by_its_events(kind: RelayKind) -> None:
    reading = streamed(kind, events_of(kind, stream_options=None))
    assert reading.stated is None and reading.prompt_tokens(7) == 7
    assert reading.completion_tokens == reading.events >= 3


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("field", ["content", "reasoning", "reasoning_content", "arguments"])
def test_many_tokens_in_one_event_are_counted_by_their_text(kind: RelayKind, field: str) -> None:
    text = "word" * 1000
    delta = {"tool_calls": [{"index": 0, "function": {"arguments": text}}]} if field == "arguments" else {field: text}
    for index in (0, 1):
        choice = {"index": index, "text": text} if kind == "completion" else {"index": index, "delta": delta}
        reading = streamed(kind, [b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"])
        assert reading.completion_tokens == 667


def test_an_event_that_is_too_long_to_be_decoded_counts_as_text() -> None:
    event = b'data: {"choices":[{"index":0,"text":"' + b"x" * MOST_EVENT_BYTES + b'"}]}\n\n'
    assert streamed("completion", [event]).completion_tokens > MOST_EVENT_BYTES // 8


@pytest.mark.parametrize(
    "usage", [5, [], {"prompt_tokens": -1, "completion_tokens": "3"}, {"prompt_tokens": 1e9}, {"input_tokens": 1 << 60}]
)
def test_tokens_that_are_no_count_are_none(usage: Any) -> None:
    reading = complete("chat", json.dumps({"choices": [], "usage": usage}).encode())
    assert reading.prompt_tokens(5) in (0, 5) and reading.completion_tokens == 0


@pytest.mark.parametrize("kind", APIS)
@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"{", b'{"choices": 5, "output": "a", "content": {}, "usage": 3}', b"\xff", b"[[[["]
)
def test_an_answer_of_any_shape_is_read(kind: RelayKind, body: bytes) -> None:
    complete(kind, body)
    streamed(kind, [b"data: " + body + b"\n\n", b"data: [DONE]\n\n"])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["choices", "delta", "tool_calls", "index", "function", "name", "arguments", "usage", "type",
                         "item", "content", "output", "prompt_tokens", "input_tokens_details", "message"]),
        inner, max_size=4,
    ),
    max_leaves=20,
)  # fmt: skip


@given(st.sampled_from(list(APIS)), values, values)
def test_no_answer_of_an_engine_makes_reading_fail(kind: RelayKind, one: Any, other: Any) -> None:
    answers = {"type": one, "choices": other, "usage": one}, {"choices": [other], "output": [one], "content": [one]}
    for value in answers:
        text = json.dumps(value).encode()
        complete(kind, text)
        streamed(kind, [b"data: " + text + b"\n\n"])
    bodies = {"messages": one, "input": other, "prompt": one, "tools": other}, {"input": [one], "messages": [other]}
    for body in bodies:
        said = read(kind, body)
        assert said.estimate >= 1
        said.history("t", "m")


def test_a_large_answer_comes_out_of_a_helper_as_it_would_be_read_here() -> None:
    body, here = whole_of("chat", ("f", "{}")), Reading("chat", keeps=True)
    reading, sent = decode_question(encode_reading(Reading("chat", keeps=True), body))
    assert isinstance(reading, Reading) and sent == body
    reading.whole(sent)
    here.whole(body)
    assert decode_answer(encode_answer(reading)) == here and here.calls == [["f", "{}"]]


# ---- what is recognised ----------------------------------------------------------------------------------------------
USER, MORE = {"role": "user", "content": "hi"}, {"role": "user", "content": "and then?"}
TEXT = "Hello my friend"
CALLED = ("look", '{"b": 1, "a": [2]}')


def asked(kind: RelayKind, *turns: dict[str, Any]) -> dict[str, Any]:
    """A body whose conversation has these messages, or items."""
    if kind == "completion":
        return {"prompt": "".join(str(turn) for turn in turns)}
    return {"system": "be kind", "messages": list(turns)}


#: How clients send an answer back, by route: text and call in the spellings that exist.
BACK: dict[RelayKind, list[list[dict[str, Any]]]] = {
    "chat": [
        [{"role": "assistant", "content": TEXT, "tool_calls": [{"id": "c1", "function": {"name": n, "arguments": a}}]}]
        for n, a in [CALLED]
    ]
    + [
        [{
            "role": "assistant", "content": [{"type": "text", "text": f" {TEXT}\n"}], "reasoning_content": "hm",
            "tool_calls": [{"function": {"arguments": CALLED[1], "name": CALLED[0]}}],
        }]
    ],
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("spelling", [0, 1])
@pytest.mark.parametrize("kind", BACK)
def test_a_conversation_is_recognised_when_its_answer_comes_back(kind: RelayKind, spelling: int, stream: bool) -> None:
    first = read(kind, asked(kind, USER)).history("t", "m")
    assert first is not None and first.first
    reading = streamed(kind, events_of(kind, CALLED)) if stream else complete(kind, whole_of(kind, CALLED))
    assert reading.turn == TEXT and len(reading.calls) == 1
    ended = after(kind, first, reading.turn, reading.calls)
    result = {"role": "tool", "content": "found"}
    second = read(kind, asked(kind, USER, *BACK[kind][spelling], result, MORE)).history("t", "m")
    assert second is not None and ended in second.ends and second.opening == first.opening
    other = read(kind, asked(kind, USER, {"role": "assistant", "content": "else"}, MORE)).history("t", "m")
    assert other is not None and ended not in other.ends


def test_a_prompt_is_recognised_when_it_goes_on_after_its_answer() -> None:
    prompt = "x" * 100
    first = read("completion", {"prompt": [prompt, "another"]}).history("t", "m")
    assert first is not None
    ended = after("completion", first, TEXT * 5, [])
    second = read("completion", {"prompt": f"{prompt}{TEXT * 5} and more"}).history("t", "m")
    assert second is not None and ended in second.ends
    assert read("completion", {"prompt": prompt, "echo": True}).history("t", "m") is None


def test_an_image_belongs_to_what_a_conversation_is_recognised_by() -> None:
    def history(url: str) -> Any:
        image = {"type": "image_url", "image_url": {"url": url}}
        return read("chat", {"messages": [{"role": "user", "content": [image]}, {"role": "assistant", "content": "a"}]})

    one, same, other = (history(url).history("t", "m") for url in ("data:a", "data:a", "data:b"))
    assert one == same and one.ends != other.ends


def test_calls_that_belong_to_no_session_have_no_conversation() -> None:
    for kind in ("embeddings", "tokenize", "detokenize"):
        assert not read(kind, {"input": "a", "prompt": "a"}).history("t", "m")


def test_a_turn_that_is_too_long_or_did_not_end_is_not_recognised() -> None:
    reading = Reading("completion", keeps=True)
    event = b'data: {"choices":[{"index":0,"text":"' + b"x" * 1_000_000 + b'"}]}\n\n'
    reading.push(event)
    assert reading.turn is None
    reading.push(b"data: [DONE]\n\n")
    assert reading.turn == "x" * 1_000_000
    for _ in range(5):
        reading.push(event)
    assert reading.turn is None and sum(map(len, reading.text)) <= MOST_KEPT_BYTES


def test_nothing_is_kept_of_an_answer_whose_session_was_named() -> None:
    reading = Reading("chat")
    for event in events_of("chat", CALLED):
        reading.push(event)
    assert not reading.text and not reading.calls and reading.completion_tokens == 3


# ---- where events end ------------------------------------------------------------------------------------------------
@given(st.lists(st.sampled_from([b"data: a\n\n", b"event: x\ndata: b\n\n", b": c\n\n", b"data: d\r\n\r\n"])), st.data())
def test_events_pass_byte_for_byte_and_never_in_halves(events: list[bytes], data: st.DataObject) -> None:
    stream, splitter, passed = b"".join(events), Events(), b""
    while stream:
        size = data.draw(st.integers(1, 7))
        ready = splitter.push(stream[:size])
        splitter.validate()
        passed += ready
        assert not ready or ready.endswith((b"\n\n", b"\r\n\r\n"))
        stream = stream[size:]
    assert passed + splitter.rest() == b"".join(events) and not splitter.torn


def test_an_event_that_is_too_long_passes_in_parts() -> None:
    splitter = Events()
    assert splitter.push(b"x" * MOST_HELD_BYTES) == b"" and not splitter.torn
    assert splitter.push(b"y") == b"x" * MOST_HELD_BYTES + b"y" and splitter.torn
    assert splitter.push(b"z\n\n") == b"z\n\n" and not splitter.torn


def test_the_data_of_events() -> None:
    events = b"event: a\ndata: 1\n\n: comment\n\ndata:2\n\ndata: 3\ndata: 4\n\n\r\ndata: 5\r\n\r\n"
    assert data_of(events) == [b"1", b"2", b"3\n4", b"5"]
    assert data_of(b"data: 1\n\n") == data_of(b"data: 1\r\n\n") == data_of(b"\ndata: 1\n\n") == [b"1"]
