"""The conversations the demo model is trained and tested on.

What this module decides: which facts exist, how they are told and asked for, and what the exact answer is. A
conversation tells a handful of facts early, talks about other things, and asks for the facts later, so that an
answer can only be right if the attention to the early tokens is right: a broken KV cache shows at once.

Everything is drawn from the `random.Random` that the caller passes; training and evaluation use disjoint seeds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

NAMES = (
    "Ada Alan Alice Amir Anna Arthur Ben Bella Boris Carla Carlos Chloe Clara Daniel Dana David Diana Edgar Elena Ella Emil "
    "Emma Erik Eva Felix Fiona Frank George Grace Hana Hannah Henry Hugo Ida Igor Ines Iris Ivan Jack James Jane John Jonas "
    "Julia Karl Kate Kevin Lara Laura Leo Lena Liam Lily Lucas Lucy Luis Maria Marco Mark Martin Maya Max Mia Mila Mira Nadia "
    "Nina Noah Nora Olga Oliver Omar Oscar Paul Peter Petra Rita Robert Rosa Ruth Sam Sara Simon Sofia Sophie Stella Tara "
    "Theo Thomas Tim Tom Vera Victor Walter Yara Zoe"
).split()
PLACES = (
    "Athens Berlin Bern Bogota Boston Cairo Chicago Dakar Delhi Denver Dublin Geneva Hamburg Havana Helsinki Istanbul Jakarta "
    "Kyoto Lagos Lima Lisbon London Lyon Madrid Manila Milan Montreal Moscow Munich Nairobi Naples Oslo Paris Porto Prague "
    "Quito Riga Rome Seattle Seoul Seville Sydney Tokyo Toronto Tunis Turin Vienna Warsaw Zurich"
).split()
COLOURS = (
    "amber black blue bronze brown coral crimson cyan gold green grey indigo ivory lilac lime magenta maroon olive orange "
    "pink purple red scarlet silver teal turquoise violet white yellow"
).split()
ITEMS = (
    "lamp chair table clock radio camera guitar piano bicycle kettle carpet mirror jacket backpack tent telescope printer "
    "keyboard monitor blanket umbrella vase violin drum kite"
).split()
LOCKS = "garage gate office locker safe cellar attic studio library garden vault lab".split()
PETS = "dog cat parrot rabbit horse hamster turtle goat".split()
SUBJECTS = (
    "rivers mountains music trains bread coffee tea ships birds trees clouds stars maps books bridges islands castles "
    "deserts forests oceans storms volcanoes gardens markets chess painting poetry winter summer spring autumn cheese honey "
    "wool paper glass iron salt sugar spices clocks kites windmills lighthouses caves glaciers whales bees foxes owls horses"
).split()
REMARKS = (
    "They are older than most people think.",
    "There is a lot to learn about them, and it starts with looking closely.",
    "People have written about them for many centuries.",
    "They change slowly, but they never stay the same.",
    "Some are small and some are very large.",
    "You find them in almost every country of the world.",
    "They are best enjoyed with time and good company.",
    "Children often understand them better than adults do.",
)
_ONSETS = "b d f g h j k l m n p r s t v w z br dr gr kr st tr sh th".split()
_VOWELS = "a e i o u ai ea ia io".split()
_CODE_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"

SMALL_TALK = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Hello, how are you?", "I am well, thank you. How can I help you?"),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Who are you?", "I am the Upbeat demo model. Tell me some facts and ask me about them later."),
    ("What can you do?", "I remember what you tell me in this conversation. Tell me some facts and ask me about them later."),
    ("Good morning.", "Good morning! How can I help you?"),
    ("Goodbye.", "Goodbye!"),
)


@dataclass(frozen=True)
class Fact:
    """One thing the user tells: how it is told, how it is asked for, and the one right answer."""

    told: str
    asked: str
    answer: str


@dataclass
class Conversation:
    """Messages in the OpenAI shape, and the indices of those assistant messages that recall a fact."""

    messages: list[dict[str, str]] = field(default_factory=list)
    recalls: list[int] = field(default_factory=list)

    def say(self, user: str, assistant: str, recall: bool = False) -> None:
        """Append one exchange."""
        self.messages.append({"role": "user", "content": user})
        self.messages.append({"role": "assistant", "content": assistant})
        if recall:
            self.recalls.append(len(self.messages) - 1)


def invented_name(rng: random.Random) -> str:
    """A name no list contains, so that copying is learned and not a list of names."""
    syllables = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(2)]
    return ("".join(syllables) + rng.choice(["", "", "n", "s", "r", "l"])).capitalize()


def person(rng: random.Random) -> str:
    """A name from the list four times out of five, an invented one otherwise."""
    return rng.choice(NAMES) if rng.random() < 0.8 else invented_name(rng)


def place(rng: random.Random) -> str:
    """A place from the list, or now and then an invented one."""
    return rng.choice(PLACES) if rng.random() < 0.85 else invented_name(rng)


def code(rng: random.Random) -> str:
    """Four to six characters: digits mostly, else letters and digits."""
    n = rng.randint(4, 6)
    alphabet = "0123456789" if rng.random() < 0.75 else _CODE_LETTERS + "0123456789"
    return "".join(rng.choice(alphabet) for _ in range(n))


def _my_name(rng: random.Random) -> Fact:
    v = person(rng)
    told = rng.choice([f"My name is {v}.", f"I am called {v}.", f"My name is {v}.", f"I am {v}.", f"Hi, my name is {v}."])
    return Fact(told, rng.choice(["What is my name?", "What is my name?", "Who am I?"]), f"Your name is {v}.")


def _my_place(rng: random.Random) -> Fact:
    v = place(rng)
    told = rng.choice([f"I live in {v}.", f"I live in {v}.", f"My home is in {v}."])
    return Fact(told, rng.choice(["Where do I live?", "Where is my home?"]), f"You live in {v}.")


def _my_colour(rng: random.Random) -> Fact:
    v = rng.choice(COLOURS)
    told = rng.choice([f"My favourite colour is {v}.", f"The colour I like best is {v}."])
    return Fact(told, rng.choice(["What is my favourite colour?", "Which colour do I like best?"]), f"Your favourite colour is {v}.")


def _my_pet(rng: random.Random) -> Fact:
    p, v = rng.choice(PETS), person(rng)
    return Fact(
        rng.choice([f"My {p} is called {v}.", f"I have a {p} called {v}."]),
        rng.choice([f"What is my {p} called?", f"What is the name of my {p}?"]),
        f"Your {p} is called {v}.",
    )


def _other_place(rng: random.Random) -> Fact:
    w, v = person(rng), place(rng)
    return Fact(f"{w} lives in {v}.", f"Where does {w} live?", f"{w} lives in {v}.")


def _other_colour(rng: random.Random) -> Fact:
    w, v = person(rng), rng.choice(COLOURS)
    return Fact(
        rng.choice([f"{w} likes {v}.", f"The favourite colour of {w} is {v}."]),
        rng.choice([f"Which colour does {w} like?", f"What is the favourite colour of {w}?"]),
        f"{w} likes {v}.",
    )


def _lock_code(rng: random.Random) -> Fact:
    lock, v = rng.choice(LOCKS), code(rng)
    return Fact(
        rng.choice([f"The code of the {lock} is {v}.", f"The {lock} has the code {v}."]),
        rng.choice([f"What is the code of the {lock}?", f"Which code does the {lock} have?"]),
        f"The code of the {lock} is {v}.",
    )


def _order(rng: random.Random) -> Fact:
    item, v = rng.choice(ITEMS), code(rng)
    return Fact(
        rng.choice([f"My order number for the {item} is {v}.", f"I ordered a {item}, order number {v}."]),
        rng.choice([f"What is my order number for the {item}?", f"Which order number does the {item} have?"]),
        f"Your order number for the {item} is {v}.",
    )


_KINDS = (_my_name, _my_place, _my_colour, _my_pet, _other_place, _other_place, _other_colour, _lock_code, _order)


def facts(rng: random.Random, count: int) -> list[Fact]:
    """`count` facts of which no two share a question or answer form (so that each question has one answer)."""
    chosen: list[Fact] = []
    seen: set[str] = set()
    while len(chosen) < count:
        fact = rng.choice(_KINDS)(rng)
        stem = fact.answer.rsplit(" ", 1)[0]  # the answer without its value
        if stem not in seen:
            seen.add(stem)
            chosen.append(fact)
    return chosen


def _acknowledge(rng: random.Random) -> str:
    return rng.choice(["Noted.", "Okay, I will remember that.", "Thank you, noted."])


def _filler(rng: random.Random, conversation: Conversation) -> None:
    if rng.random() < 0.2:
        conversation.say(*rng.choice(SMALL_TALK))
        return
    subject = rng.choice(SUBJECTS)
    ask = rng.choice([f"Tell me about {subject}.", f"What do you know about {subject}?", f"Let us talk about {subject}."])
    # The remarks follow from the subject, so that this part is learned quickly and leaves the capacity to recall.
    start = SUBJECTS.index(subject)
    count = rng.randint(1, 3)
    wish = {1: "", 2: " Say a little more than usual.", 3: " Take your time."}[count]
    remarks = " ".join(REMARKS[(start + i) % len(REMARKS)] for i in range(count))
    conversation.say(ask + wish, f"I like to talk about {subject}. {remarks}")


def conversation(rng: random.Random, length_tokens: int, count_tokens) -> Conversation:  # type: ignore[no-untyped-def]
    """A conversation of about `length_tokens` that asks for every fact it told.

    `count_tokens(messages)` returns the length of the rendered messages in tokens. Facts are told in the first
    exchanges; some questions come soon, the last ones after the filler.
    """
    talk = Conversation()
    n_facts = max(1, min(rng.randint(2, 7), length_tokens // 40))
    told = facts(rng, n_facts)
    if rng.random() < 0.12:  # a first message that tells and asks at once
        first = told[0]
        talk.say(f"{first.told} {first.asked}", first.answer, recall=True)
    i = 0
    while i < len(told):
        group = told[i : i + rng.choice([1, 1, 2, 3])]
        talk.say(" ".join(f.told for f in group), _acknowledge(rng))
        i += len(group)
        if rng.random() < 0.25:
            fact = rng.choice(told[:i])
            talk.say(fact.asked, fact.answer, recall=True)
    asks = told[:]
    rng.shuffle(asks)
    reserve = 26 * len(asks)
    while count_tokens(talk.messages) < length_tokens - reserve - 30:
        _filler(rng, talk)
        if rng.random() < 0.15:
            fact = rng.choice(told)
            talk.say(fact.asked, fact.answer, recall=True)
    for fact in asks:
        talk.say(fact.asked, fact.answer, recall=True)
    return talk
