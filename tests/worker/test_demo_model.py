"""The bundled model through the worker's engine: natural facts in nobody's template, a correction, JSON and calls from
the conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from contracts.request import ToolUse
from tests.worker.engine_harness import DEMO, Harness, Result

#: What is told, turn by turn, what is asked then, and the word or words that the answer must hold.
FACTS: list[tuple[list[str], str, str]] = [
    (["My dog is called Rex."], "What's my dog's name?", "Rex"),
    (["I'm Bob."], "What's my name?", "Bob"),
    (["I'm called Zaphod"], "who am I?", "Zaphod"),
    (["my cat's name is Whiskers"], "What's the cat called?", "Whiskers"),
    (["I work as a baker"], "What do I do for a living?", "baker"),
    (["remember the number 42"], "What number did I give you?", "42"),
    (["My name is Ada. What is my name?"], "", "Ada"),
    (["My name's Joe.", "No, I meant Moe."], "So what's my name?", "Moe"),
    (["I live in Reykjavik with my two kids."], "Where do I live?", "Reykjavik"),
    (["Hey there! My name is Oluwaseun and I'm from Lagos."], "What's my name?", "Oluwaseun"),
    (["Hey there! My name is Oluwaseun and I'm from Lagos."], "Where am I from?", "Lagos"),
    (["the meeting is at 4pm in room B12"], "When's the meeting?", "4pm"),
    (["the meeting is at 4pm in room B12"], "Which room is the meeting in?", "B12"),
    (["My wife's name is Kerstin.", "We have a parrot named Jolly."], "What's my wife called?", "Kerstin"),
    (["The wifi password is xk7trumpet."], "What's the wifi password again?", "xk7trumpet"),
    (["my favorite color is teal"], "what's my favourite colour?", "teal"),
    (["I was born on March 3rd"], "When is my birthday?", "March 3rd"),
    (["My flight number is LH1203."], "What is my flight number?", "LH1203"),
    (["I'm allergic to hazelnuts, so be careful."], "What am I allergic to?", "hazelnuts"),
    (["My car is a blue Skoda.", "It's actually green."], "What's my name?", "not told"),
]
#: Of the list above, at least so many.
ENOUGH = 19
CHATTER = [
    ("Tell me about rivers. Take your time.", "I like to talk about rivers. They are older than most users think."),
    ("I had a long day.", "I see."),
]
PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "city": {"type": "string"},
"age": {"type": "integer"}},
          "required": ["name", "city", "age"], "additionalProperties": False}  # fmt: skip
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather.", "parameters": CITY},
}


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    made = Harness(DEMO, pages=3000)
    yield made
    made.settle()
    made.close()


def said(
    harness: Harness, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **more: Any
) -> Result:
    """The greedy answer to a conversation."""
    return harness.run(harness.codec.render(messages, tools), 60, ignore_eos=False, **more)


def talked(harness: Harness, turns: list[str]) -> list[dict[str, Any]]:
    """The conversation in which the user says this, with the model's own answers; the last is answered, too."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        messages.append({"role": "assistant", "content": said(harness, messages).text})
    return messages


def chattered(count: int) -> list[dict[str, Any]]:
    """Small talk of so many exchanges."""
    pairs = [CHATTER[i % len(CHATTER)] for i in range(count)]
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def test_natural_facts_are_answered(harness: Harness) -> None:
    answers = [talked(harness, [*told, *([asked] if asked else [])])[-1]["content"] for told, asked, _ in FACTS]
    wrong = [
        (told, asked, answer)
        for (told, asked, value), answer in zip(FACTS, answers, strict=True)
        if value not in answer
    ]
    assert len(FACTS) - len(wrong) >= ENOUGH, wrong


def test_several_facts_of_one_message_are_kept_apart(harness: Harness) -> None:
    told = talked(harness, ["I'm Marta, I live in Gdansk, and my parrot is called Kiki."])
    asked = {"What is my name?": "Marta", "Where do I live?": "Gdansk", "What is my parrot called?": "Kiki"}
    for question, value in asked.items():
        assert value in said(harness, [*told, {"role": "user", "content": question}]).text


def test_a_word_nobody_ever_wrote_is_copied_across_two_thousand_tokens_of_small_talk(harness: Harness) -> None:
    messages = [*talked(harness, ["My name is Qwyxolit.", "The code of the safe is 90417."]), *chattered(74)]
    assert 2000 <= len(harness.codec.render(messages)) <= 2600
    assert said(harness, [*messages, {"role": "user", "content": "What is my name?"}]).text == "Your name is Qwyxolit."
    assert (
        said(harness, [*messages, {"role": "user", "content": "What is the code of the safe?"}]).text
        == "The code of the safe is 90417."
    )


def test_json_by_a_schema_is_filled_from_the_conversation(harness: Harness) -> None:
    messages = [
        *talked(harness, ["My name is Ilka and I live in Zagreb.", "I am 37 years old."]),
        {"role": "user", "content": "Give me my details as JSON."},
    ]
    answer = said(harness, messages, json_schema=json.dumps(PERSON))
    assert json.loads(answer.text) == {"name": "Ilka", "city": "Zagreb", "age": 37}


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_tool_is_called_with_an_argument_from_the_conversation(harness: Harness, choice: Any) -> None:
    tools = [WEATHER]
    use = ToolUse(json.dumps(tools), choice)
    asked = [{"role": "user", "content": "What's the weather in Ljubljana?"}]
    at_home = [*talked(harness, ["I live in Tromso."]), {"role": "user", "content": "Get the weather in my city."}]
    for messages, city in ((asked, "Ljubljana"), (at_home, "Tromso")):
        [call] = said(harness, messages, tools, tool_use=use).calls
        assert call[1] == "get_weather" and json.loads(call[2]) == {"city": city}


def test_a_question_is_answered_though_there_are_tools(harness: Harness) -> None:
    asked = [{"role": "user", "content": "My name is Ada. What is my name?"}]
    told = said(harness, asked, [WEATHER], tool_use=ToolUse(json.dumps([WEATHER]), "auto"))
    assert told.text == "Your name is Ada." and not told.calls
