"""Lines of training data are refused with their number and a remedy, whatever is in them."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import training_data
from contracts.errors import InvalidRequest
from contracts.training_data import check_line, check_lines, parse_line, read_lines

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}


def chat(*messages: Any, **more: Any) -> str:
    return json.dumps({"messages": list(messages), **more})


@pytest.mark.parametrize(
    "line",
    [
        chat(USER, ANSWER),
        chat({"role": "system", "content": ""}, USER, ANSWER | {"weight": 0}, USER, ANSWER | {"weight": 1}),
        chat(USER | {"name": "Ann"}, {"role": "tool", "content": "42"}, ANSWER),
        '{"text": "a\\u2028b"}',
        '  {"text": "\\ud83d\\ude00"}\r\n',
        '{"text": "😀"}'.encode(),
    ],
)
def test_examples_in_openai_s_format_and_texts_are_taken(line: str | bytes) -> None:
    check_line(line, 1)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "is empty; remove it"),
        (b" \t\r\n", "is empty"),
        (b"\xff{}", "not UTF-8 at byte 0; save"),
        (b'{"text": "\xed\xa0\x80"}', "not UTF-8 at byte 10"),
        ('{"text": "a"}'.encode("utf-8-sig"), "byte order mark; save"),
        ('{"text": "a"}'.encode("utf-16"), "not UTF-8"),
        (b"{", "is not JSON: .* at column 2; write one object"),
        (b'{"text": "a"} {"text": "b"}', "is not JSON: Extra data at column 15"),
        (b'{"text": "a\x00"}', "is not JSON: Invalid control character"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"text": NaN}', "NaN is no JSON"),
        (b'{"text": -Infinity}', "-Infinity is no JSON"),
        (b'{"text": ' + b"9" * 5000 + b"}", "too many digits; shorten"),
        (b'{"text": "a", "text": "b"}', "the key 'text' is there twice; keep one"),
        (b'{"messages": [{"role": "user", "role": "system", "content": ""}]}', "the key 'role' is there twice"),
        (b"[]", "is a list; give an object"),
        (b"7", "is a number; give an object"),
        (b"{}", "needs either messages or text"),
        (b'{"text": "a", "messages": []}', "needs either messages or text"),
        (b'{"prompt": "a", "completion": "b"}', r"the key 'prompt' is unknown; remove it \(known: messages, text\)"),
        (b'{"text": 5}', "text is a number; give a string"),
        (b'{"text": ""}', "text is empty"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b'{"messages": []}', "a list of at least one message"),
        (b'{"messages": {"role": "user"}}', "a list of at least one message"),
        (chat("hi"), r"messages\[0\] is a string; give an object"),
        (chat(USER, {"role": "assistant"}), r"messages\[1\].content is missing"),
        (chat(USER, {"role": "assistant", "content": None}), r"messages\[1\].content is null; give a string"),
        (chat(USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}), "is a list; give a string"),
        (chat({"content": "hi"}), r"messages\[0\].role = null must be one of system, user, assistant, tool"),
        (chat({"role": ["user"], "content": "hi"}), "role = a list must be one of"),
        (chat({"role": "Assistant", "content": "hi"}), "role = 'Assistant' must be one of"),
        (chat(USER, ANSWER | {"tool_calls": []}), r"messages\[1\].'tool_calls' is unknown; remove it"),
        (chat(USER | {"name": 3}, ANSWER), r"messages\[0\].name is a number"),
        (chat(USER, ANSWER, tools=[]), "the key 'tools' is unknown"),
        (chat(USER | {"weight": 1}, ANSWER), r"messages\[0\].weight is only for assistant messages"),
        (chat(USER, ANSWER | {"weight": 2}), "weight = a number must be 0 or 1"),
        (chat(USER, ANSWER | {"weight": True}), "weight = true or false must be 0 or 1"),
        (chat(USER, ANSWER | {"weight": 0.0}), "must be 0 or 1"),
        (chat(USER), "no assistant message, so there is nothing to learn; add one"),
        (chat(USER, ANSWER | {"weight": 0}), "no assistant message to learn; add one, without weight 0"),
        (chat(*[USER] * 2048, ANSWER), "has 2049 messages, and at most 2048"),
        (b'{"text": "' + b"a" * training_data.MAX_LINE_BYTES + b'"}', "more than 8388608 bytes; split"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_with_a_line_is_said_with_its_number(line: str | bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^line 41: .*{reason}") as found:
        check_line(line, 41)
    assert found.value.param == "training_file" and len(found.value.message) < 300


def test_a_message_quotes_little_of_a_long_key() -> None:
    with pytest.raises(InvalidRequest) as found:
        check_line(json.dumps({"\x1b[31m" + "k" * 100_000: 1}), 3)
    assert len(found.value.message) < 200 and found.value.message.isprintable()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=[])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["messages", "text", "role", "content", "weight", "name"]), inner)
    ),
)


def reason(line: str | bytes) -> str | None:
    try:
        check_line(line, 7)
    except InvalidRequest as e:
        return e.message
    return None


@given(JSON | st.builds(lambda m: {"messages": m}, st.lists(JSON)))
def test_any_json_is_taken_or_refused_with_a_reason(value: Any) -> None:
    line = json.dumps(value)
    said = reason(line)
    assert parse_line(line, 7).keys() in ({"messages"}, {"text"}) if said is None else said.startswith("line 7: ")


@given(st.binary())
def test_any_bytes_are_taken_or_refused_with_a_reason(line: bytes) -> None:
    said = reason(line)
    assert said is None or said.startswith("line 7: ")


def test_the_first_wrong_line_of_a_file_is_named() -> None:
    assert check_lines(read_lines(io.BytesIO(b'{"text": "a"}\n\n{"text": "b"}\n \n'))) == 2
    for content, reason in (
        (b"", "the file is empty"),
        (b"\n \n", "the file is empty"),
        (b'{"text": "a"}\n\n{"text"\n', "line 3: is not JSON"),
        (b'{"text": "a"}\n{"text": "b"\n}\n', "line 2: is not JSON"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            check_lines(read_lines(io.BytesIO(content)))


def test_a_file_is_read_no_further_than_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(io.RawIOBase):
        """A line without an end."""

        def readline(self, size: int = -1) -> bytes:
            assert 0 < size <= training_data.MAX_LINE_BYTES + 2
            return b"a" * size

    with pytest.raises(InvalidRequest, match="line 1: has more than"):
        check_lines(read_lines(Endless()))
    monkeypatch.setattr(training_data, "MAX_LINES", 2)
    with pytest.raises(InvalidRequest, match="line 3: is over the limit of 2 lines; split"):
        check_lines(read_lines(io.BytesIO(b'{"text": "a"}\n' * 3)))
    monkeypatch.setattr(training_data, "MAX_FILE_BYTES", 20)
    with pytest.raises(InvalidRequest, match="line 2: the file has more than 20 bytes; split it"):
        check_lines(read_lines(io.BytesIO(b'{"text": "a"}\n' * 2)))
