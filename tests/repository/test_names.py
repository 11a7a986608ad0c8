"""Files of tests can be collected together."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_files_of_folders_that_are_no_packages_have_names_of_their_own() -> None:
    names = Counter(file.name for file in TESTS.rglob("test_*.py") if not (file.parent / "__init__.py").exists())
    assert [name for name, count in names.items() if count > 1] == []
