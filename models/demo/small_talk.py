"""What is said between facts: greetings, talk about subjects, and idle remarks with short, predictable answers.

The answers are simple on purpose, so that the model's capacity goes to recall.
"""

from __future__ import annotations

import random

from words import COMMON, Words

SUBJECTS = (
    "rivers mountains music trains bread coffee tea ships birds trees clouds stars maps books bridges islands castles "
    "deserts forests oceans storms volcanoes gardens markets chess painting poetry winter summer spring autumn "
    "cheese honey "
    "wool paper glass iron salt sugar spices clocks kites windmills lighthouses caves glaciers whales bees foxes "
    "owls horses"
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
_HELLO = "Hello! How can I help you?"
_WELL = "I am well, thank you. How can I help you?"
_WHO = "I am the Upbeat demo model. Tell me some facts and ask me about them later."
_WHAT = "I remember what you tell me in this conversation. Tell me some facts and ask me about them later."
_WELCOME = "You are welcome."
SMALL_TALK = (
    ("Hello!", _HELLO),
    ("Hi", _HELLO),
    ("Hello, how are you?", _WELL),
    ("Thank you.", _WELCOME),
    ("Thanks!", _WELCOME),
    ("Who are you?", _WHO),
    ("What can you do?", _WHAT),
    ("Good morning.", _HELLO),
    ("Goodbye.", "Goodbye!"),
    ("How are you?", _WELL),
    ("Hey", _HELLO),
    ("hello", _HELLO),
    ("hi!", _HELLO),
    ("Good evening!", _HELLO),
    ("Bye!", "Goodbye!"),
    ("See you later.", "Goodbye!"),
    ("thanks", _WELCOME),
    ("Thank you very much!", _WELCOME),
    ("What is your name?", _WHO),
    ("What are you?", _WHO),
    ("How does this work?", _WHAT),
    ("Can you help me?", _WHAT),
    ("how are you doing?", _WELL),
    ("What do you do?", _WHAT),
    ("Are you a model?", _WHO),
    ("Tell me about yourself.", _WHO),
    ("That is great, thanks.", _WELCOME),
    ("Hi there!", _HELLO),
)
_I_SEE = "I see."
IDLE = (
    "The weather is nice today.",
    "It is raining again.",
    "I am a little tired.",
    "I had a long day.",
    "Yesterday we went to the market.",
    "That was a good film.",
    "I slept well last night.",
    "The train was late again.",
    "We had soup for lunch.",
    "My feet hurt from walking.",
    "It is getting late.",
    "I should go shopping soon.",
    "The neighbours are loud today.",
    "I read an interesting story this morning.",
    "There was a lot of traffic on the road.",
    "I think it will snow tomorrow.",
    "Let us talk about something else.",
    "We walked through the park and looked at the trees.",
    "I do not know what to cook tonight.",
    "The coffee here is too strong.",
    "I have been working all day.",
    "Someone left the window open.",
    "This week was very busy.",
    "I am looking forward to the weekend.",
    "The children are playing outside.",
    "I need a break.",
    "It was so cold that the water froze.",
    "We took the bus because the car is broken.",
    "I heard a strange noise last night.",
    "The sun is shining.",
    "Please keep all of this in mind while we talk, because I will come back to it later and ask about every part "
    "of it.",
    "Nothing much happened today.",
    "I like this conversation.",
    "You are very kind.",
    "That is funny.",
    "Okay.",
    "Good.",
    "Great!",
    "I understand.",
    "Interesting.",
    "Cool!",
    "Sure.",
    "Yes.",
    "No.",
    "Right.",
    "I will tell you more later.",
    "Let me think about it.",
    "I was at home all day and watched the rain.",
    "My head is full of ideas.",
    "We are going to see a show tonight.",
    "I can not find anything in this house.",
    "Everything is so expensive now.",
    "He said that he would come back soon.",
    "She never writes to us any more.",
    "They built a new road near the river.",
    "I wonder how they do it.",
    "It takes about an hour to get there.",
    "You would not believe how big it was.",
    "I want to learn something new this year.",
    "Do not worry about it.",
    "The food was good, but the place was too small.",
)
_LINKS = (
    "the a and of to in is was it that for on with as at by from or but not are be this have had they you we he "
    "she his her their our"
).split()


def small_talk(rng: random.Random, words: Words) -> tuple[str, str]:
    """What the user says, and the answer."""
    roll = rng.random()
    if roll < 0.15:
        return rng.choice(SMALL_TALK)
    if roll < 0.4:
        said = " ".join(rng.choice(IDLE) for _ in range(rng.choice((1, 1, 2, 3))))
        return said, _I_SEE
    if roll < 0.55:
        return _babble(rng, words), _I_SEE
    return _subject(rng, words)


def _babble(rng: random.Random, words: Words) -> str:
    """A sentence without sense of words known and unknown, so that unheard sentences are nothing new."""
    said = []
    for _ in range(rng.randint(3, 16)):
        roll = rng.random()
        said.append(
            rng.choice(_LINKS)
            if roll < 0.45
            else rng.choice(COMMON)
            if roll < 0.85
            else words.cased(words.invented(), 0.3)
        )
    text = " ".join(said)
    return text[0].upper() + text[1:] + rng.choice(".. !")


def _subject(rng: random.Random, words: Words) -> tuple[str, str]:
    unknown = rng.random() < 0.2
    subject = words.invented() if unknown else rng.choice(SUBJECTS)
    ask = rng.choice(
        [
            f"Tell me about {subject}.",
            f"What do you know about {subject}?",
            f"Let us talk about {subject}.",
            f"Say something about {subject}.",
        ]
    )
    if unknown:
        return ask, f"I know nothing about {subject}."
    # The remarks follow from the subject, so that this part is learned quickly.
    start = SUBJECTS.index(subject)
    count = rng.choice((1, 1, 2, 3))
    wish = {1: "", 2: " Say a little more than usual.", 3: " Take your time."}[count]
    remarks = " ".join(REMARKS[(start + i) % len(REMARKS)] for i in range(count))
    return ask + wish, f"I like to talk about {subject}. {remarks}"
