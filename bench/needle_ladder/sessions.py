"""The ladder's sessions: every session of a family has the same words except for its two codes.

A family of ten shares every word around the codes, so that a sibling's piece taken by mistake shows as a sibling's
code. All families share an opening of two chunks. The codes lie in chunks that later turns find in the cache.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "models" / "demo"))
from conversations import Conversation
from relations import ITEMS, LOCKED
from small_talk import REMARKS, SMALL_TALK, SUBJECTS
from teller import Fact

FAMILY = 10
LOCKS = LOCKED[:12]
CODE_DIGITS = 5
#: Two codes differ in at least this many places, so that one wrong digit never gives another session's code.
APART = 2


@dataclass(frozen=True)
class Needles:
    """A session: the talk before its questions, the questions by turn, and the exact answers. own: its two unique
    codes."""

    session_id: str
    history: list[dict[str, str]]
    asked: list[str]
    answers: list[str]
    own: tuple[str, str]


def make_sessions(count: int, seed: int) -> list[Needles]:
    """`count` sessions, determined by the seed."""
    rng = random.Random(seed)
    codes = distinct_codes(rng, 2 * count)
    return [_session(n, seed, (codes[2 * n], codes[2 * n + 1])) for n in range(count)]


def distinct_codes(rng: random.Random, count: int) -> list[str]:
    """Codes of which any two differ in at least APART places. Raises ValueError if there are not enough."""
    chosen: list[str] = []
    taken: set[str] = set()  # each code without one digit, by place
    for _ in range(100 * count):
        code = "".join(rng.choice("0123456789") for _ in range(CODE_DIGITS))
        holes = {f"{code[:i]}_{code[i + 1 :]}" for i in range(CODE_DIGITS)}
        if not holes & taken:
            taken |= holes
            chosen.append(code)
        if len(chosen) == count:
            return chosen
    raise ValueError(f"no room for {count} codes of {CODE_DIGITS} digits, {APART} apart")


def _session(number: int, seed: int, own: tuple[str, str]) -> Needles:
    family = number // FAMILY
    rng = random.Random(f"{seed} {family}")
    lock, item = LOCKS[family % len(LOCKS)], ITEMS[family % len(ITEMS)]
    subjects = rng.sample(SUBJECTS, 4)
    first = Fact(
        f"The code of the {lock} is {own[0]}.",
        f"What is the code of the {lock}?",
        f"The code of the {lock} is {own[0]}.",
    )
    second = Fact(
        f"My order number for the {item} is {own[1]}.",
        f"What is my order number for the {item}?",
        f"Your order number for the {item} is {own[1]}.",
    )
    talk = Conversation()
    talk.say(*SMALL_TALK[0])
    _talk_about(talk, "rivers")
    _talk_about(talk, "lighthouses")
    _talk_about(talk, subjects[0])
    talk.say(f"{first.told} {second.told}", "Okay, I will remember that.")
    _talk_about(talk, subjects[1])
    _talk_about(talk, subjects[2])
    asked = [first.asked, second.asked, f"Which code does the {lock} have?"]
    return Needles(f"needle-{seed}-{number}", talk.messages, asked, [first.answer, second.answer, first.answer], own)


def _talk_about(talk: Conversation, subject: str) -> None:
    start = SUBJECTS.index(subject)
    remarks = " ".join(REMARKS[(start + i) % len(REMARKS)] for i in range(3))
    talk.say(f"Tell me about {subject}. Take your time.", f"I like to talk about {subject}. {remarks}")
