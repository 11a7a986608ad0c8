"""Which nodes must confirm an erasure: this node's view of who belongs to the fleet.

Schedulers tell it; each is heard by itself, and a node counts as long as one of them says that it belongs. Until one
has said so, the configured nodes count. Nodes that left for good are noted in the blob tier (tiers/tombstones.py), so
that one which comes back all the same serves nothing that was erased meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

#: A file in the node's directory: it has met other nodes, so erasures may have happened that its journal lacks.
_MET = "has-met-others"
#: The only node of a fleet of one.
_FIRST = "node-0"


class Members:
    """See the module. gone: nodes whose leaving the blob tier may not know yet."""

    def __init__(self, own: str, configured: Iterable[str], directory: Path) -> None:
        self._own, self._configured = own, frozenset(configured)
        self._file = directory / _MET
        self._told: dict[str, frozenset[str]] = {}
        self.gone: set[str] = set()

    @property
    def deployment(self) -> frozenset[str]:
        """The nodes that must confirm an erasure."""
        told = frozenset[str]().union(*self._told.values()) if self._told else self._configured
        return told | {self._own}

    @property
    def alone(self) -> bool:
        """Whether this is the only node that there ever was, so that its own journal has every erasure."""
        return self._own == _FIRST and self._configured == {_FIRST} and not self._file.exists()

    def told(self, scheduler: str, members: Iterable[str], gone: Iterable[str]) -> None:
        """A scheduler says who belongs to the fleet (empty: as before), and who has just left for good."""
        if members := frozenset(members):
            self._told[scheduler] = members
            self.gone -= members
        self.gone |= frozenset(gone) - {self._own}
        if not self.deployment <= {self._own} and not self._file.exists():
            with contextlib.suppress(OSError):  # without its directory it serves no SSD either
                self._file.touch()
