"""Facts, and how they are told, corrected and asked for: relations.py says what there is to tell, phrasing.py how
people put it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import phrasing
from phrasings import TOGETHER, pick
from relations import BASES, ME, PETS, PROPERTIES, RELATIONS, RELATIVES, Holder, Relation
from words import Words

_WEIGHTS = [r.weight for r in RELATIONS]
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
        """A fact of any relation, or of this one. of: slots of another fact, whose holder and word it has where the
        relation allows."""
        rng = self.rng
        relation = relation or rng.choices(RELATIONS, _WEIGHTS)[0]
        holder = ME
        if relation.holders == "any":
            holder = (
                self.holder()
                if of is None
                else ME
                if of["I"] == "I"
                else Holder(of["I"], of["my"], of["you"], of["your"], of["h"])
            )
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
                self.words.anything()
                if relation.kind not in ("age", "count") and self.rng.random() < 0.06
                else relation.value(self.words)
            )
        answer = phrasing.with_article(phrasing.capitalised(relation.answer.format(**slots, v=value)) + ".")
        key = self.rng.choice(relation.keys).format(**slots).replace(" ", "_")
        fact = Fact("", "", answer, value, topic, relation, slots, key)
        return Fact(self.tell(fact), self.ask(fact), answer, value, topic, relation, slots, key)

    def tell(self, fact: Fact, plain: bool = False) -> str:
        """A sentence that tells it, newly worded."""
        assert fact.relation is not None
        words, slots = (
            pick(self.rng, fact.relation.tells, self.held_out_only, _of_another(fact)),
            self._spelled(fact.slots),
        )
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
    return text.split()[0] in {
        "My",
        "The",
        "There",
        "It",
        "You",
        "This",
        "Our",
        "We",
        "People",
        "Call",
        "At",
        "On",
        "Remember",
        "Please",
    }


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
