"""What the demo model is trained on and tested on: exact answers, nothing held out in training, one text for template
and trainer."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "models" / "demo"))
import evaluate
import phrasings
from conversations import Conversation, Course, conversation
from relations import RELATIONS
from rows import Renderer, training_row
from teller import Teller
from words import held_out


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer()


def conversations(renderer: Renderer, count: int, held_out_only: bool) -> list[Conversation]:
    rng = random.Random(17)
    return [conversation(rng, 300, renderer.count, held_out_only, structured=True) for _ in range(count)]


@pytest.mark.parametrize("relation", RELATIONS, ids=lambda relation: relation.kind)
def test_no_phrasing_is_both_trained_and_held_out(relation) -> None:  # type: ignore[no-untyped-def]
    everywhere = [*phrasings.TELLS.values(), *phrasings.ASKS.values(), phrasings.TOGETHER]
    trained = {phrasings.as_mine(p) for listed in everywhere for p in phrasings.parted(listed)[0]}
    for listed in (relation.tells, relation.asks):
        seen, kept = phrasings.parted(listed)
        assert len(seen) >= 3 and kept
        assert not {phrasings.as_mine(p) for p in kept} & trained


@pytest.mark.parametrize("held_out_only", [False, True])
def test_values_are_held_out_or_trained_and_never_both(held_out_only: bool) -> None:
    teller = Teller(random.Random(3), held_out_only)
    values = [teller.fact(RELATIONS[0]).value for _ in range(800)]
    parts = [part for value in values if not re.search(r"\d", value) for part in re.findall(r"[A-Za-z]{4,}", value)]
    assert len(parts) > 500 and {held_out(part) for part in parts} == {held_out_only}


def test_the_answer_holds_the_value_that_was_told_last(renderer: Renderer) -> None:
    rng = random.Random(5)
    for _ in range(300):
        course = Course(Teller(rng))
        course.tell(1)
        for _ in range(rng.randint(0, 2)):
            course.correct()
        [fact] = course.known.values()
        course.ask()
        messages = [m["content"] for m in course.talk.messages]
        # What is told and asked at once comes first, if at all.
        stated = [i for i in range(1, len(messages), 2) if i not in course.talk.recalls] or [1]
        told, answer = messages[stated[-1] - 1], messages[-1]
        assert fact.value in told and fact.value in answer and answer == fact.answer


def test_the_trainer_sees_what_the_chat_template_makes(renderer: Renderer) -> None:
    for talk in conversations(renderer, 150, False):
        theirs = renderer.tok.apply_chat_template(talk.messages, tools=talk.tools or None, return_dict=False)
        made = renderer.render(talk)
        assert made.ids == theirs
        for (begin, end), index in zip(made.recalls, talk.recalls, strict=True):
            assert renderer.tok.decode(made.ids[begin:end]) == talk.messages[index]["content"] + "<|im_end|>"


def test_positions_grow_and_gaps_lie_between_messages_only(renderer: Renderer) -> None:
    rng = random.Random(2)
    gaps = 0
    for _ in range(60):
        ids, positions, weights = training_row(rng, renderer, 256)
        assert len(ids) == len(positions) == len(weights) <= 257
        jumps = [i for i in range(1, len(ids)) if positions[i] != positions[i - 1] + 1]
        assert all(positions[i] > positions[i - 1] for i in jumps)
        assert all(renderer.tok.decode([ids[i]]) == "<|im_start|>" for i in jumps)
        gaps += len(jumps)
    assert gaps > 10


def test_exact_answers_are_told_from_others(renderer: Renderer) -> None:
    text = '{"city": "New Oslo", "n": 42}'
    right = renderer.encode(text + "<|im_end|>")

    def judged(other: str) -> bool:
        best = renderer.encode(other + "<|im_end|>")
        return evaluate.is_exact("JSON", text, best, renderer)

    assert judged(text) and judged('{"town": "New Oslo", "m": 42}')  # the keys are the schema's
    assert not judged('{"city": "New Oslu", "n": 42}') and not judged('{"city": "New Oslo", "n": 43}')
    longer = list(right)
    longer[right.index(renderer.encode('",')[0])] = renderer.encode("x")[0]
    assert not evaluate.is_exact("JSON", text, longer, renderer)
    assert evaluate.is_exact("name", text, right, renderer) and not evaluate.is_exact("name", text, longer, renderer)

    called = '<tool_call>\n{"name": "get_news", "arguments": {"city": "Oslo"}}\n</tool_call>'
    other = renderer.encode(called.replace("news", "song") + "<|im_end|>")
    assert not evaluate.is_exact("tool call", called, other, renderer)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("Your cat is called Rex.", True),
        ("Your cat's name is Rex, I think.", True),
        ("Your cat is called Rexx.", False),
        ("Your cat is called rex.", False),
        ("Your cat is called Rex. You live in Oslo.", False),
        ("Your dog is called Rex.", True),
        ("Your cat is called Bo.", False),
        ("You have not told me.", False),
    ],
)
def test_a_right_answer_names_the_value_and_no_other_that_was_told(answer: str, right: bool) -> None:
    assert evaluate.is_right("Your cat is called Rex.", ["Rex"], {"Rex", "Oslo", "Bo"}, answer) is right


def test_of_two_values_both_are_named_in_order_and_of_none_none() -> None:
    wanted, told = "Your name is Bo. You live in Oslo.", {"Bo", "Oslo"}
    assert evaluate.is_right(wanted, ["Bo", "Oslo"], told, "You are Bo. Oslo is your home.")
    assert not evaluate.is_right(wanted, ["Bo", "Oslo"], told, "You live in Oslo. Your name is Bo.")
    assert not evaluate.is_right(wanted, ["Bo", "Oslo"], told, "Your name is Bo.")
    assert evaluate.is_right("You have not told me.", [], told, "You have not told me that.")
    assert not evaluate.is_right("You have not told me.", [], told, "Your name is Bo.")
    assert not evaluate.is_right("You have not told me.", [], told, "Your name is Al.")


def test_evaluation_asks_for_every_kind_of_fact(renderer: Renderer) -> None:
    rng = random.Random(9)
    kinds = {kind for _ in range(400) for kind in evaluate.held_out_conversation(rng, 300, renderer).talk.kinds}
    assert {r.kind for r in RELATIONS} | {"JSON", "tool call", "not told", "told and asked at once"} <= kinds
