"""Equal prefixes of a trace are equal text, lengths fit the model, and everything follows from the seed."""

import json
from pathlib import Path

import pytest

from loadtest.prompts import WORDS, prompt_words
from loadtest.sessions import find_sessions, first_requests
from loadtest.traces import read_trace
from loadtest.typist import typing_times, when_to_speak
from loadtest.workload import fitting_scale, longest_tokens, plan

FIXTURE = Path(__file__).parent / "fixtures" / "generated.jsonl"
DEMO_TOKENIZER = Path(__file__).parents[2] / "models" / "demo" / "tokenizer.json"


def fixture_sessions() -> list:
    return first_requests(find_sessions(read_trace(FIXTURE)), 60, 2)


def test_every_word_is_one_token_of_the_demo_tokenizer() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO_TOKENIZER))
    assert len(set(WORDS)) == len(WORDS) >= 200
    for word in WORDS:
        assert len(tokenizer.encode(" " + word, add_special_tokens=False).ids) == 1, word


def test_equal_blocks_are_equal_text_and_other_blocks_are_other_text() -> None:
    a, b = prompt_words([1, 2, 3], 512, 0.1, 0, 1300), prompt_words([1, 2, 4], 512, 0.1, 0, 1400)
    assert len(a) == 130 and len(b) == 140
    assert a[:102] == b[:102]
    assert a[102:] != b[102:130]


@pytest.mark.parametrize("scale", [0.013, 0.1, 0.37, 1.0])
def test_text_does_not_depend_on_where_it_is_cut(scale: float) -> None:
    blocks, end = [5, 6, 7, 8], 1999
    whole = prompt_words(blocks, 512, scale, 0, end)
    for cut in (1, 511, 512, 700, 1600):
        assert prompt_words(blocks, 512, scale, 0, cut) + prompt_words(blocks, 512, scale, cut, end) == whole


def test_the_fitting_scale_fits_and_the_next_one_does_not() -> None:
    sessions = fixture_sessions()
    scale = fitting_scale(sessions, 2000)
    assert longest_tokens(sessions, scale, None) <= 2000 < longest_tokens(sessions, scale + 0.001, None)
    assert fitting_scale(sessions, 10**9) == 1.0
    with pytest.raises(ValueError, match="does not fit"):
        fitting_scale(sessions, 20)


def test_a_session_as_the_demo_tokenizer_counts_it_is_no_longer_than_estimated() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO_TOKENIZER))
    sessions = fixture_sessions()
    scale = fitting_scale(sessions, 1000)
    longest = 0
    for session in plan(sessions, length_scale=scale, time_scale=1, seed=1):
        tokens = 0
        for turn in session.turns:
            tokens += len(
                tokenizer.encode(f"<|im_start|>user\n{turn.text}<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n").ids
            )
            tokens += turn.answer_tokens
        longest = max(longest, tokens)
    assert 850 <= longest <= 1000


def test_a_plan_follows_from_trace_and_seed() -> None:
    sessions = fixture_sessions()
    plans = [plan(sessions, length_scale=0.1, time_scale=0.5, seed=seed, max_answer_tokens=9) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    turns = [t for s in plans[0] for t in s.turns]
    assert all(t.text and 1 <= t.answer_tokens <= 9 and t.typing_s > 0 for t in turns)
    assert all(s.turns[0].arrival_s >= s.turns[0].typing_s for s in plans[0])


def test_the_time_scale_compresses_arrivals_and_typing_alike() -> None:
    sessions = fixture_sessions()
    slow, fast = (plan(sessions, length_scale=0.1, time_scale=x, seed=1) for x in (1.0, 0.1))
    for s, f in zip(slow, fast, strict=True):
        for a, b in zip(s.turns, f.turns, strict=True):
            assert b.arrival_s == pytest.approx(a.arrival_s / 10)
            assert b.typing_s == pytest.approx(a.typing_s / 10)


def test_users_type_for_eleven_seconds_on_average() -> None:
    times = typing_times(20_000, seed=3)
    assert sum(times) / len(times) == pytest.approx(11.0, rel=0.03)
    assert min(times) > 0.3
    assert typing_times(5, seed=3) == times[:5] != typing_times(5, seed=4)


def test_a_turn_comes_as_planned_when_the_answer_before_it_was_in_time() -> None:
    moment = when_to_speak(arrival_s=60.0, typing_s=11.0, previous_end_s=49.0)
    assert (moment.typing_starts_s, moment.request_s) == (49.0, 60.0)


def test_typing_waits_for_the_answer_before_it_and_the_request_for_the_typing() -> None:
    moment = when_to_speak(arrival_s=60.0, typing_s=11.0, previous_end_s=70.0)
    assert (moment.typing_starts_s, moment.request_s) == (70.0, 81.0)


def test_a_first_turn_is_typed_before_its_arrival() -> None:
    assert when_to_speak(20.0, 11.0, None).typing_starts_s == 9.0
    assert when_to_speak(3.0, 11.0, None).typing_starts_s == 0.0


def test_the_fixture_has_only_the_generators_fields() -> None:
    for line in FIXTURE.read_text().splitlines():
        assert set(json.loads(line)) == {"timestamp", "input_length", "output_length", "hash_ids"}
