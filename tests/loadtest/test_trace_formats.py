"""Every format becomes the same requests, and a broken file says where."""

import json
from pathlib import Path

import pytest

from loadtest.generate_trace import generate, write
from loadtest.traces import TraceError, TraceRequest, read_trace

FIXTURE = Path(__file__).parent / "fixtures" / "generated.jsonl"


def test_the_fixture_is_what_the_generator_makes(tmp_path: Path) -> None:
    again = tmp_path / "again.jsonl"
    write(again, generate(30, seed=7))
    assert again.read_text() == FIXTURE.read_text()
    write(again, generate(30, seed=8))
    assert again.read_text() != FIXTURE.read_text()


def test_mooncake_lines_become_requests_by_arrival(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [
        {"timestamp": 5000, "input_length": 600, "output_length": 7, "hash_ids": [0, 9]},
        {"timestamp": 2000, "input_length": 100, "output_length": 3, "hash_ids": [0]},
    ]
    path.write_text("\n".join(json.dumps(x) for x in lines) + "\n\n")
    assert read_trace(path) == [TraceRequest(0.0, 100, 3, (0,)), TraceRequest(3.0, 600, 7, (0, 9))]


def test_aiperf_lines_may_name_the_session_and_give_delays(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    lines = [
        {"session_id": "a", "timestamp": 1000, "input_length": 100, "output_length": 3, "hash_ids": [1]},
        {"session_id": "a", "delay": 4000, "input_length": 200, "output_length": 3, "hash_ids": [2]},
    ]
    path.write_text("\n".join(json.dumps(x) for x in lines))
    first, second = read_trace(path)
    assert (first.conversation, second.conversation, second.arrival_s) == ("a", "a", 4.0)


def test_aiperf_lines_may_have_texts_extra_fields_and_no_blocks(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    ask, answer, more = (
        {"role": r, "content": c} for r, c in (("user", "one two"), ("assistant", "three"), ("user", "four"))
    )
    parts = [
        {"type": "text", "text": "a "},
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "text", "text": "b"},
    ]
    lines = [
        {"session_id": "a", "messages": [ask], "output_length": 5, "extra": {"top_p": 0.5}},
        {"session_id": "a", "delay": 2000, "messages": [ask, answer, more], "output_length": 5},
        {"session_id": "b", "timestamp": 500, "input_length": 700, "output_length": 20},
        {"session_id": "b", "delay": 1000, "input_length": 100, "output_length": 20},
        {"timestamp": 9000, "text_input": "exactly this", "output_length": 3},
        {"timestamp": 9500, "messages": [{"role": "user", "content": parts}], "output_length": 3},
    ]
    path.write_text("\n".join(json.dumps(x) for x in lines))
    a0, b0, b1, a1, alone, mixed = read_trace(path)
    assert [m.content for m in a0.messages] == ["one two"] and a0.extra == (("top_p", 0.5),)
    assert [m.content for m in a1.messages] == ["four"], (
        "what was said before, and the trace's own answer, are left out"
    )
    assert a1.arrival_s == 2.0 and a1.input_tokens > a0.input_tokens
    assert b1.input_tokens == 700 + 20 + 100 and b1.block_ids[: len(b0.block_ids)] == b0.block_ids
    assert (alone.messages[0], alone.conversation) == (("user", "exactly this"), None)
    assert mixed.messages[0].content == "a b"


def test_bailian_turns_are_named_by_their_first_chat(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [(10, -1, 1.5), (11, 10, 9.5), (12, -1, 3.0), (13, 11, 20.0)]
    lengths = {"input_length": 20, "output_length": 2, "type": "text", "turn": 1}
    lines = [{"chat_id": c, "parent_chat_id": p, "timestamp": t, "hash_ids": [c], **lengths} for c, p, t in rows]
    path.write_text("\n".join(json.dumps(x) for x in lines))
    assert [(r.conversation, r.arrival_s, r.block_tokens) for r in read_trace(path)] == [
        ("10", 0.0, 16),
        ("12", 1.5, 16),
        ("10", 8.0, 16),
        ("10", 18.5, 16),
    ]


def test_azure_rows_become_requests_that_share_no_blocks(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00.0000000,1000,10\n2024-01-01 "
        "00:00:01.2500000,20,8\n"
    )
    first, second = read_trace(path)
    assert (first.input_tokens, second.output_tokens, second.arrival_s) == (1000, 8, 1.25)
    assert len(first.block_ids) == 2 and not set(first.block_ids) & set(second.block_ids)


def test_burstgpt_sessions_grow_and_failed_calls_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,x,ChatGPT,600,10,610,Conversation log\n6,y,ChatGPT,5,0,5,Conversation "
        "log\n9,x,ChatGPT,1700,10,1710,Conversation log\n"
    )
    first, second = read_trace(path)
    assert second.block_ids[: len(first.block_ids)] == first.block_ids and len(second.block_ids) == 4
    assert second.arrival_s == 4.0 and first.model == "ChatGPT"


def test_sharegpt_turns_follow_after_reading_and_typing(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    says = [("human", "one two three"), ("gpt", "four five six seven"), ("human", "eight"), ("gpt", "nine")]
    path.write_text(json.dumps([{"id": "c1", "conversations": [{"from": w, "value": v} for w, v in says]}]))
    first, second = read_trace(path)
    assert first.conversation == second.conversation == "c1"
    assert second.input_tokens == first.input_tokens + first.output_tokens + 1
    assert (first.messages[0].content, second.messages[0].content) == ("one two three", "eight")
    assert second.arrival_s == pytest.approx(4 / 4.0 + 1 / 0.87, rel=0.2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hello\n", "starts like none"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1}\n', ":1: hash_ids"),
        ('{"timestamp": 1, "input_length": -5, "output_length": 1, "hash_ids": [1]}\n', ":1: input_length"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n{"timest\n', ":2:"),
        ('{"input_length": 5, "output_length": 1, "hash_ids": [1]}\n', "neither timestamp"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", ":2: TIMESTAMP"),
        (
            '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 1, "input_length": 5, "output_length": 1}\n',
            ":1: hash_ids",
        ),
        ('[{"id": "c7", "conversations": [{"from": "human"}]}]', "conversation c7"),
        ("[7]", "conversation 0"),
        ('{"session_id": "a", "messages": ["hi"], "output_length": 1}\n', ":1: messages must hold"),
        ('{"timestamp": 1, "text_input": 7, "output_length": 1}\n', ":1: text_input"),
        ('{"timestamp": 1, "text_input": "x", "output_length": 1, "extra": [1]}\n', ":1: extra"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
    ],
)
def test_a_broken_file_says_what_is_wrong_and_where(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "broken"
    path.write_text(text)
    with pytest.raises(TraceError, match=says):
        read_trace(path)
