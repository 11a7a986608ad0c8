"""What a simulated system decides, and what it sees. Pure: no clock, no chance; equal calls in equal order give equal answers.

A system sees its nodes as they are now, without the delay that reports have in ours: to its advantage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from contracts.ids import SessionKey


@dataclass(frozen=True, slots=True)
class View:
    """A node. requests: that are there, of which `running` are in its batch. hbm_bytes: for KV, of which `used_bytes` belong to running
    requests and `queued_bytes` are what the first of those that wait needs."""

    name: str
    requests: int
    running: int
    hbm_bytes: float
    used_bytes: float
    queued_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Active:
    """A request that decodes on a node."""

    request_id: str
    bytes: float
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Paused:
    """A turn has ended on a node, and its session's next one has not come. tokens, bytes: of its KV. fwd_s: to compute them again.
    swap_s: to move them to host memory or back. batch_tokens: of the other requests in the node's batch, and token_bytes of one."""

    session: SessionKey
    tokens: int
    fwd_s: float
    swap_s: float
    batch_tokens: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class Migration:
    """Take this running request to another node."""

    request_id: str
    source: str
    target: str


class System(Protocol):
    """See the module. Methods mutate what the system remembers."""

    #: Seconds between looks at the fleet for migrations; 0: it never migrates.
    migrates_every_s: float

    def place(self, session: SessionKey, group: str, now: float, views: Sequence[View]) -> str:
        """The node for a turn. group: the application run it belongs to, or nothing."""
        ...

    def sources(self, session: SessionKey) -> tuple[str, ...]:
        """Other nodes from which this session's KV is brought when a turn is there."""
        ...

    def ended(self, paused: Paused, node: str, now: float) -> frozenset[str]:
        """A turn has ended there: the tiers of that node that keep its KV."""
        ...

    def migrations(self, views: Sequence[View], active: Mapping[str, Sequence[Active]]) -> list[Migration]:
        """What to move now. active: of each node, the requests that decode there and are not being moved."""
        ...
