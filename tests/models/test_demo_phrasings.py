"""The demo model's phrasings: what is held out is said in words that training meets, and the tokenizer has every word
whole."""

from __future__ import annotations

import collections
import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "models" / "demo"))
import phrasings
import tokenizer

DEMO = Path(tokenizer.__file__).parent
#: A word of a held-out line stands in so many trained lines of the same list.
TRAINED_LINES = 3
LISTS = {
    **{name: getattr(phrasings, name) for name in phrasings.WRAPPED_LISTS},
    **{f"{kind} tells": listed for kind, listed in phrasings.TELLS.items()},
    **{f"{kind} asks": listed for kind, listed in phrasings.ASKS.items()},
}


def words(line: str) -> set[str]:
    """What stands outside of slots, in lower case."""
    return set(re.findall(r"[a-z']+", re.sub(r"\{\w*\}", " ", phrasings.as_mine(line)).lower()))


def test_every_word_of_a_held_out_phrasing_stands_in_trained_ones_of_its_list() -> None:
    missing = []
    for name, listed in LISTS.items():
        trained, held_out = phrasings.parted(listed)
        assert len(held_out) >= len(listed) // 5 >= 8, name
        counts = collections.Counter(word for line in trained for word in words(line))
        missing += [(name, line, word) for line in held_out for word in words(line) if counts[word] < TRAINED_LINES]
    assert not missing


def test_every_phrasing_has_a_place_for_what_is_said() -> None:
    needed = {"CORRECTING_SHORTLY": "{v}", "AS_JSON": "", "TOGETHER": "{"}
    for name in phrasings.WRAPPED_LISTS:
        assert not [line for line in LISTS[name] if needed.get(name, "{}") not in line], name
    for kind in phrasings.TELLS:
        assert not [line for line in phrasings.TELLS[kind] if line.count("{v}") != 1], kind
        assert not [line for line in phrasings.ASKS[kind] if "{v}" in line], kind


def test_no_phrasing_stands_twice_in_a_list_of_wrappers() -> None:
    for name in phrasings.WRAPPED_LISTS:
        assert len(set(LISTS[name])) == len(LISTS[name]), name


def test_the_tokenizer_has_every_word_of_the_phrasings_whole() -> None:
    vocabulary = json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"]
    inside, first = phrasings.words_of_phrasings()
    assert len(inside) > 500
    wanted = [*(f"Ġ{word}" for word in inside), *first, *(word[0].upper() + word[1:] for word in first)]
    assert not [word for word in wanted if word not in vocabulary]


@pytest.mark.slow
@pytest.mark.sample
def test_the_tokenizer_is_the_one_that_its_script_makes(tmp_path: Path) -> None:
    tokenizer.build(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (DEMO / name).read_text(), name
