"""What a model thinks is told apart from what it says, however the answer is cut into pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.request import TokenLogprob
from gateway.core.reasoning import BEGIN, END, MOST_SPACE, ReasoningReader, SaidLogprobs


def read(pieces: list[str], thinking: bool = False) -> tuple[str, str]:
    reader = ReasoningReader(thinking)
    took = [reader.push(piece, last=i == len(pieces) - 1) for i, piece in enumerate(pieces)]
    return "".join(thought for thought, _ in took), "".join(said for _, said in took)


@pytest.mark.parametrize(
    ("answer", "thinking", "thought", "said"),
    [
        ("Hello.", False, "", "Hello."),
        ("  Hello.\n", False, "", "  Hello.\n"),
        ("<think>\nA cat.\n</think>\n\nHello. ", False, "A cat.", "Hello. "),
        ("\n<think>A</think>B", False, "A", "B"),
        ("A cat.\n</think>\n\nHello.", True, "A cat.", "Hello."),
        ("<think></think>Hello.", False, "", "Hello."),
        ("<think>\n\n</think>\n\n", False, "", ""),
        ("</think>Hello.", True, "", "Hello."),
        ("It never ends ", True, "It never ends", ""),
        ("<think>cut </thi", False, "cut </thi", ""),
        ("<think", False, "", "<think"),
        ("<thinking> is a word", False, "", "<thinking> is a word"),
        ("a <think>b</think>", False, "", "a <think>b</think>"),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("<think>a < b </ c </think>d", False, "a < b </ c", "d"),
        ("</think>", False, "", "</think>"),
        ("", False, "", ""),
        ("", True, "", ""),
    ],
)
def test_an_answer_is_taken_apart(answer: str, thinking: bool, thought: str, said: str) -> None:
    assert read([answer], thinking) == (thought, said)
    assert read(list(answer) or [""], thinking) == (thought, said), "a character at a time"
    assert read([*answer, ""], thinking) == (thought, said), "the end may come alone"


@given(
    st.lists(st.sampled_from([BEGIN, END, "<", "/", "think", ">", " ", "\n", "a", "é"]), max_size=12).map("".join),
    st.lists(st.integers(0, 40), max_size=8),
    st.booleans(),
)
def test_pieces_do_not_matter_and_nothing_but_tags_and_space_is_lost(
    answer: str, cuts: list[int], thinking: bool
) -> None:
    at = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    pieces = [answer[a:b] for a, b in pairwise(at)]
    thought, said = read([answer], thinking)
    assert read(pieces, thinking) == (thought, said)
    kept = (thought + said).replace(" ", "").replace("\n", "")
    whole = answer.replace(" ", "").replace("\n", "")
    assert kept == whole or len(kept) >= len(whole) - len(BEGIN + END)


def test_text_is_not_held_back_once_something_was_said() -> None:
    reader = ReasoningReader(False)
    assert [reader.push(piece) for piece in ("H", " ", "<think>", "\n")] == [
        ("", "H"),
        ("", " "),
        ("", "<think>"),
        ("", "\n"),
    ]


def test_a_thought_is_told_as_it_comes_but_for_space_and_what_may_be_a_tag() -> None:
    reader = ReasoningReader(True)
    assert [reader.push(piece)[0] for piece in ("\n", "A", " cat", " ", "</", "x", "</think", ">", "Hi")] == [
        "", "A", " cat", "", "", " </x", "", "", "",
    ]  # fmt: skip


@pytest.mark.parametrize("thinking", [False, True])
def test_endless_space_is_not_kept(thinking: bool) -> None:
    reader = ReasoningReader(thinking)
    for _ in range(4 * MOST_SPACE):
        reader.push(" ")
        assert len(reader._held) <= MOST_SPACE + len(END)


@pytest.mark.parametrize("thinking", [False, True], ids=["undecided", "within a thought"])
@pytest.mark.parametrize("pieces", [1, 2, 100], ids=["whole", "two", "token by token"])
def test_only_what_is_said_has_logprobs(thinking: bool, pieces: int) -> None:
    tokens = [*([] if thinking else [" ", "<th", "ink>"]), "I", " see", "</think>", " so", "!"]
    reader, said, found = ReasoningReader(thinking), SaidLogprobs(), []
    size = -(-len(tokens) // pieces)
    for start in range(0, len(tokens), size):
        part, before = tokens[start : start + size], reader.state
        _, text = reader.push("".join(part), last=start + size >= len(tokens))
        found += said.of(before, reader.state, text, [TokenLogprob(one.encode(), 0.0) for one in part])
    assert [one.token for one in found] == [b" so", b"!"]


def test_an_answer_without_a_thought_keeps_all_logprobs() -> None:
    reader, said, found = ReasoningReader(False), SaidLogprobs(), []
    for token in (" ", "<", "b>", "x"):
        before = reader.state
        _, text = reader.push(token)
        found += said.of(before, reader.state, text, [TokenLogprob(token.encode(), 0.0)])
    assert [one.token for one in found] == [b" ", b"<", b"b>", b"x"]
