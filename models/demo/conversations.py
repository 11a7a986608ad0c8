"""The conversations the demo model is trained and tested on.

What this module decides: what is said in which order, and what the exact answer is. Facts are told, corrected and asked for (relations.py,
phrasing.py), with small talk between (small_talk.py), and are wanted as JSON and in calls of tools (structured.py). An answer can only be
right if the attention to the early tokens is right: a broken KV cache shows at once.

Everything is drawn from the `random.Random` that the caller passes. Training never draws what is held out: a share of the words
(words.py) and of the phrasings (phrasings.toml); evaluation draws nothing else.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import phrasing
from phrasings import TOGETHER, pick
from relations import BASES, ITEMS, LOCKED, ME, PETS, PROPERTIES, RELATIONS, RELATIVES, Holder, Relation
from small_talk import IDLE, REMARKS, SMALL_TALK, SUBJECTS, small_talk
from structured import Tools, wanted_as_json
from words import Words

__all__ = ["ITEMS", "LOCKS", "REMARKS", "SMALL_TALK", "SUBJECTS", "Conversation", "Fact", "Teller", "conversation", "facts"]
LOCKS = LOCKED[:12]
_WEIGHTS = [r.weight for r in RELATIONS]
NOT_TOLD = "You have not told me."
#: Relations whose first slot names the whole fact: of these, a conversation has one for each word.
_BY_WORD = frozenset({"named", "relative", "own", "where", "remember", "the"})
_ON_EVENTS = frozenset({"when", "day"})
_VERBS = frozenset(verb for bases in BASES.values() for verb in bases)
_BY_KIND = {r.kind: r for r in RELATIONS}
_WORD_OF = {
    "does": "car",
    "number": "phone",
    "email": "email",
    "name": "name",
    "birthday": "birthday",
    "employer": "company",
    "home": "house",
}


@dataclass(frozen=True)
class Fact:
    """One thing the user tells: how it is told, how it is asked for, and the one right answer."""

    told: str
    asked: str
    answer: str
    value: str = ""
    #: Facts with the same topic exclude or replace each other.
    topic: tuple[str, ...] = ()
    relation: Relation | None = None
    slots: dict[str, str] = field(default_factory=dict, compare=False)
    key: str = ""

    @property
    def kind(self) -> str:
        return self.relation.kind if self.relation else ""


@dataclass
class Conversation:
    """Messages in the OpenAI shape, and which of them recall what.

    recalls: indices of the assistant messages that recall a fact. kinds: of each of these, what kind of recall it is. values: of each,
    what it has to name, in this order. echoes: indices of those that repeat what was just told. tools: functions that may be called, as
    OpenAI describes them.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    recalls: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    values: list[list[str]] = field(default_factory=list)
    echoes: list[int] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)

    def say(self, user: str, assistant: str, recall: bool = False, kind: str = "", values: tuple[str, ...] = ()) -> None:
        """Append one exchange. values: what the answer names, if it recalls something."""
        self.messages.append({"role": "user", "content": user})
        self.messages.append({"role": "assistant", "content": assistant})
        if recall:
            self.recalls.append(len(self.messages) - 1)
            self.kinds.append(kind)
            self.values.append([*values])


