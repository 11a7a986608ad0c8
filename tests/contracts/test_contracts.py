"""The vocabulary: keys that hold everywhere, hints that are checked, frames that come back as they went."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.advisory import Advisory, parse_advisories, parse_advisory
from contracts.convert import advisory_to_wire, layers_from_bitmap, layers_to_bitmap
from contracts.errors import InvalidRequest, NotFound, from_wire, to_wire
from contracts.frames import (
    MAX_EVENT_BYTES,
    MAX_SUBMIT_BYTES,
    MOST_COMMANDS,
    STEPS_BYTES,
    Commands,
    StepFrame,
    Unreadable,
    decode_step,
    encode_cancel,
    encode_part,
    encode_request,
    encode_step,
    encode_steps,
    encode_submit,
    submit_command,
    together,
)
from contracts.ids import check_session_id
from contracts.request import Accepted, Failed, GenerateRequest, Output, Sampling, TokenLogprob, ToolCallDelta, ToolUse


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
def test_an_advisory_on_the_wire_says_what_it_said(arrival: float | None, priority: int, ordered: bool) -> None:
    wire = advisory_to_wire(Advisory("s", None, arrival, ordered, priority, 9.0), "t", "id")
    assert (wire.session.tenant, wire.session.session_id, wire.advisory_id) == ("t", "s", "id")
    assert (wire.model_id, wire.priority, wire.ordered, wire.ttl_s) == ("", priority, ordered, 9.0)
    assert (wire.expected_arrival_s if wire.HasField("expected_arrival_s") else None) == arrival


@given(st.sets(st.integers(0, 39)), st.integers(1, 40))
def test_layer_bitmaps_survive_the_wire(layers: set[int], count: int) -> None:
    wanted = sorted(layer for layer in layers if layer < count)
    assert layers_from_bitmap(layers_to_bitmap(wanted, count), count) == wanted


def take(*commands: bytes) -> list[Any]:
    return Commands().take(together(commands))


def test_frames_come_back_as_they_went() -> None:
    sampling = Sampling(temperature=0.5, stop=["x"], logit_bias={5: -1.0}, seed=7)
    request = GenerateRequest(
        "r", "t", "s", "m", sampling, messages=[{"role": "user", "content": "hé"}], resume_tokens=[1, 2], alone=True
    )
    told = GenerateRequest("r", "t", "s", "m", sampling, messages=[], template_kwargs='{"a":1}')
    assert take(encode_submit(told)) == [told] and b"template_kwargs" not in encode_submit(request), (
        "what is not said is not sent: older workers read it"
    )
    called = GenerateRequest(
        "r", "t", "s", "m", sampling, messages=[], tool_use=ToolUse("[]", "required", "f", False), group="g", choice=2
    )
    assert take(encode_submit(request), encode_cancel("r"), encode_submit(called)) == [request, "r", called]
    assert len(take(*[encode_cancel("r")] * MOST_COMMANDS)) == MOST_COMMANDS
    step = StepFrame(
        [Accepted("a", 5), Accepted("b", 7, thinking=True)],
        [
            Output("b", "é", [1], 64, [TokenLogprob("é".encode(), -0.5, [(b"\xc3", -1.5)])], None),
            Output("c", "", [], 0, None, "stop", [ToolCallDelta(0, "i", "f", "{")]),
        ],
        [Failed("d", to_wire(NotFound("no", param="model")))],
        trial="b",
        leaving=True,
    )
    assert decode_step(encode_step(step)) == step and not StepFrame() and step and StepFrame(trial="")


def test_a_submit_comes_in_parts_and_others_between_them() -> None:
    request = GenerateRequest("big", "t", "s", "m", Sampling(), prompt="x" * 1000)
    body, heard = encode_request(request), Commands()
    assert heard.take(together([encode_part("big", body[:400], False), encode_cancel("other")])) == ["other"]
    assert heard.held_bytes == 400
    heard.validate()
    assert heard.take(together([encode_part("big", body[400:], True)])) == [request] and heard.held_bytes == 0
    heard.take(together([encode_part("big", body[:400], False)]))
    assert heard.take(together([encode_cancel("big")])) == ["big"] and heard.held_bytes == 0, (
        "one that is cancelled is not kept"
    )
    heard.validate()


def test_half_received_submits_are_bounded_and_refused_one_by_one() -> None:
    heard = Commands(most_bytes=1000)
    assert heard.take(together([encode_part("a", bytes(600), False)])) == []
    (refused,) = heard.take(together([encode_part("b", bytes(600), False)]))
    assert isinstance(refused, Unreadable) and refused.request_id == "b" and heard.held_bytes == 600
    assert heard.take(together([encode_part("b", bytes(300), False), encode_part("b", b"", True)])) == [], (
        "it is refused once"
    )
    assert [c.request_id for c in heard.take(together([encode_part("a", b"", True)])) if isinstance(c, Unreadable)] == [
        "a"
    ], "no msgpack"
    heard.validate()


def test_a_request_that_cannot_be_sent_is_its_callers_own_error() -> None:
    half = GenerateRequest("r", "t", "s", "m", Sampling(), prompt="\ud800")
    large = GenerateRequest(
        "r", "t", "s", "m", Sampling(), messages=[{"role": "user", "content": "x" * MAX_SUBMIT_BYTES}]
    )
    for request, param, code in ((half, "prompt", "invalid_value"), (large, "messages", "context_length_exceeded")):
        with pytest.raises(InvalidRequest) as e:
            encode_submit(request)
        assert (e.value.param, e.value.code) == (param, code)


@pytest.mark.parametrize(
    "body", [b"\xc1", b"\x01", b"\x80", b"\x81\xa8sampling\x80", b"\x82\xa8sampling\x80\xa3new\x01", b"\xff" * 9]
)
def test_a_submit_that_cannot_be_read_hurts_only_itself(body: bytes) -> None:
    good = GenerateRequest("good", "t", "s", "m", Sampling(), prompt="x")
    bad, also, read = take(
        submit_command("bad", body), submit_command("also", encode_request(good)), encode_submit(good)
    )
    assert isinstance(bad, Unreadable) and bad.request_id == "bad" and bad.error.status == 400
    assert isinstance(also, Unreadable) and also.request_id == "also", "it names another request"
    assert read == good


def test_where_time_went_travels_beside_the_outputs_which_a_reader_of_before_still_reads() -> None:
    plain, timed = Output("a", "x", [1]), Output("b", "y", [2], times={"queue": 0.5})
    frame = encode_step(StepFrame(outputs=[plain, timed]))
    assert decode_step(frame).outputs == [plain, timed]
    assert [len(output) for output in msgpack.unpackb(frame)["outputs"]] == [7, 7]


def test_steps_that_travel_together_keep_each_requests_order() -> None:
    steps = [
        StepFrame(
            [Accepted("a", 5)],
            [Output("b", "1", [1])],
            [Failed("c", to_wire(NotFound("no", param="model")))],
            trial="a",
        ),
        StepFrame([Accepted("d", 6)], [Output("a", "2", [2]), Output("b", "3", [3], finish_reason="stop")], trial=""),
        StepFrame([], [Output("a", "4", [4], finish_reason="length")]),
    ]
    (message,) = encode_steps(steps)
    one = decode_step(message)
    assert (
        one.accepted == [Accepted("a", 5), Accepted("d", 6)]
        and [f.request_id for f in one.failed] == ["c"]
        and one.trial == ""
    )
    assert [(o.request_id, o.text) for o in one.outputs] == [("b", "1"), ("a", "2"), ("b", "3"), ("a", "4")]
    assert decode_step(encode_steps(steps[:1])[0]) == steps[0]


def test_messages_from_a_worker_are_bounded_and_an_answer_beyond_that_fails_alone() -> None:
    top = [(b"token", -1.0)] * 20
    huge = Output("huge", "x" * (MAX_EVENT_BYTES + 1), [1])
    rows = [Output(f"r{i}", "y" * 4000, [1] * 8, logprobs=[TokenLogprob(b"token", -0.5, top)] * 8) for i in range(500)]
    messages = encode_steps([StepFrame([Accepted("r0", 1)], [huge, *rows[:250]]), StepFrame(outputs=rows[250:])])
    assert len(messages) > 2 and max(map(len, messages)) <= STEPS_BYTES + 100
    heard = [decode_step(message) for message in messages]
    assert [a.request_id for step in heard for a in step.accepted] == ["r0"]
    assert [o for step in heard for o in step.outputs] == rows
    assert [(f.request_id, f.error[0]) for step in heard for f in step.failed] == [("huge", 400)]


def test_an_event_that_cannot_be_read_or_written_whole_hurts_only_its_request() -> None:
    quoted = Failed("quotes", to_wire(InvalidRequest("no such key: \ud800")))
    assert decode_step(encode_step(StepFrame(failed=[quoted]))).failed[0].error[1] == "no such key: ?"
    data = {
        "accepted": [["a", 1], ["b"], 7],
        "outputs": [["c", "text", [1]], ["d", "t", [1], 0, [[1]], None, None]],
        "failed": "no",
    }
    heard = decode_step(msgpack.packb(data))
    assert [a.request_id for a in heard.accepted] == ["a"] and heard.outputs == []
    assert sorted(f.request_id for f in heard.failed) == ["b", "c", "d"]


@pytest.mark.parametrize(
    "bad", [b"\x80", b"\x91\x01", b"\x91\x91\xa1r", b"\xc1", b"\x81\xa6submit\x01", b"\x91\x92\x01\xa6cancel"]
)
def test_a_bad_frame_is_a_value_error(bad: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Commands().take(bad)


def test_errors_survive_the_wire_with_their_class() -> None:
    error = from_wire(*to_wire(NotFound("gone", param="model", code="model_not_found")))  # type: ignore[arg-type]
    assert isinstance(error, NotFound) and error.envelope()["error"] == {
        "message": "gone", "type": "not_found_error", "param": "model", "code": "model_not_found"
    }  # fmt: skip
