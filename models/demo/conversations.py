"""The conversations the demo model is trained and tested on.

What this module decides: what is said in which order, and what the exact answer is. Facts are told, corrected and asked
for (teller.py), with small talk between (small_talk.py), and are wanted as JSON and in calls of tools (structured.py).
An answer can only be right if the attention to the early tokens is right: a broken KV cache shows at once.

Everything is drawn from the `random.Random` that the caller passes. Training never draws what is held out: a share of
the words (words.py) and of the phrasings (phrasings.toml); evaluation draws nothing else.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from small_talk import IDLE, small_talk
from structured import Tools, wanted_as_json
from teller import Fact, Teller, echo, facts

NOT_TOLD = "You have not told me."


@dataclass
class Conversation:
    """Messages in the OpenAI shape, and which of them recall what.

    recalls: indices of the assistant messages that recall a fact. kinds: of each of these, what kind of recall it is.
    values: of each, what it has to name, in this order. echoes: indices of those that repeat what was just told. tools:
    functions that may be called, as OpenAI describes them.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    recalls: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    values: list[list[str]] = field(default_factory=list)
    echoes: list[int] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)

    def say(
        self, user: str, assistant: str, recall: bool = False, kind: str = "", values: tuple[str, ...] = ()
    ) -> None:
        """Append one exchange. values: what the answer names, if it recalls something."""
        self.messages.append({"role": "user", "content": user})
        self.messages.append({"role": "assistant", "content": assistant})
        if recall:
            self.recalls.append(len(self.messages) - 1)
            self.kinds.append(kind)
            self.values.append([*values])


class Course:
    """One conversation as it goes on: what holds now, and what was told last."""

    def __init__(self, teller: Teller) -> None:
        self.teller, self.rng = teller, teller.rng
        self.talk = Conversation()
        self.known: dict[tuple[str, ...], Fact] = {}
        #: Every value that was told, also those that hold no more.
        self.told: set[str] = set()
        self.last: Fact | None = None

    def tell(self, count: int) -> None:
        """Tell so many new facts in one message."""
        rng = self.rng
        if count > 1 and rng.random() < 0.35:
            said, new = self.teller.in_one_sentence()
            if not any(f.topic in self.known for f in new):
                self._noted(said, new)
                self._hold(new)
                self.last = None
            return
        new = [f for f in facts(self.rng, count, self.teller) if f.topic not in self.known]
        if not new:
            return
        if rng.random() < (0.2 if len(new) == 1 else 0.1):
            asked = rng.choice(new)
            self.talk.say(
                f"{_ended(self.teller.together(new))} {asked.asked}",
                asked.answer,
                True,
                "told and asked at once",
                (asked.value,),
            )
        else:
            self._noted(self.teller.together(new), new)
        self._hold(new)
        self.last = new[0] if len(new) == 1 else None

    def _hold(self, new: list[Fact]) -> None:
        self.known |= {f.topic: f for f in new}
        self.told |= {f.value for f in new}

    def _noted(self, said: str, new: list[Fact]) -> None:
        if self.rng.random() < 0.12:  # in passing
            remark = self.rng.choice(IDLE)
            said = f"{_ended(said)} {remark}" if self.rng.random() < 0.5 else f"{remark} {said}"
        plainly = self.rng.random() < (0.12 if len(new) < 3 else 0.25)
        self.talk.say(said, self.rng.choice(["Noted.", "Okay, I will remember that."]) if plainly else echo(new))
        if not plainly:
            self.talk.echoes.append(len(self.talk.messages) - 1)

    def correct(self) -> None:
        """Tell another value for something."""
        old = self.last or self.rng.choice(list(self.known.values()))
        said, new = self.teller.correction(old, self.last is not None)
        self._noted(said, [new])
        self._hold([new])
        self.last = new
        if self.rng.random() < 0.25:
            self.ask(new)

    def ask(self, fact: Fact | None = None) -> None:
        """Ask for a fact, or for one of those that hold."""
        fact = fact or self.rng.choice(list(self.known.values()))
        self.talk.say(self.teller.ask(fact), fact.answer, True, fact.kind, (fact.value,))
        self.last = None

    def ask_two(self) -> None:
        """Ask for two in one message."""
        one, two = self.rng.sample(list(self.known.values()), 2)
        asks = [self.teller.ask(one), self.teller.ask(two)]
        asks = [a if a.endswith(("?", ".")) else a + "?" for a in asks]
        self.talk.say(" ".join(asks), f"{one.answer} {two.answer}", True, "two at once", (one.value, two.value))
        self.last = None

    def ask_all(self) -> None:
        """Ask for everything."""
        said = self.rng.choice(
            [
                "What do you know about me?",
                "What did I tell you?",
                "What do you remember?",
                "Tell me everything you know.",
                "what have i told you",
            ]
        )
        known = list(self.known.values())
        self.talk.say(said, " ".join(f.answer for f in known), True, "everything", tuple(f.value for f in known))
        self.last = None

    def ask_unknown(self) -> None:
        """Ask for what nobody told."""
        known = list(self.known.values())
        told, roll = self.rng.choice(known), self.rng.random()
        if roll < 0.4:  # the same of another
            fact = self.teller.fact(told.relation)
        elif roll < 0.65:  # another of the same
            fact = self.teller.fact(of=told.slots)
        else:
            fact = self.teller.fact()
        if (
            fact.topic not in self.known
            and not any(fact.asked == f.asked for f in known)
            and not _answered(fact, known)
        ):
            self.talk.say(fact.asked, NOT_TOLD, True, "not told")
        self.last = None

    def chat(self) -> None:
        """Small talk."""
        self.talk.say(*small_talk(self.rng, self.teller.words))
        self.last = None


