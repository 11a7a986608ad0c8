"""Turns of one conversation are found by their growing common prefix, and nothing else is taken for one."""

from pathlib import Path

import pytest

from loadtest.generate_trace import generate
from loadtest.sessions import find_sessions, first_requests
from loadtest.traces import TraceRequest, read_trace

FIXTURE = Path(__file__).parent / "fixtures" / "generated.jsonl"


def request(at_s: float, tokens: int, *blocks: int, conversation: str | None = None) -> TraceRequest:
    return TraceRequest(at_s, tokens, 10, blocks, conversation=conversation)


def grouped(*requests: TraceRequest) -> list[list[float]]:
    return [[t.arrival_s for t in s.turns] for s in find_sessions(requests)]


def test_a_prompt_that_extends_all_full_blocks_of_another_is_its_next_turn() -> None:
    a1, a2, a3 = request(0, 1100, 0, 1, 2), request(5, 1300, 0, 1, 3), request(9, 1700, 0, 1, 4, 5)
    b1, b2 = request(1, 1100, 0, 11, 12), request(6, 2100, 0, 11, 13, 14, 15)
    assert grouped(a1, b1, a2, b2, a3) == [[0, 5, 9], [1, 6]]


def test_a_shared_preamble_makes_no_conversation() -> None:
    unrelated = [request(i, 520, 0, 100 + i) for i in range(8)]
    assert grouped(*unrelated) == [[i] for i in range(8)]


def test_a_branch_off_an_earlier_turn_is_a_session_of_its_own() -> None:
    first = request(0, 1100, 0, 1, 2)
    second, branch = request(5, 2100, 0, 1, 3, 4, 5), request(6, 2200, 0, 1, 6, 7, 8)
    assert grouped(first, second, branch) == [[0, 5], [6]]


def test_a_resend_that_has_not_grown_is_no_next_turn() -> None:
    assert grouped(request(0, 1100, 0, 1, 2), request(3, 1100, 0, 1, 2)) == [[0], [3]]


def test_a_named_conversation_is_believed_whatever_its_blocks_say() -> None:
    assert grouped(
        request(0, 10, 1, conversation="x"), request(1, 10, 2, conversation="y"), request(2, 5, 3, conversation="x")
    ) == [
        [0, 2],
        [1],
    ]


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_every_request_is_a_turn_of_exactly_one_session_and_prompts_grow(seed: int, tmp_path: Path) -> None:
    from loadtest.generate_trace import write

    path = tmp_path / "t.jsonl"
    write(path, generate(40, seed))
    requests = read_trace(path)
    sessions = find_sessions(requests)
    assert sorted(id(t) for s in sessions for t in s.turns) == sorted(id(r) for r in requests)
    assert len({s.name for s in sessions}) == len(sessions)
    for session in sessions:
        for before, after in zip(session.turns, session.turns[1:], strict=False):
            full = before.input_tokens // 512
            assert after.block_ids[:full] == before.block_ids[:full]
            assert after.input_tokens > before.input_tokens and after.arrival_s >= before.arrival_s


def test_the_generators_conversations_are_found_again() -> None:
    sessions = find_sessions(read_trace(FIXTURE))
    assert 30 <= len(sessions) <= 36  # 30 were generated; those shorter than a block cannot be told
    assert max(len(s.turns) for s in sessions) >= 4


def test_the_first_requests_of_long_enough_sessions_are_kept_in_order() -> None:
    sessions = find_sessions(
        [
            *(request(i, 1100 + 600 * i, *range(3 + i)) for i in range(4)),
            request(0.5, 3000, 50, 51, 52, 53, 54, 55),
            *(request(2.5 + i, 1100 + 600 * i, 90, 91, *range(92, 93 + i)) for i in range(3)),
        ]
    )
    kept = first_requests(sessions, 5, min_turns=3)
    assert [[t.arrival_s for t in s.turns] for s in kept] == [[0, 1, 2, 3], [2.5]]
    assert first_requests(sessions, 5, min_turns=9) == []
