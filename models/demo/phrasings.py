"""Which phrasings there are, and which of them are held out (phrasings.toml)."""

from __future__ import annotations

import random
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
#: By the relation's kind.
TELLS = {kind: _lines(ways["tells"]) for kind, ways in _READ.items()}
ASKS = {kind: _lines(ways["asks"]) for kind, ways in _READ.items()}


def as_mine(phrasing: str) -> str:
    """The phrasing as the user says it of themself: relations share some."""
    for slot, mine in (("{my}", "my"), ("{I}", "I"), ("{am}", "am"), ("{have}", "have"), ("{do}", "do"), ("{s}", ""), ("{is}", "is")):
        phrasing = phrasing.replace(slot, mine)
    return phrasing


_HELD_OUT = {as_mine(p) for listed in (*TELLS.values(), *ASKS.values(), TOGETHER) for p in listed[_EVERY - 1 :: _EVERY]}


@cache
def parted(listed: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """`(what training may see, what is held out)`: every fifth phrasing, and what is held out of another relation's list."""
    kept = {*listed[_EVERY - 1 :: _EVERY]}
    held_out = [p for p in listed if p in kept or as_mine(p) in _HELD_OUT]
    return [p for p in listed if p not in held_out], held_out


def pick(rng: random.Random, listed: tuple[str, ...], held_out_only: bool) -> str:
    """A phrasing of the list: one that is held out, or one that training may see."""
    return rng.choice(parted(listed)[held_out_only])