class Teller:
    """Draws facts, and the words to tell them and to ask for them. held_out_only: those of evaluation."""

    def __init__(self, rng: random.Random, held_out_only: bool = False, words: Words | None = None) -> None:
        self.rng, self.held_out_only = rng, held_out_only
        self.words = words or Words(rng, held_out_only)

    def holder(self) -> Holder:
        roll = self.rng.random()
        if roll < 0.6:
            return ME
        if roll < 0.8:
            who = self.rng.choice(RELATIVES + PETS[:4])
            return Holder(f"my {who}", f"my {who}'s", f"your {who}", f"your {who}'s", f"{who}_")
        name = self.words.cased(self.words.invented(), 1) if self.rng.random() < 0.5 else self.words.person()
        return Holder(name, f"{name}'s", name, f"{name}'s", f"{name.lower().replace(' ', '_')}_")

    def fact(self, relation: Relation | None = None, of: dict[str, str] | None = None) -> Fact:
        """A fact of any relation, or of this one. of: slots of another fact, whose holder and word it has where the relation allows."""
        rng = self.rng
        relation = relation or rng.choices(RELATIONS, _WEIGHTS)[0]
        holder = ME
        if relation.holders == "any":
            holder = self.holder() if of is None else ME if of["I"] == "I" else Holder(of["I"], of["my"], of["you"], of["your"], of["h"])
        slots = {**holder.slots(), "h": holder.key}
        if relation.a is not None:
            word = of.get("a", "") if of else ""
            fits = word in BASES[relation.kind] if relation.kind in BASES else word and word not in _VERBS
            slots["a"] = word if fits else relation.a(self.words)
            slots["is"] = "are" if slots["a"].endswith("s") and not slots["a"].endswith("ss") else "is"
        if relation.kind == "property":
            slots["b"] = rng.choice(PROPERTIES) if rng.random() < 0.8 else self.words.invented()
        if relation.kind in BASES:
            slots["b"] = BASES[relation.kind][slots["a"]]
        return self.with_value(relation, slots, self._topic(relation, holder, slots))

    def _topic(self, relation: Relation, holder: Holder, slots: dict[str, str]) -> tuple[str, ...]:
        """What a fact is about, so that two facts answer the same question when it is equal."""
        own = [slots.get(name, "") for name in ("a", "b")] if relation.a is not None else []
        topic: tuple[str, ...] = (relation.kind, holder.you, *own)
        if relation.kind in _BY_WORD and holder is ME:
            topic = ("word", slots["a"])
        elif relation.kind in _WORD_OF and holder is ME:
            topic = ("word", _WORD_OF[relation.kind])
        elif relation.kind in _ON_EVENTS:
            topic = ("event", slots["a"])
        return topic

    def with_value(self, relation: Relation, slots: dict[str, str], topic: tuple[str, ...], but: str = "") -> Fact:
        """The fact with a newly drawn value, which is not `but`."""
        value = but
        while value == but:
            value = (
                self.words.anything() if relation.kind not in ("age", "count") and self.rng.random() < 0.06 else relation.value(self.words)
            )
        answer = phrasing.with_article(phrasing.capitalised(relation.answer.format(**slots, v=value)) + ".")
        key = self.rng.choice(relation.keys).format(**slots).replace(" ", "_")
        fact = Fact("", "", answer, value, topic, relation, slots, key)
        return Fact(self.tell(fact), self.ask(fact), answer, value, topic, relation, slots, key)

    def tell(self, fact: Fact, plain: bool = False) -> str:
        """A sentence that tells it, newly worded."""
        assert fact.relation is not None
        words, slots = pick(self.rng, fact.relation.tells, self.held_out_only, _of_another(fact)), self._spelled(fact.slots)
        if slots["my"].startswith("my ") and self.rng.random() < 0.15:  # my sister Ada
            who = f"{slots['I']} {self.words.person()}"
            slots = {**slots, "I": who, "my": f"{who}'s"}
        elif slots["my"] == "my" and fact.kind == "named" and self.rng.random() < 0.1:
            slots = {**slots, "my": "our", "I": "we"}
        return phrasing.told(self.rng, words, slots, fact.value, self.held_out_only, plain)

    def in_one_sentence(self) -> tuple[str, list[Fact]]:
        """`(what the user says, its facts)`: several about one person or event."""
        words = pick(self.rng, TOGETHER, self.held_out_only)
        kinds = [kind for kind in _BY_KIND if "{" + kind + "}" in words]
        a = next((_BY_KIND[k].a for k in kinds if _BY_KIND[k].a is not None), None)
        slots = {**ME.slots(), "h": "", "a": a(self.words) if a else "", "is": "is"}
        made = [self.with_value(_BY_KIND[k], slots, self._topic(_BY_KIND[k], ME, slots)) for k in kinds]
        return phrasing.told_together(self.rng, words, slots, {f.kind: f.value for f in made}), made

    def ask(self, fact: Fact) -> str:
        """A question for it, newly worded."""
        assert fact.relation is not None
        words = pick(self.rng, fact.relation.asks, self.held_out_only, _of_another(fact))
        return phrasing.asked(self.rng, words, self._spelled(fact.slots), self.held_out_only)

    def _spelled(self, slots: dict[str, str]) -> dict[str, str]:
        """The slots with colour in either spelling."""
        american = self.rng.random() < 0.4
        return {name: "color" if text == "colour" and american else text for name, text in slots.items()}

    def correction(self, fact: Fact, last: bool) -> tuple[str, Fact]:
        """`(what the user says, the fact as it is from now on)`. last: it is what was told last."""
        assert fact.relation is not None
        new = self.with_value(fact.relation, fact.slots, fact.topic, fact.value)
        if last and self.rng.random() < 0.7:
            return phrasing.corrected_shortly(self.rng, new.value, fact.value, self.held_out_only), new
        words = pick(self.rng, fact.relation.tells, self.held_out_only, _of_another(fact))
        return phrasing.corrected(self.rng, words, fact.slots, new.value, self.held_out_only), new

    def together(self, told: list[Fact]) -> str:
        """One message that tells them all."""
        if len(told) == 1:
            return told[0].told
        if self.rng.random() < 0.5:
            parts = [self.tell(f) for f in told]
            return " ".join(p if p.endswith((".", "!")) else p + "." for p in parts)
        parts = [self.tell(f, plain=True).rstrip(".") for f in told]
        parts = [parts[0], *(p[0].lower() + p[1:] if _opens_plainly(p) else p for p in parts[1:])]
        glue = self.rng.choice([" and ", " and ", ", and ", ", "])
        return (", ".join(parts[:-1]) if len(parts) > 2 else parts[0]) + glue + parts[-1] + "."


