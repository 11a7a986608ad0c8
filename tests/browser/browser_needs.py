"""What browser tests need and may not find: then they are skipped, or fail where `UPBEAT_REQUIRE_BROWSER` is set."""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

T = TypeVar("T")


def need(found: T | None, what: str) -> T:
    """`found`, unless it is nothing."""
    if found:
        return found
    reason = f"needs {what}"
    if os.environ.get("UPBEAT_REQUIRE_BROWSER"):
        pytest.fail(f"{reason}, and UPBEAT_REQUIRE_BROWSER says that it is there")
    pytest.skip(reason)
