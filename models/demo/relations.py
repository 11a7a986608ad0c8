"""What can be told: each relation's answer, values and names in JSON. The ways to tell it and to ask for it are in
phrasings.toml.

A phrasing has slots: {v} the value; {my}, {me}, {I}, {am}, {have}, {do}, {s} the holder of the fact, as the user speaks
of it; {your}, {you}, {are} as the assistant does; {a} and {b} further words, such as the pet's kind; {is}: is or are,
by {a}. An answer has one form, so that one text is right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phrasings import ASKS, TELLS
from words import COLOURS, COMMON_THINGS, FOODS, HOBBIES, JOBS, LANGUAGES, THINGS, Words


@dataclass(frozen=True)
class Holder:
    """Whom or what a fact is about, as the user and as the assistant speak of it. `key`: how JSON names it."""

    I: str  # noqa: E741
    my: str
    you: str
    your: str
    key: str = ""

    def slots(self) -> dict[str, str]:
        me = self.I == "I"
        forms = (
            {"am": "am", "have": "have", "do": "do", "s": "", "are": "are", "me": "me"}
            if me
            else {"am": "is", "have": "has", "do": "does", "s": "s", "are": "is", "me": self.I}
        )
        return {"I": self.I, "my": self.my, "you": self.you, "your": self.your, **forms}


ME = Holder("I", "my", "you", "your")
RELATIVES = (
    "sister brother mother father mum dad wife husband son daughter uncle aunt cousin boss friend neighbour "
    "teacher doctor girlfriend "
    "boyfriend partner grandmother grandfather colleague roommate nephew niece flatmate manager coach"
).split()
PETS = (
    "dog cat parrot rabbit horse hamster turtle goat puppy kitten bird fish goldfish snake lizard pony "
    "cow pig duck chicken mouse"
).split()
NAMED = [*PETS, *"boat car company band village school team baby robot street ship project house bike".split()]
FAVOURITES = (
    "colour food drink book film movie song band city country animal fruit sport game number season dish flower "
    "tree artist "
    "author subject dessert singer place hobby language team restaurant"
).split()
OF_PEOPLE = (
    "nickname surname title password pin size hero secret nationality team school car bike doctor dentist hotel flight "
    "address street postcode username email phone shoe seat star password goal dream instrument"
).split()
OF_TWO_WORDS = (
    "flight number|account number|lucky number|middle name|last name|shoe size|postal code|blood type|home "
    "address|best friend|room number|"
    "code word|user name|locker number|seat number|customer number|tax number|day off|star sign|credit card"
).split("|")
LOCKED = (
    "garage gate office locker safe cellar attic studio library garden vault lab door house alarm bike shed building"
).split()
ITEMS = (
    "lamp chair table clock radio camera guitar piano bicycle kettle carpet mirror jacket backpack tent telescope "
    "printer keyboard monitor "
    "blanket umbrella vase violin drum kite"
).split()
PROPERTIES = (
    "code password pin price name colour size number owner address weight height key version status length id".split()
)
OBJECTS = [
    *ITEMS,
    *"wifi router server project file order ticket flight train hotel report package parcel account phone laptop "
    "project contract".split(),
]
EVENTS = (
    "anniversary holiday vacation deadline reunion trial show meeting party wedding exam interview concert "
    "appointment lesson "
    "dinner lunch call flight train class game match ceremony conference workshop"
).split()
LOST = (
    "keys wallet phone glasses passport book bag umbrella laptop tickets camera charger hat shoes gloves ring".split()
)
#: What people do to things, and where they go: past form, base form.
DONE = (
    "ate:eat bought:buy saw:see met:meet read:read watched:watch lost:lose found:find sold:sell cooked:cook "
    "played:play studied:study "
    "ordered:order made:make drank:drink built:build painted:paint learned:learn won:win broke:break wrote:write "
    "wore:wear visited:visit "
    "called:call fixed:fix stole:steal"
).split()
GONE = "went:go flew:fly travelled:travel drove:drive walked:walk moved:move sailed:sail cycled:cycle ran:run".split()
#: A verb's base form, by the relation that uses it and its past form.
BASES = {
    kind: dict(pair.split(":") for pair in listed) for kind, listed in (("done", DONE), ("wish", DONE), ("gone", GONE))
}
COUNTED = (
    "brothers sisters children cats dogs books cars bikes plants apples chairs guitars friends houses "
    "eggs tickets stamps coins"
).split()
KINDS_OF = "lucky secret new old first last main next big little second other real best home work".split()
REMEMBERED = "number word code name date password address phrase colour city time letter sentence".split()


@dataclass(frozen=True)
class Relation:
    """One kind of fact. keys: names that JSON may give its value, with slots. holders: who may have it, me or any. `a`
    draws that slot."""

    kind: str
    answer: str
    value: Callable[[Words], str]
    keys: tuple[str, ...]
    holders: str = "me"
    a: Callable[[Words], str] | None = None
    weight: float = 1.0

    @property
    def tells(self) -> tuple[str, ...]:
        return TELLS[self.kind]

    @property
    def asks(self) -> tuple[str, ...]:
        return ASKS[self.kind]


def _open_word(words: Words) -> str:
    rng = words.rng
    word = (
        rng.choice(OF_PEOPLE)
        if rng.random() < 0.4
        else rng.choice(COMMON_THINGS)
        if rng.random() < 0.4
        else words.invented()
    )
    if rng.random() < 0.1:
        word = rng.choice(OF_TWO_WORDS)
    return f"{rng.choice(KINDS_OF) if rng.random() < 0.6 else words.invented()} {word}" if rng.random() < 0.15 else word


def _listed(listed: list[str]) -> Callable[[Words], str]:
    """One of the list, which training sees whole; now and then an invented word."""
    return lambda w: w.rng.choice(listed) if w.rng.random() < 0.85 else w.invented()


def _open(listed: list[str]) -> Callable[[Words], str]:
    return lambda w: w.thing(listed)


RELATIONS = (
    Relation(
        "name",
        "your name is {v}",
        Words.person,
        ("name", "user_name", "first_name", "full_name", "user", "username", "customer"),
        weight=2.5,
    ),
    Relation(
        "named",
        "{your} {a} is called {v}",
        Words.pet,
        ("{h}{a}_name", "{h}{a}", "{h}pet_name", "{h}name_of_{a}", "{h}pet"),
        "any",
        a=_listed(NAMED),
        weight=2.0,
    ),
    Relation("relative", "your {a} is called {v}", Words.person, ("{a}_name", "{a}"), a=_listed(RELATIVES), weight=1.3),
    Relation(
        "home",
        "{you} live{s} in {v}",
        Words.place,
        ("{h}city", "{h}home", "{h}location", "{h}town", "{h}residence", "{h}place"),
        "any",
        weight=1.5,
    ),
    Relation(
        "origin", "{you} {are} from {v}", Words.place, ("{h}origin", "{h}from", "{h}birthplace", "{h}hometown"), "any"
    ),
    Relation(
        "job",
        "{you} work{s} as a {v}",
        _open(JOBS),
        ("{h}job", "{h}occupation", "{h}profession", "{h}work", "{h}role", "{h}job_title"),
        "any",
        weight=1.3,
    ),
    Relation("employer", "{you} work{s} for {v}", Words.company, ("{h}employer", "{h}company", "{h}workplace"), "any"),
    Relation(
        "age",
        "{you} {are} {v} years old",
        lambda w: w.digits(1, 2),
        ("{h}age", "{h}years", "{h}age_years"),
        "any",
        weight=1.2,
    ),
    Relation("birthday", "{your} birthday is {v}", Words.date, ("{h}birthday", "{h}date_of_birth", "{h}born"), "any"),
    Relation(
        "favourite",
        "{your} favourite {a} is {v}",
        lambda w: w.thing(COLOURS + FOODS + HOBBIES + THINGS) if w.rng.random() < 0.8 else w.anything(),
        ("{h}favourite_{a}", "{h}favorite_{a}", "{h}{a}", "{h}preferred_{a}"),
        "any",
        a=_listed(FAVOURITES),
        weight=2.0,
    ),
    Relation(
        "likes", "{you} like{s} {v}", _open(FOODS + HOBBIES + COLOURS), ("{h}likes", "{h}loves", "{h}interest"), "any"
    ),
    Relation(
        "dislikes",
        "{you} dislike{s} {v}",
        _open(FOODS + HOBBIES + COLOURS),
        ("{h}dislikes", "{h}hates"),
        "any",
        weight=0.6,
    ),
    Relation("hobby", "{your} hobby is {v}", _open(HOBBIES), ("{h}hobby", "{h}pastime", "{h}hobbies"), "any"),
    Relation(
        "allergy", "{you} {are} allergic to {v}", _open(FOODS), ("{h}allergy", "{h}allergic_to", "{h}allergies"), "any"
    ),
    Relation(
        "speaks",
        "{you} speak{s} {v}",
        lambda w: w.cased(w.of(LANGUAGES) if w.rng.random() < 0.5 else w.invented()),
        ("{h}language", "{h}speaks"),
        "any",
        weight=0.6,
    ),
    Relation("does", "{you} drive{s} a {v}", Words.company, ("{h}car", "{h}vehicle"), "any", weight=0.6),
    Relation(
        "number",
        "{your} phone number is {v}",
        Words.phone,
        ("{h}phone", "{h}phone_number", "{h}telephone", "{h}mobile"),
        "any",
    ),
    Relation("email", "{your} email is {v}", Words.email, ("{h}email", "{h}email_address", "{h}mail"), weight=0.8),
    Relation("own", "{your} {a} {is} {v}", Words.anything, ("{h}{a}", "{h}my_{a}"), "any", a=_open_word, weight=2.0),
    Relation(
        "the",
        "the {a} {is} {v}",
        Words.anything,
        ("{a}", "the_{a}"),
        a=lambda w: _open_word(w) if w.rng.random() < 0.6 else w.rng.choice(REMEMBERED),
        weight=1.2,
    ),
    Relation(
        "property",
        "the {b} of the {a} is {v}",
        lambda w: w.code() if w.rng.random() < 0.7 else w.anything(),
        ("{a}_{b}", "{b}", "{b}_of_{a}"),
        a=lambda w: w.rng.choice(LOCKED + OBJECTS) if w.rng.random() < 0.85 else w.invented(),
        weight=2.0,
    ),
    Relation(
        "order",
        "your order number for the {a} is {v}",
        Words.code,
        ("order_number", "order", "{a}_order", "order_id"),
        a=_listed(ITEMS),
    ),
    Relation(
        "remember",
        "the {a} is {v}",
        Words.anything,
        ("{a}", "remembered_{a}"),
        a=lambda w: w.rng.choice(REMEMBERED) if w.rng.random() < 0.8 else _open_word(w),
        weight=1.5,
    ),
    Relation(
        "where",
        "your {a} {is} {v}",
        Words.spot,
        ("{a}_location", "{a}", "location"),
        a=lambda w: w.rng.choice(LOST + ITEMS) if w.rng.random() < 0.8 else w.invented(),
    ),
    Relation(
        "when",
        "the {a} is at {v}",
        Words.time,
        ("{a}_time", "time", "start", "start_time"),
        a=_listed(EVENTS),
        weight=1.3,
    ),
    Relation("day", "the {a} is on {v}", Words.date, ("{a}_date", "date", "day", "{a}_day"), a=_listed(EVENTS)),
    Relation(
        "count",
        "{you} {have} {v} {a}",
        lambda w: w.digits(1, 3),
        ("{h}{a}", "{h}number_of_{a}", "{h}{a}_count"),
        "any",
        a=lambda w: w.rng.choice(COUNTED) if w.rng.random() < 0.7 else w.invented(),
        weight=1.3,
    ),
    Relation(
        "price",
        "the {a} costs {v}",
        Words.price,
        ("{a}_price", "price", "cost", "{a}_cost"),
        a=lambda w: w.rng.choice(ITEMS) if w.rng.random() < 0.6 else w.invented(),
        weight=0.8,
    ),
    Relation(
        "done", "you {a} {v}", Words.anything, ("{a}", "{b}"), a=lambda w: w.rng.choice(DONE).split(":")[0], weight=1.3
    ),
    Relation(
        "gone",
        "you {a} to {v}",
        Words.place,
        ("destination", "{b}_to", "place"),
        a=lambda w: w.rng.choice(GONE).split(":")[0],
        weight=1.3,
    ),
    Relation(
        "wish",
        "you want to {b} {v}",
        Words.anything,
        ("wants_to_{b}", "{b}", "plan"),
        a=lambda w: w.rng.choice(DONE).split(":")[0],
    ),
    Relation("trip", "you are going to {v}", Words.place, ("destination", "trip", "travel_to")),
    Relation(
        "year",
        "you were born in {v}",
        lambda w: f"{w.rng.choice(['19', '20', '18'])}{w.rng.randint(0, 99):02d}",
        ("birth_year", "year_of_birth", "year"),
        weight=0.7,
    ),
    Relation("room", "the {a} is in room {v}", Words.room, ("room", "{a}_room", "location"), a=_listed(EVENTS)),
)
