"""One word for one thing: code and documents keep to the glossary of ARCHITECTURE.md."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: What has another name in the glossary. Each as it stands alone or as a part of a name.
SYNONYMS = (
    "emptying|vacat(e|es|ed|ing)",
    "promis(e|es|ed|ing)",
    "patience",
    "wish(es)?",
    "telling",
    "strangers?",
    "young",
    "doors?",
    "people",
    "sick",
    "house",
)
_PART = re.compile(rf"(?<![A-Za-z])({'|'.join(SYNONYMS)})(?![a-z])", re.IGNORECASE)
#: The glossary itself and this test; what the demo model talks about; what was generated; what is not prose of ours.
EXCEPT = (
    "ARCHITECTURE.md",
    "tests/repository/test_words.py",
    "models/demo/",
    "contracts/v1/",
    "loadtest/prompts.py",
    "tests/browser/",
)


def written() -> list[Path]:
    """Python and Markdown of the project."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.md", "bench/*/run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return [ROOT / name for name in listed if not name.startswith(EXCEPT) and (ROOT / name).exists()]


def synonyms(text: str) -> list[str]:
    """The words of `text` that the glossary does not use, with their lines."""
    return [f"{n}: {found[0]}" for n, line in enumerate(text.splitlines(), 1) for found in _PART.finditer(line)]


def test_everything_is_called_by_its_name_in_the_glossary() -> None:
    found = {path.relative_to(ROOT).as_posix(): words for path in written() if (words := synonyms(path.read_text()))}
    assert not found, "see the glossary in ARCHITECTURE.md"


@pytest.mark.parametrize(
    "line", ["def wish_of(request):", "class Door:", "# people who type", "the node's promise", "sick_disk = 1"]
)
def test_a_synonym_is_found(line: str) -> None:
    assert synonyms(f"a = 1\n{line}\n")


@pytest.mark.parametrize("line", ["indoors", "youngest", "promisc", "housed", "swish(x)"])
def test_other_words_are_not(line: str) -> None:
    assert not synonyms(line)
