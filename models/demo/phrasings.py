"""Which phrasings there are, and which of them are held out (phrasings.toml)."""

from __future__ import annotations

import random
import re
import tomllib
from functools import cache
from pathlib import Path

_EVERY = 5
_READ = tomllib.loads((Path(__file__).parent / "phrasings.toml").read_text())


def _lines(text: str) -> tuple[str, ...]:
    return tuple(text.strip().splitlines())


_WRAPPED = {name: _lines(text) for name, text in _READ.pop("wrapped").items()}
TELLING, ASKING, ASKING_INDIRECTLY = _WRAPPED["telling"], _WRAPPED["asking"], _WRAPPED["asking_indirectly"]
CORRECTING, CORRECTING_SHORTLY = _WRAPPED["correcting"], _WRAPPED["correcting_shortly"]
AS_JSON, KEYS_AS_JSON = _WRAPPED["as_json"], _WRAPPED["keys_as_json"]
#: Ways to tell several facts in one sentence: the values stand by the relation's kind.
TOGETHER = _WRAPPED["together"]
#: Names of the lists above.
WRAPPED_LISTS = (
    "TELLING",
    "ASKING",
    "ASKING_INDIRECTLY",
    "CORRECTING",
    "CORRECTING_SHORTLY",
    "AS_JSON",
    "KEYS_AS_JSON",
    "TOGETHER",
)
#: By the relation's kind.
TELLS = {kind: _lines(ways["tells"]) for kind, ways in _READ.items()}
ASKS = {kind: _lines(ways["asks"]) for kind, ways in _READ.items()}


def as_mine(phrasing: str) -> str:
    """The phrasing as the user says it of themself: relations share some."""
    for slot, mine in (
        ("{my}", "my"),
        ("{I}", "I"),
        ("{am}", "am"),
        ("{have}", "have"),
        ("{do}", "do"),
        ("{s}", ""),
        ("{is}", "is"),
        ("{me}", "me"),
    ):
        phrasing = phrasing.replace(slot, mine)
    return phrasing


_HELD_OUT = {as_mine(p) for listed in (*TELLS.values(), *ASKS.values(), TOGETHER) for p in listed[_EVERY - 1 :: _EVERY]}


@cache
def parted(listed: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """`(what training may see, what is held out)`: every fifth phrasing, and what is held out of another relation's
    list."""
    kept = {*listed[_EVERY - 1 :: _EVERY]}
    held_out = [p for p in listed if p in kept or as_mine(p) in _HELD_OUT]
    return [p for p in listed if p not in held_out], held_out


@cache
def _of_others(listed: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """`parted` of those that name the fact's holder, who may be another than the user."""
    kept, held_out = ([p for p in part if re.search(r"\{(my|I|me)\}", p)] for part in parted(listed))
    return kept, held_out


def pick(rng: random.Random, listed: tuple[str, ...], held_out_only: bool, of_another: bool = False) -> str:
    """A phrasing of the list: one that is held out, or one that training may see. of_another: it can tell of somebody
    else's."""
    return rng.choice((_of_others if of_another else parted)(listed)[held_out_only])


def words_of_phrasings() -> tuple[list[str], list[str]]:
    """`(all words of the phrasings, those that a line begins with)`, in lower case but for `I` and `JSON`, sorted."""
    lines = [p for listed in (*_WRAPPED.values(), *TELLS.values(), *ASKS.values()) for p in listed]
    cut = [re.findall(r"[A-Za-z]+", re.sub(r"\{\w*\}", "0", as_mine(line))) for line in lines]
    opening = {_plain(re.match(r"\W*([A-Za-z]*)", as_mine(line))[1]) for line in lines}  # type: ignore[index]
    return sorted({_plain(word) for words in cut for word in words}), sorted(opening - {""})


def _plain(word: str) -> str:
    return word if word in ("I", "JSON") else word.lower()
