"""The interface of a simulated system: what it sees and decides. Deterministic; no clock, no randomness.

A system sees its nodes without report delay, which favours it over ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from contracts.ids import SessionKey


@dataclass(frozen=True, slots=True)
class View:
    """A node. requests: all on it; running: in its batch. hbm_bytes: for KV; used_bytes: of running requests.
    queued_bytes: needed by the first waiting request."""

    name: str
    requests: int
    running: int
    hbm_bytes: float
    used_bytes: float
    queued_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Active:
    """A decoding request. bytes: of its KV."""

    request_id: str
    bytes: float
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Paused:
    """A session between two turns. tokens: of its KV. fwd_s: to compute them again. swap_s: to move them to host memory
    or back. batch_tokens: of the other requests in the node's batch. token_bytes: KV of a token."""

    session: SessionKey
    tokens: int
    fwd_s: float
    swap_s: float
    batch_tokens: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class Migration:
    """Move this running request to another node."""

    request_id: str
    source: str
    target: str


class System(Protocol):
    """See the module. Methods mutate the system's state."""

    #: Interval of `migrations`, in seconds; 0: it never migrates.
    migrates_every_s: float

    def place(self, session: SessionKey, group: str, now: float, views: Sequence[View]) -> str:
        """The node for a turn. group: its application run, or empty."""
        ...

    def sources(self, session: SessionKey) -> tuple[str, ...]:
        """Nodes from which the session's KV is fetched when a turn has arrived."""
        ...

    def ended(self, paused: Paused, node: str, now: float) -> frozenset[str]:
        """A turn has ended on `node`. Returns the tiers that keep its KV."""
        ...

    def migrations(self, views: Sequence[View], active: Mapping[str, Sequence[Active]]) -> list[Migration]:
        """The migrations to start now. active: by node, decoding requests that are not migrating."""
        ...