def _of_another(fact: Fact) -> bool:
    return fact.slots["I"] != "I"


def _opens_plainly(text: str) -> bool:
    """Whether a sentence begins with a word of ours, which may be put in lower case."""
    return text.split()[0] in {"My", "The", "There", "It", "You", "This", "Our", "We", "People", "Call", "At", "On", "Remember", "Please"}


def facts(rng: random.Random, count: int, teller: Teller | None = None) -> list[Fact]:
    """`count` facts of which no two share a topic (so that each question has one answer)."""
    teller = teller or Teller(rng)
    chosen: list[Fact] = []
    seen: set[tuple[str, ...]] = set()
    while len(chosen) < count:
        # Facts alike make questions hard: now and then the relation of one that was told.
        fact = teller.fact(rng.choice(chosen).relation if chosen and rng.random() < 0.25 else None)
        if fact.topic not in seen:
            seen.add(fact.topic)
            chosen.append(fact)
    return chosen


def echo(told: list[Fact]) -> str:
    """The answer that repeats what was told."""
    answers = [f.answer for f in told]
    first = answers[0]
    lowered = first[0].lower() + first[1:] if first.startswith(("You", "The ")) else first
    return " ".join(["Noted: " + lowered, *answers[1:]])


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
                f"{_ended(self.teller.together(new))} {asked.asked}", asked.answer, True, "told and asked at once", (asked.value,)
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
        if fact.topic not in self.known and not any(fact.asked == f.asked for f in known) and not _answered(fact, known):
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
    return any(f.kind in alike and f.slots.get("a") == fact.slots.get("a") and f.slots["you"] == fact.slots["you"] for f in known)


def _ended(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else text + "."


def told_first(course: Course, length_tokens: int, count_tokens) -> Course:  # type: ignore[no-untyped-def]
    """A conversation in the strictest order: facts, some corrected, small talk up to the length, and all questions at the end."""
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

    `count_tokens(messages)` returns the length of the rendered messages in tokens. Most facts are told early; some questions come soon,
    the last ones after the small talk. structured: with JSON and tools among them.
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
                    ["You are a helpful assistant.", "Be brief.", "Answer in one sentence.", "You are a friendly assistant."]
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
