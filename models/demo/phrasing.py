"""How people put it: contractions, lower case, missing full stops, a greeting in front, a question asked by the way.

`told` and `asked` make a message's sentence of a phrasing with slots (`phrasings.toml`). Values are never changed.
"""

from __future__ import annotations

import random
import re

from phrasings import ASKING, ASKING_INDIRECTLY, CORRECTING, CORRECTING_SHORTLY, TELLING, pick

_VALUE = "\0"
_CONTRACTIONS = (
    ("I am", "I'm"),
    ("{I} {am}", "{I}'m"),
    ("what is", "what's"),
    ("where is", "where's"),
    ("who is", "who's"),
    ("it is", "it's"),
    ("when is", "when's"),
    ("name is", "name's"),
    ("can not", "can't"),
    ("{do} not", "don't"),
    ("do not", "don't"),
    ("I have got", "I've got"),
    ("that is", "that's"),
    ("must not", "mustn't"),
    ("I would", "I'd"),
    ("there is", "there's"),
)


def _spoken(
    rng: random.Random, phrasing: str, slots: dict[str, str], values: dict[str, str], end: str, casual: float
) -> str:
    """The phrasing's text. slots: what stands in braces; values: those of them that are written as they are."""
    mine = slots.get("I", "I") == "I"
    if "is" in slots:
        phrasing = phrasing.replace("{is}", slots["is"])
    if rng.random() < 0.4:
        for long, short in _CONTRACTIONS:
            if long == "{I} {am}" and not mine:
                continue
            phrasing = re.sub(re.escape(long) + r"(?= \S)", lambda _, short=short: short, phrasing)
        if rng.random() < casual:
            phrasing = (
                phrasing.replace("'m", "m")
                .replace("what's", "whats")
                .replace("name's", "name is")
                .replace("don't", "dont")
            )
    lower = rng.random() < casual
    if lower:
        phrasing = re.sub(r"\bI\b(?!})", "i", phrasing)
        if mine:
            slots = {**slots, "I": "i"}
        end = rng.choice(["", "", end])
    text = phrasing.format(**{**slots, **{name: _VALUE + name + _VALUE for name in values}})
    if not lower:
        text = capitalised(text)
        text = re.sub(r"([.!?] )([a-z])", lambda m: m[1] + m[2].upper(), text)
    for name, value in values.items():
        text = text.replace(_VALUE + name + _VALUE, value)
    return with_article(text + ("" if text.endswith((".", "!", "?")) else end))


def told(
    rng: random.Random, phrasing: str, slots: dict[str, str], value: str, held_out_only: bool, plain: bool = False
) -> str:
    """A statement. plain: it goes into the middle of another."""
    wrapper = "{}" if plain or rng.random() < 0.6 else pick(rng, TELLING, held_out_only)
    end = rng.choice([".", ".", ".", ".", "!", ""]) if not plain else "."
    return _spoken(rng, wrapper.replace("{}", phrasing), slots, {"v": value}, end, 0.0 if plain else 0.2)


def told_together(rng: random.Random, phrasing: str, slots: dict[str, str], values: dict[str, str]) -> str:
    """A statement of several facts, whose values stand by their kinds."""
    opening = (
        rng.choice(["{}", "{}", "{}", "hi, {}", "hello! {}", "hi! {}", "by the way, {}"])
        if rng.random() < 0.6
        else "{}"
    )
    return _spoken(rng, opening.replace("{}", phrasing), slots, values, rng.choice([".", ".", ".", "!", ""]), 0.2)


def corrected(rng: random.Random, phrasing: str, slots: dict[str, str], value: str, held_out_only: bool) -> str:
    """The same statement with another value than before."""
    return _spoken(
        rng,
        pick(rng, CORRECTING, held_out_only).replace("{}", phrasing),
        slots,
        {"v": value},
        rng.choice([".", ".", ""]),
        0.2,
    )


def corrected_shortly(rng: random.Random, value: str, old: str, held_out_only: bool) -> str:
    """Another value for what was said last."""
    return _spoken(
        rng,
        pick(rng, CORRECTING_SHORTLY, held_out_only),
        {},
        {"v": value, "old": old},
        rng.choice([".", ".", "!", ""]),
        0.2,
    )


def asked(rng: random.Random, phrasing: str, slots: dict[str, str], held_out_only: bool) -> str:
    """A question."""
    roll = rng.random()
    end = rng.choice(["?", "?", "?", "?", "?", ""])
    inner = indirect(phrasing) if roll < 0.25 else None
    if inner is not None:
        phrasing = pick(rng, ASKING_INDIRECTLY, held_out_only).replace("{}", inner)
    elif roll < 0.5 and re.match(r"(what|who|whom|which|where|when|how|at|on|in|to|by|for|from|with|as) ", phrasing):
        phrasing = pick(rng, ASKING, held_out_only).replace("{}", phrasing)
    if re.match(r"(please |now |just )?(tell|remind|say|give|name|repeat|show|recall|help|I) ", phrasing) and end:
        end = rng.choice([".", "?", "."])
    return _spoken(rng, phrasing, slots, {}, end, 0.2)


def indirect(phrasing: str) -> str | None:
    """The question in another sentence ("what is my name": "what my name is"); None where that takes more than moving a
    word."""
    match = re.match(r"^(what|where|when|who|how old) (is|was|am|are|\{am\}|\{is\}) (?!it )([^,]+)$", phrasing)
    if match:
        asked, verb, rest = match.groups()
        subject = re.match(r"(I|we|\{I\})\b|.+?(?= (?:going|scheduled|held|hidden|called|named|again|now)\b)|.+", rest)
        assert subject is not None
        return f"{asked} {subject[0]} {verb}{rest[subject.end() :]}"
    match = re.match(
        r"^(what|where|which \S+|what \S+|who) (?:do|\{do\}) (I|\{I\}) "
        r"(live|work|like|love|speak|drive|have|enjoy|hate)\b(.*)$",
        phrasing,
    )
    if match:
        another = match[2] == "{I}"
        verb = match[3] if not another else "{have}" if match[3] == "have" else match[3] + "{s}"
        return f"{match[1]} {match[2]} {verb}{match[4]}"
    return None


def capitalised(text: str) -> str:
    """With its first character in upper case, unless a value comes first."""
    return text[:1].upper() + text[1:]


def with_article(text: str) -> str:
    """`an` before vowels."""
    return re.sub(r"\b([aA]) (?=[aeiouAEIOU])", r"\1n ", text)
