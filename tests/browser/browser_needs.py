"""What browser tests need and may not find: then they are skipped, or fail where `UPBEAT_TEST_BROWSER` is set."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).parents[2]
T = TypeVar("T")


def need(found: T | None, what: str) -> T:
    """`found`, unless it is nothing."""
    if found:
        return found
    reason = f"needs {what}"
    if os.environ.get("UPBEAT_TEST_BROWSER"):
        pytest.fail(f"{reason}, and UPBEAT_TEST_BROWSER says that nothing may be skipped")
    pytest.skip(reason)


def chromium() -> str:
    """The path of a Chromium."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return need(next(filter(None, map(shutil.which, names)), None), "Chromium (apt-get install chromium)")
