"""What holds locks, threads or connections begins anew in a forked child: others' threads are not there to release them."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Renewable(Protocol):
    """Something whose locks, threads and connections are one process's."""

    def begin_anew(self) -> None:
        """Make new ones. Called where there is no other thread."""
        ...


_all: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_in_children(thing: Renewable) -> None:
    """Have `thing.begin_anew()` called in every child that is forked while it lives."""
    _all.add(thing)


def _in_the_child() -> None:
    for thing in list(_all):
        thing.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_the_child)
