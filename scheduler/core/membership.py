"""Decides which nodes belong to the fleet: they must confirm erasures, and are expected to serve.

Configured nodes belong to it from the start, any other node from its first hello on, and both also while they are
down. A node is no member any more once it has left: at an operator's request, when the blob tier has all that it held,
or because an operator says that it is lost. A node that left and says hello again is a member again.

Invariants (checked by `validate`): a joined node is not configured; only configured nodes are remembered as left; who
is leaving is a member.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from contracts.errors import InvalidRequest

#: Members at most, so that a mistaken or hostile holder of certificates cannot fill the memory.
MOST_NODES = 10_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


class Membership:
    """See the module. changed: what `stored` gives has changed; whoever writes it resets that."""

    def __init__(self, configured: Iterable[str] = ()) -> None:
        self._configured = frozenset(configured)
        self._joined: set[str] = set()
        self._left: set[str] = set()
        self._leaving: set[str] = set()
        self.changed = False
        self._members = self._configured

    @property
    def members(self) -> frozenset[str]:
        """All nodes of the fleet, whether they are here or not."""
        return self._members

    @property
    def configured(self) -> frozenset[str]:
        """The members that the configuration names."""
        return self._configured - self._left

    @property
    def former(self) -> frozenset[str]:
        """Configured nodes that have left."""
        return frozenset(self._left)

    @property
    def leaving(self) -> frozenset[str]:
        """Members that shall leave and have not yet."""
        return frozenset(self._leaving)

    def hello(self, name: str) -> bool:
        """A node is here. True if it was no member before. Raises InvalidRequest for an impossible name, or one node
        too many."""
        if name in self._members:
            return False
        if not is_name(name):
            raise InvalidRequest(f"{name[:70]!r} is no name of a node; give letters, digits, - and _", param="node")
        if len(self._members) >= MOST_NODES:
            raise InvalidRequest(
                f"the fleet has {MOST_NODES} nodes; let one leave (`upbeat leave`) before {name} joins", param="node"
            )
        self._left.discard(name)
        if name not in self._configured:
            self._joined.add(name)
        self._update()
        return True

    def leave(self, name: str) -> None:
        """A member shall leave."""
        assert name in self._members, name
        if name not in self._leaving:
            self._leaving.add(name)
            self.changed = True

    def end(self, name: str) -> bool:
        """The node has left. False if it was no member."""
        if name not in self._members:
            return False
        self._leaving.discard(name)
        self._joined.discard(name)
        if name in self._configured:
            self._left.add(name)
        self._update()
        return True

    def _update(self) -> None:
        self._members, self.changed = (self._configured | self._joined) - self._left, True

    # ---- kept across restarts ------------------------------------------------------------------------------------
    def stored(self) -> dict[str, list[str]]:
        """What a restarted scheduler must know."""
        return {"joined": sorted(self._joined), "left": sorted(self._left), "leaving": sorted(self._leaving)}

    def restore(self, stored: Mapping[str, object]) -> None:
        """Take what `stored` gave, perhaps under another configuration. Raises ValueError when it makes no sense."""
        joined, left, leaving = (_names(stored, key) for key in ("joined", "left", "leaving"))
        self._joined, self._left = joined - self._configured, left & self._configured
        self._update()
        self._leaving = leaving & self._members
        self.changed = False

    def validate(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        assert not self._joined & self._configured
        assert self._left <= self._configured
        assert self._leaving <= self._members == (self._configured | self._joined) - self._left


def is_name(name: str) -> bool:
    """Whether a node can have this name."""
    return _NAME.fullmatch(name) is not None


def _names(stored: Mapping[str, object], key: str) -> set[str]:
    names = stored.get(key)
    if not isinstance(names, list) or not all(isinstance(n, str) and is_name(n) for n in names):
        raise ValueError(f"{key!r} is no list of nodes' names")
    return set(names)
