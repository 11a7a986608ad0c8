"""Resets objects with locks, threads or connections in forked children, where the parent's threads do not exist."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Renewable(Protocol):
    """An object whose locks, threads and connections belong to one process."""

    def begin_anew(self) -> None:
        """Create new ones. Called while the process has no other thread."""
        ...


_all: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_in_children(thing: Renewable) -> None:
    """Call `thing.begin_anew()` in every child forked while `thing` exists. Keeps a weak reference."""
    _all.add(thing)


def _in_the_child() -> None:
    for thing in list(_all):
        thing.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_the_child)