#: Facts that answer a question for the other as well.
_ANSWERS_TOO = {
    "birthday": {"year"},
    "year": {"birthday"},
    "likes": {"hobby"},
    "hobby": {"likes"},
    "day": {"when"},
    "room": {"where"},
    "where": {"room"},
    "the": {"remember", "own"},
    "remember": {"the", "own"},
    "own": {"remember", "the"},
    "relative": {"named"},
    "named": {"relative"},
}


def _answered(fact: Fact, known: list[Fact]) -> bool:
    """Whether a fact that was told may be taken for the answer to this one's question."""
    alike = _ANSWERS_TOO.get(fact.kind, set())
    return any(
        f.kind in alike and f.slots.get("a") == fact.slots.get("a") and f.slots["you"] == fact.slots["you"]
        for f in known
    )


def _ended(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else text + "."


def told_first(course: Course, length_tokens: int, count_tokens) -> Course:  # type: ignore[no-untyped-def]
    """A conversation in the strictest order: facts, some corrected, small talk up to the length, and all questions at
    the end."""
    rng, talk = course.rng, course.talk
    structured = length_tokens >= 100 and rng.random() < 0.3
    tools = Tools(course) if structured and rng.random() < 0.5 else None
    if tools:
        talk.tools = tools.described()
    wanted = rng.randint(1, max(1, min(8, length_tokens // 40)))
    while len(course.known) < wanted and count_tokens(talk.messages) < max(20, length_tokens * 0.6):
        course.tell(rng.choice((1, 1, 1, 2, 3)) if length_tokens > 100 else 1)
        if rng.random() < 0.2 and course.known:
            course.correct()
    while count_tokens(talk.messages) < length_tokens - 20 * len(course.known):
        course.chat()
    asks = list(course.known.values())
    rng.shuffle(asks)
    for fact in asks:
        course.ask(fact)
    if rng.random() < 0.2:
        course.ask_unknown()
    if len(asks) > 1 and rng.random() < 0.2:
        course.ask_two()
    if tools:
        tools.call()
    elif structured:
        wanted_as_json(course)
    return course


def conversation(
    rng: random.Random,
    length_tokens: int,
    count_tokens,
    held_out_only: bool = False,
    structured: bool = False,
    teller: Teller | None = None,
) -> Conversation:  # type: ignore[no-untyped-def]
    """A conversation of about `length_tokens` that asks for every fact it told.

    `count_tokens(messages)` returns the length of the rendered messages in tokens. Most facts are told early; some
    questions come soon, the last ones after the small talk. structured: with JSON and tools among them.
    """
    course = Course(teller or Teller(rng, held_out_only))
    talk = course.talk
    tools = Tools(course) if structured and rng.random() < 0.4 else None
    if tools:
        talk.tools = tools.described()
    if rng.random() < 0.2:
        talk.messages.append(
            {
                "role": "system",
                "content": rng.choice(
                    [
                        "You are a helpful assistant.",
                        "Be brief.",
                        "Answer in one sentence.",
                        "You are a friendly assistant.",
                    ]
                ),
            }
        )
    chatty = rng.random() ** 2 * 0.5 if length_tokens < 300 else rng.random() * 0.95
    n_facts = rng.randint(1, max(2, min(10, length_tokens // 40)))
    reserve = 0
    while True:
        used = count_tokens(talk.messages) + (60 if tools else 0)
        reserve = 24 * min(len(course.known), 6)
        if used >= length_tokens - reserve - 20 and course.known:
            break
        if not course.known or (len(course.known) < n_facts and rng.random() < 0.35):
            course.tell(rng.choice((1, 1, 1, 1, 2, 2, 3)))
            continue
        if rng.random() < chatty:
            course.chat()
            continue
        roll = rng.random()
        if roll < (0.38 if course.last else 0.08):
            course.correct()
        elif roll > 0.85:
            course.ask_unknown()
        elif roll < 0.35 and len(course.known) > 1:
            course.ask_two()
        elif roll < 0.37 and len(course.known) < 4:
            course.ask_all()
        elif roll < 0.56 and structured:
            if tools and rng.random() < 0.6:
                tools.call()
            else:
                wanted_as_json(course)
        else:
            course.ask()
    asks = list(course.known.values())
    rng.shuffle(asks)
    for fact in asks:
        course.ask(fact)
        if rng.random() < 0.12:
            course.ask_unknown()
    return talk
