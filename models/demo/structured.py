"""Facts in the forms that programs read: a JSON object of what was told, and calls of tools with arguments from the
conversation.

JSON is written as `json.dumps` writes it, on one line: the worker's grammars allow that form, and a schema's keys lead
the model. Keys and tools are made of any words, so that names never seen work too.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

from phrasing import capitalised
from phrasings import AS_JSON, KEYS_AS_JSON, pick
from words import Words

if TYPE_CHECKING:
    from conversations import Course
    from teller import Fact

_UNKNOWN_KEYS = "email phone city age name job address company country pet colour date time code number".split()


def _camel(key: str) -> str:
    first, *rest = key.split("_")
    return first + "".join(p.capitalize() for p in rest)


def _as_json_value(rng: random.Random, value: str) -> Any:
    return (
        int(value)
        if value.isascii() and value.isdigit() and (len(value) == 1 or value[0] != "0") and rng.random() < 0.6
        else value
    )


def _keyed(rng: random.Random, known: list[Fact], words: Words) -> dict[str, Any]:
    """Some of the facts by key, at times with one that nobody told."""
    chosen = rng.sample(known, rng.randint(1, min(4, len(known))))
    camel = rng.random() < 0.15
    made: dict[str, Any] = {}
    for fact in chosen:
        assert fact.relation is not None
        key = rng.choice(fact.relation.keys).format(**fact.slots).replace(" ", "_")
        made.setdefault(_camel(key) if camel else key, _as_json_value(rng, fact.value))
    told = {k for f in known for key in f.relation.keys for k in [key.format(**f.slots)]}  # type: ignore[union-attr]
    if rng.random() < 0.1:
        key = rng.choice([*_UNKNOWN_KEYS, words.invented()])
        if key not in told:
            made.setdefault(key, "unknown")
    items = list(made.items())
    rng.shuffle(items)
    return dict(items)


def in_values(text: str) -> list[bool]:
    """Of each character of a JSON object, or of a call of a tool, whether it belongs to a value (the tool's name is
    one)."""
    inside, after_colon, quoted = [], False, False
    for character in text:
        if character == '"':
            quoted = not quoted
        elif not quoted and character in ":,{}":
            after_colon = character == ":"
        belongs = character != '"' and after_colon and (quoted or character not in " :")
        inside.append(belongs)
    return inside


def wanted_as_json(course: Course) -> None:
    """Ask for some of what holds as JSON."""
    rng = course.rng
    made = _keyed(rng, list(course.known.values()), course.teller.words)
    if rng.random() < 0.5:
        shown = list(made)
        listed = ", ".join(shown[:-1]) + " and " + shown[-1] if len(shown) > 1 else shown[0]
        wish = pick(rng, KEYS_AS_JSON, course.teller.held_out_only)
        wish = wish.replace("{}", listed.replace("_", " ") if rng.random() < 0.5 else listed)
    else:
        wish = pick(rng, AS_JSON, course.teller.held_out_only)
    if rng.random() < 0.15:
        made = {rng.choice(["person", "user", "data", "details", "result", "profile"]): made}
    course.talk.say(wish, json.dumps(made, ensure_ascii=False), True, "JSON")
    course.last = None


_VERBS = (
    "get find book send create cancel set order search check play open close delete update show add buy call start "
    "stop make read list"
).split()
_NOUNS = (
    "weather table taxi flight email reminder alarm timer ticket room song pizza appointment meeting message note "
    "invoice package light "
    "door time news price temperature traffic event task account user file report hotel train film book order payment"
).split()
_ASKED_NOUNS = "weather time temperature news price traffic forecast status".split()
#: name of the argument: how it is said, and what draws it
_ARGUMENTS: dict[str, tuple[tuple[str, ...], Any]] = {
    "city": (("in {}", "for {}"), Words.place),
    "location": (("in {}", "for {}", "at {}"), Words.place),
    "place": (("in {}", "at {}"), Words.place),
    "name": (("for {}", "with the name {}", "under the name {}"), Words.person),
    "person": (("for {}", "with {}"), Words.person),
    "to": (("to {}",), Words.person),
    "recipient": (("to {}",), Words.person),
    "time": (("at {}", "for {}"), Words.time),
    "date": (("on {}", "for {}"), Words.date),
    "day": (("on {}",), Words.date),
    "room": (("in room {}",), Words.room),
    "email": (("to {}",), Words.email),
    "code": (("with the code {}", "with code {}"), Words.code),
    "number": (("with the number {}", "number {}"), lambda w: w.digits(1, 5)),
    "title": (("called {}", "with the title {}"), lambda w: w.cased(w.invented())),
    "amount": (("of {}", "for {}"), Words.price),
    "people": (("for {} people",), lambda w: w.digits(1, 2)),
    "guests": (("for {} guests",), lambda w: w.digits(1, 2)),
    "id": (("with the id {}", "with id {}"), Words.code),
    "query": (("about {}", "for {}"), lambda w: w.anything()),
}
_MINE = {
    "city": "home",
    "location": "home",
    "place": "home",
    "name": "name",
    "person": "name",
    "email": "email",
    "phone": "number",
}
_SAID_OF_MINE = {
    "home": ("where I live", "in my city", "for my city", "at my place", "for my home"),
    "name": ("for me", "under my name", "in my name"),
    "email": ("to my email", "to me"),
    "number": ("for my phone number", "with my number"),
}


def _said_alike(one: str, other: str) -> bool:
    """Whether a wish may say both in the same words, so that nobody could tell which is which."""
    if one not in _ARGUMENTS or other not in _ARGUMENTS:
        return one == other
    return bool({*_ARGUMENTS[one][0]} & {*_ARGUMENTS[other][0]})


class Tools:
    """The tools of one conversation, and the user's wishes that call them."""

    def __init__(self, course: Course) -> None:
        self.course, self.rng, self.words = course, course.rng, course.teller.words
        self._tools: list[tuple[str, str, str, list[str]]] = []  # name, verb, noun, arguments
        nouns: set[str] = set()
        for _ in range(self.rng.choice((1, 1, 2, 2, 3))):
            noun = self.rng.choice(_NOUNS + _ASKED_NOUNS) if self.rng.random() < 0.75 else self.words.invented()
            if noun not in nouns:
                nouns.add(noun)
                verb = "get" if noun in _ASKED_NOUNS and self.rng.random() < 0.8 else self.rng.choice(_VERBS)
                styled = self.rng.random()
                name = f"{verb}_{noun}" if styled < 0.75 else verb + noun.capitalize() if styled < 0.87 else noun
                self._tools.append((name, verb, noun, self._drawn()))

    def _drawn(self) -> list[str]:
        count = self.rng.choice((1, 1, 1, 2, 2, 3))
        drawn: list[str] = []
        while len(drawn) < count:
            name = self.rng.choice([*_ARGUMENTS, self.words.invented()])
            if not any(_said_alike(name, other) for other in drawn):
                drawn.append(name)
        return drawn

    def described(self) -> list[dict[str, Any]]:
        """As OpenAI describes functions."""
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": self.rng.choice(
                        ["", f"{capitalised(verb)} the {noun}.", f"{capitalised(verb)} a {noun}"]
                    ),
                    "parameters": {
                        "type": "object",
                        "properties": {a: {"type": "string"} for a in arguments},
                        "required": arguments,
                    },
                },
            }
            for name, verb, noun, arguments in self._tools
        ]

    def call(self) -> None:
        """A wish, the call, what the tool says, and the answer."""
        rng, course = self.rng, self.course
        name, verb, noun, arguments = rng.choice(self._tools)
        parts: list[str] = []
        made: dict[str, Any] = {}
        for argument in arguments:
            said, value = self._argument(argument)
            made[argument] = _as_json_value(rng, value)
            if said:
                parts.append(said)
        rng.shuffle(parts)
        told = " ".join(parts)
        if verb == "get" and noun in _ASKED_NOUNS and rng.random() < 0.6:
            wish = (
                rng.choice(
                    [
                        "What is the {}",
                        "How is the {}",
                        "What's the {}",
                        "Tell me the {}",
                        "what is the {} like",
                        "Give me the {}",
                        "I need the {}",
                    ]
                ).format(noun)
                + f" {told}"
                + rng.choice(["?", "?", ""])
            )
        else:
            article = rng.choice(["a", "the", "the", "my", ""])
            opening = rng.choice(["", "", "please ", "can you ", "I want you to ", "could you ", "now ", "hi, "])
            wish = (
                capitalised(f"{opening}{verb} {article} {noun}".replace("  ", " "))
                + f" {told}"
                + rng.choice([".", ".", "", "!"])
            )
        wish = wish.replace(" ?", "?").replace(" .", ".").replace(" !", "!").strip()
        spelled = (
            f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(made, ensure_ascii=False)}}}\n</tool_call>'
        )
        course.talk.say(wish, spelled, True, "tool call")
        if rng.random() < 0.7:
            result = self._result()
            course.talk.messages.append({"role": "tool", "content": result})
            course.talk.messages.append({"role": "assistant", "content": f"The result is {result}."})
            course.talk.recalls.append(len(course.talk.messages) - 1)
            course.talk.kinds.append("tool result")
            course.talk.values.append([result])
        course.last = None

    def _argument(self, name: str) -> tuple[str, str]:
        """`(how the wish says it, its value)`; nothing is said of what was told before."""
        rng, known = self.rng, list(self.course.known.values())
        for fact in known:
            assert fact.relation is not None
            mine = fact.slots.get("I") == "I"
            if mine and fact.kind == _MINE.get(name) and rng.random() < 0.8:
                return rng.choice(("", *_SAID_OF_MINE[fact.kind])), fact.value
            if mine and name in [k.format(**fact.slots) for k in fact.relation.keys]:
                return rng.choice(("", f"with my {name}")), fact.value
        ways, draw = _ARGUMENTS.get(
            name,
            (("with {name} {}", "with the {name} {}", "{name} {}", "and the {name} is {}"), lambda w: w.anything()),
        )
        value = draw(self.words)
        return rng.choice(ways).replace("{name}", name).replace("{}", value), value

    def _result(self) -> str:
        rng, word = self.rng, self.words
        if rng.random() < 0.6:
            return json.dumps(
                {
                    rng.choice([*_ASKED_NOUNS, "result", "status", "value", word.invented()]): _as_json_value(
                        rng, word.anything()
                    )
                }
            )
        return rng.choice([word.anything(), "done", "ok", f"{word.digits(1, 2)} degrees"])
