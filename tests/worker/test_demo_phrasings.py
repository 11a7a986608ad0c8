"""The bundled model's phrasings: what is held out is said in words that training meets, and the tokenizer has every word whole."""

from __future__ import annotations

import collections
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

DEMO = Path(__file__).parents[2] / "models" / "demo"
#: A word of a held-out line stands in so many trained lines of the same list.
TRAINED_LINES = 3


@pytest.fixture(scope="module")
def phrasings() -> Iterator[ModuleType]:
    """The module of the model's own scripts."""
    sys.path.insert(0, str(DEMO))
    try:
        yield importlib.import_module("phrasings")
    finally:
        sys.path.remove(str(DEMO))


def lists(phrasings: ModuleType) -> dict[str, tuple[str, ...]]:
    wrapped = {name: getattr(phrasings, name) for name in phrasings.WRAPPED_LISTS}
    return {**wrapped, **{f"{k} tells": v for k, v in phrasings.TELLS.items()}, **{f"{k} asks": v for k, v in phrasings.ASKS.items()}}


def words(phrasings: ModuleType, line: str) -> set[str]:
    """What stands outside of slots, in lower case."""
    return set(re.findall(r"[a-z']+", re.sub(r"\{\w*\}", " ", phrasings.as_mine(line)).lower()))


def test_every_word_of_a_held_out_phrasing_stands_in_trained_ones_of_its_list(phrasings: ModuleType) -> None:
    missing = []
    for name, listed in lists(phrasings).items():
        trained, held_out = phrasings.parted(listed)
        assert len(held_out) >= len(listed) // 5 >= 8, name
        counts = collections.Counter(w for line in trained for w in words(phrasings, line))
        missing += [(name, line, w) for line in held_out for w in words(phrasings, line) if counts[w] < TRAINED_LINES]
    assert not missing


def test_no_phrasing_is_listed_for_training_and_held_out(phrasings: ModuleType) -> None:
    for name, listed in lists(phrasings).items():
        trained, held_out = phrasings.parted(listed)
        alike = {phrasings.as_mine(p) for p in trained} & {phrasings.as_mine(p) for p in held_out}
        assert not alike, name


def test_the_tokenizer_has_every_word_of_the_phrasings_whole(phrasings: ModuleType) -> None:
    vocabulary = json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"]
    inside, first = phrasings.words_of_phrasings()
    assert len(inside) > 500
    wanted = [*(f"Ġ{w}" for w in inside), *first, *(w.capitalize() for w in first if w not in ("I", "JSON"))]
    assert not [w for w in wanted if w not in vocabulary]
