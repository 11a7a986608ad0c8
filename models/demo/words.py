"""The words that facts are made of: real ones, invented ones, numbers and codes; a fixed share of them is kept out of
training.

A word is held out by a hash of its letters (`held_out`), so that evaluation asks for words that no training run ever
saw. Words that the tokenizer has whole (`COMMON`) are never held out: a token that was never trained says nothing about
copying. Dates, times, rooms and numbers of one or two digits are not held out either; there are too few of them. All
are ASCII: names such as Søren or José were never trained, and are cut.
"""

from __future__ import annotations

import random
import string
import zlib

NAMES = (
    "Ada Adam Agnes Alan Alice Amir Amy Anna Arthur Astrid Ben Bella Bob Boris Carla Carlos Chen Chloe Clara "
    "Daniel Dana Dave David "
    "Diana Edgar Elena Ella Emil Emma Erik Eva Fatima Felix Fiona Frank George Grace Greta Hana Hannah Hassan "
    "Henry Hugo Ida Igor Ines "
    "Ingrid Iris Ivan Jack James Jane Joe John Jonas Julia Karl Kate Ken Kevin Kim Kofi Lara Laura Lee Leo Lena "
    "Liam Lily Linda Lucas "
    "Lucy Luis Magnus Maria Marco Mark Martin Mary Maya Max Mia Mike Mila Mira Mohammed Nadia Nick Nina Noah Nora "
    "Olga Oliver Omar "
    "Oscar Otto Pablo Paul Pedro Peter Petra Priya Quinn Rachel Raj Ravi Rita Robert Rosa Ruth Sam Sanjay Sara "
    "Simon Sofia Sophie "
    "Stella Steve Sven Tara Theo Thomas Tim Tom Ursula Vera Victor Wanda Walter Wei Xavier Yara Yuki Zoe Zaphod"
).split()
SURNAMES = (
    "Smith Jones Brown Miller Garcia Lopez Schmidt Weber Rossi Novak Kowalski Andersson Tanaka Singh "
    "Khan Okafor Silva Dupont Kim"
).split()
PET_NAMES = (
    "Rex Fido Bella Luna Max Buddy Whiskers Mittens Fluffy Shadow Felix Tiger Smokey Oreo Coco Daisy Rocky Milo "
    "Simba Nemo Bubbles Spot "
    "Biscuit Pepper Ginger Snowball Thumper Hazel Bruno Polly Kiwi Ziggy Pickles Waffles Mochi Socks Patch Rusty "
    "Lucky Duke Bandit Muffin"
).split()
PLACES = (
    "Athens Berlin Bern Bogota Boston Cairo Chicago Dakar Delhi Denver Dublin Geneva Hamburg Havana Helsinki "
    "Istanbul Jakarta Kyoto "
    "Lagos Lima Lisbon London Lyon Madrid Manila Milan Montreal Moscow Munich Nairobi Naples Oslo Paris Porto "
    "Prague Quito Riga Rome "
    "Seattle Seoul Seville Sydney Tokyo Toronto Tunis Turin Vienna Warsaw Zurich Oxford Leeds Bristol Texas Ohio "
    "Canada France Spain "
    "Italy Japan Brazil India Kenya Norway Poland Chile Peru Iceland Ghana Sweden Mumbai Lahore Hanoi Malmo Ghent "
    "Krakow"
).split()
COLOURS = (
    "amber black blue bronze brown coral crimson cyan gold green grey indigo ivory lilac lime magenta maroon olive "
    "orange pink purple red "
    "scarlet silver teal turquoise violet white yellow mauve beige khaki azure"
).split()
FOODS = (
    "pizza pasta sushi curry tacos ramen lasagna risotto paella burgers pancakes waffles dumplings falafel hummus "
    "noodles salad soup stew "
    "chocolate strawberries mangoes apples bananas cherries peanuts walnuts shellfish milk eggs gluten soy tofu "
    "rice potatoes mushrooms "
    "spinach olives cheese bread honey coffee tea juice cake icecream croissants pho kimchi borscht"
).split()
JOBS = (
    "baker teacher nurse doctor plumber lawyer farmer painter pilot carpenter chemist welder barber butcher tailor "
    "waiter singer dancer "
    "writer editor librarian gardener mechanic electrician accountant architect engineer programmer scientist "
    "dentist surgeon vet chef "
    "cook driver sailor soldier judge journalist photographer translator cashier florist astronaut beekeeper "
    "potter geologist "
    "firefighter"
).split()
COMPANIES = (
    "Acme Globex Initech Umbrella Siemens Nokia Google Amazon Lego Ikea Toyota Shell Bosch Philips "
    "Airbus Hooli Wonka Tesla Volvo"
).split()
HOBBIES = (
    "chess painting running climbing sailing skiing knitting gardening cooking reading hiking fishing photography "
    "pottery dancing swimming "
    "cycling surfing yoga juggling origami karate archery fencing rowing birdwatching astronomy boxing baking "
    "singing tennis"
).split()
LANGUAGES = (
    "English French German Spanish Italian Dutch Swedish Polish Czech Turkish Arabic Hindi Urdu Korean "
    "Japanese Greek Latin Welsh"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
THINGS = (
    "sword rope lantern bucket hammer ladder pencil notebook wallet passport suitcase scarf gloves helmet bottle "
    "basket candle "
    "pillow whistle compass shovel trumpet flute sandals sweater button needle magnet marble pebble feather"
).split()
#: Words that the tokenizer has whole. Values are drawn from them too, since users tell of such things as of others.
COMMON = (
    "the about like live you lives colour order than for number code have favourite called name time with best "
    "remember will that likes "
    "noted little usual more know your star some many centuries written lot look closely starts looking learn most "
    "think people older "
    "they same never but stay change slowly very large small good enjoyed company ever almost count find world "
    "every country often "
    "adults better understand home can help ordered garden hamster turtle cat rabbit goat parrot dog horse clock "
    "garage attic safe gate "
    "studio lock locker cell cellar morning library vault later ask facts lab office painting island kites islands "
    "tea birds volcanoes "
    "sugar train bees trains honey paper trees forests poetry clocks summer wind windmills owls bridges autumn "
    "horses chess castles map "
    "bread markets maps book spices books deserts storms rivers glass music lighthouses gardens salt caves fox "
    "foxes stars whales "
    "coffee spring iron winter glacier glaciers mountains oceans cheese kettle wool clouds ship ships camera "
    "indigo bicycle orange cyan "
    "vase kite violin blanket jacket table silver grey mirror white car blue carpet lilac tent lamp umbrella lime "
    "keyboard telescope "
    "drum bronze yellow teal brown pink turquoise magenta tell this what ivory coral conversation crimson guitar "
    "green scarlet backpack "
    "olive maroon well how thank black red violet amber printer radio gold model piano chair monitor"
).split()
_WHOLE = frozenset(COMMON)
#: COMMON words that name something.
COMMON_THINGS = (
    COMMON[COMMON.index("hamster") : COMMON.index("safe")] + COMMON[COMMON.index("painting") : COMMON.index("tell")]
)

_ONSETS = (
    "b c d f g h j k l m n p q r s t v w x y z br ch cl dr fl fr gl gr kr pl ph qu sh sk sl st th tr tw wh".split()
)
_VOWELS = "a e i o u ai au ea ee ei ia io oo ou y".split()
_CODAS = ["", "", "", "", "n", "s", "r", "l", "m", "t", "k", "x", "nd", "rt", "ck", "ss"]
#: The share of words and codes that training never sees.
_HELD_OUT_SHARE = 0.2


def held_out(text: str) -> bool:
    """Whether a word (or number, or code) belongs to evaluation alone."""
    return text.lower() not in _WHOLE and zlib.crc32(text.lower().encode()) % 1000 < 1000 * _HELD_OUT_SHARE


class Words:
    """Draws words. With `held_out_only`, those alone that training never sees; otherwise those alone that it may
    see."""

    def __init__(self, rng: random.Random, held_out_only: bool = False) -> None:
        self.rng, self._held_out = rng, held_out_only

    def _draw(self, make) -> str:  # type: ignore[no-untyped-def]
        while True:
            text = make()
            if held_out(text) == self._held_out:
                return text

    def of(self, listed: list[str]) -> str:
        """One of the list's words."""
        return self._draw(lambda: self.rng.choice(listed))

    def invented(self) -> str:
        """A word of three to ten letters that is in no list, in lower case: syllables mostly, otherwise any letters."""
        rng = self.rng

        def make() -> str:
            if rng.random() < 0.4:
                return "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(3, 9)))
            word = "".join(
                rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
                for _ in range(rng.choice((1, 2, 2, 2, 3)))
            )
            return word[:11] if len(word) > 2 else word + rng.choice("nrsltm")

        return self._draw(make)

    def digits(self, fewest: int, most: int) -> str:
        """So many digits, without a leading zero unless there are four or more."""
        n = self.rng.randint(fewest, most)
        first = "0123456789" if n > 3 else "123456789"
        make = lambda: self.rng.choice(first) + "".join(self.rng.choice(string.digits) for _ in range(n - 1))  # noqa: E731
        return make() if n < 3 else self._draw(make)  # of short numbers, too few would be left

    def code(self) -> str:
        """Digits mostly; else capital letters and digits, or letters, a dash and digits."""
        rng, kind = self.rng, self.rng.random()
        if kind < 0.55:
            return self.digits(4, 7)
        letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
        if kind < 0.8:
            return self._draw(lambda: "".join(rng.choice(letters + string.digits) for _ in range(rng.randint(4, 7))))
        return self._draw(
            lambda: "".join(rng.choice(letters) for _ in range(rng.randint(1, 3))) + "-" + self.digits(2, 4)
        )

    def cased(self, word: str, capital: float = 0.9) -> str:
        """The word as a name is written; now and then in lower or upper case, as people type."""
        r = self.rng.random()
        return word.capitalize() if r < capital else word.upper() if r > 0.98 else word.lower()

    def person(self) -> str:
        """A first name, a full one at times."""
        first = self.cased(self.of(NAMES) if self.rng.random() < 0.4 else self.invented())
        if self.rng.random() < 0.88:
            return first
        return f"{first} {self.cased(self.of(SURNAMES) if self.rng.random() < 0.5 else self.invented(), 1)}"

    def pet(self) -> str:
        return self.cased(self.of(PET_NAMES + NAMES) if self.rng.random() < 0.45 else self.invented())

    def place(self) -> str:
        name = self.cased(self.of(PLACES) if self.rng.random() < 0.5 else self.invented())
        return (
            f"{self.rng.choice(['New', 'San', 'Port', 'North', 'Saint'])} {name}" if self.rng.random() < 0.1 else name
        )

    def company(self) -> str:
        return self.cased(self.of(COMPANIES) if self.rng.random() < 0.35 else self.invented())

    def thing(self, listed: list[str]) -> str:
        """One of the list, an invented word, or a common one; at times two words."""
        r = self.rng.random()
        word = (
            self.of(listed)
            if r < 0.5
            else self.invented()
            if r < 0.8 or self._held_out
            else self.rng.choice(COMMON_THINGS)
        )
        if self.rng.random() < 0.15:
            word = f"{self.of(COLOURS + HOBBIES) if self.rng.random() < 0.5 else self.invented()} {word}"
        return word

    def anything(self) -> str:
        """A word, a name, a number or a code."""
        r = self.rng.random()
        if r < 0.35:
            return self.cased(self.invented(), 0.5)
        if r < 0.55:
            return self.thing(THINGS + FOODS + COLOURS + HOBBIES)
        if r < 0.65:
            return self.invented() if self._held_out else self.rng.choice(COMMON)
        if r < 0.75:
            return self.person()
        return self.digits(1, 5) if r < 0.88 else self.code()

    def time(self) -> str:
        rng, hour = self.rng, self.rng.randint(1, 12)
        forms = [
            f"{hour}pm",
            f"{hour}am",
            f"{hour}:{rng.choice(['00', '15', '30', '45'])}",
            f"{rng.randint(10, 23)}:{rng.randint(10, 59)}",
            f"{hour} o'clock",
            f"{hour} pm",
            "noon",
            f"{hour}:{rng.choice(['00', '30'])} am",
        ]
        return rng.choice(forms)

    def date(self) -> str:
        rng, day, month = self.rng, self.rng.randint(1, 31), self.rng.choice(MONTHS)
        nth = f"{day}{'th' if day in (11, 12, 13) else {1: 'st', 2: 'nd', 3: 'rd'}.get(day % 10, 'th')}"
        forms = [
            f"{month} {day}",
            f"{day} {month}",
            f"the {nth} of {month}",
            f"{month} {nth}",
            f"{nth} of {month}",
            rng.choice(DAYS),
            f"{day} {month} {rng.randint(1940, 2030)}",
            f"{rng.randint(1, 12)}/{day}",
            f"next {rng.choice(DAYS)}",
            f"{rng.choice(DAYS)} morning",
        ]
        return rng.choice(forms)

    def room(self) -> str:
        return self.rng.choice("ABCDEFGHJKLMNP") + self.digits(1, 3) if self.rng.random() < 0.6 else self.digits(1, 4)

    def email(self) -> str:
        return f"{self.invented()}@{self.invented()}.{self.rng.choice(['com', 'org', 'net', 'de'])}"

    def phone(self) -> str:
        form = self.rng.choice(["{}{}", "{}-{}", "{} {}", "+{}{}", "555-{}"])
        return form.format(self.digits(3, 4), self.digits(4, 5))

    def price(self) -> str:
        n = self.digits(1, 4)
        return self.rng.choice([f"{n} euros", f"{n} dollars", f"${n}", f"{n} pounds"])

    def spot(self) -> str:
        if self.rng.random() < 0.15:
            return self.rng.choice(
                [
                    f"on level {self.digits(1, 2)}",
                    f"at {self.person()}'s place",
                    f"on floor {self.digits(1, 2)}",
                    f"in {self.place()}",
                    "at home",
                    "at work",
                ]
            )
        where = self.rng.choice(["in the", "in the", "on the", "under the", "behind the", "in my", "next to the"])
        return f"{where} {self.thing(THINGS) if self.rng.random() < 0.6 or self._held_out else self.rng.choice(ROOMS)}"


ROOMS = (
    "kitchen bedroom bathroom garage attic cellar drawer cupboard fridge car hall desk shelf box bag "
    "garden sofa bed closet"
).split()


class NoWords(Words):
    """Draws a digit for every word: what is left of a text is its phrasing, of which the tokenizer's vocabulary is
    made."""

    def _draw(self, make) -> str:  # type: ignore[no-untyped-def]
        return "0"
