"""How many examples each property of Hypothesis is tried with: in a quick run a part of those that its test names, with
`UPBEAT_EXAMPLES=all` every one. A test that is marked slow always has all of its own.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest

ALL = os.environ.get("UPBEAT_EXAMPLES") == "all"
#: In a quick run, one in so many examples is tried; but this many of each property, if it names as many.
ONE_IN, LEAST = 4, 4


def quick(named: int) -> int:
    """How many of the examples that a test names a quick run tries."""
    return min(named, max(LEAST, named // ONE_IN))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each property its number; parametrized ones, whose tests share it, once."""
    if ALL:
        return
    properties: dict[int, Any] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hypothesis.is_hypothesis_test(item.obj) and not _is_slow(item):
            own = _holder(item)
            properties[id(own)] = own
    for own in properties.values():
        name = "settings" if isinstance(own, type) else "_hypothesis_internal_use_settings"
        settings = getattr(own, name, None) or hypothesis.settings.default
        setattr(own, name, hypothesis.settings(settings, max_examples=quick(settings.max_examples)))


def _is_slow(item: pytest.Function) -> bool:
    return item.get_closest_marker("slow") is not None


def _holder(item: pytest.Function) -> Any:
    """What has a property's settings: the test's class of a state machine, else its function."""
    if getattr(item.obj, "_hypothesis_state_machine_class", None) is not None:
        return item.cls
    return getattr(item.obj, "__func__", item.obj)
