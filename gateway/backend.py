"""The interface between the gateway and a node: what `generate` and `workers` require of a connection to it.

`ModelInfo.wire` says how a model is reached. `frames`: token frames over one stream (`workers.WorkerStream`); another
node can continue from any token. `http`: the engine's HTTP, passed through unchanged and retried only before the first
byte. `http` is not implemented; schedulers refuse workers that register such a model
(`scheduler.convert.models_from_wire`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from contracts.request import GenerateRequest
from gateway.core.overdue import Waits
from gateway.flights import Flight, WorkerLost


class Question(NamedTuple):
    """A unary call to a worker: the method of `Worker` in proto/, and its message."""

    method: str
    message: Any


class Backend(Protocol):
    """The connection to one node. Invariant: `flights` holds exactly the requests that were submitted on the current
    connection and have not ended."""

    node: str
    address: str
    flights: dict[str, Flight]
    #: When the node last sent anything.
    heard_s: float

    @property
    def connected(self) -> bool:
        """Whether the connection is up."""

    async def run(self) -> None:
        """Keep the connection up, for ever."""

    async def submit(self, request: GenerateRequest, connect_s: float, *, pinned: bool = False) -> Flight | WorkerLost:
        """Start `request` on the node; WorkerLost when there is no connection within `connect_s` seconds. pinned: no
        other node may run it."""

    async def ask(self, question: Question, timeout_s: float) -> Any:
        """The reply to a call; timeout_s 0: no limit. Raises Unavailable when there is none."""

    def drop(self, flight: Flight) -> None:
        """Forget a flight and cancel it on the node."""

    def give_up(self, flights: Sequence[Flight], *, silent: bool) -> None:
        """Treat these flights as lost, because the node makes no progress. silent: nothing is heard of it."""

    def let_go(self, waits: Waits) -> None:
        """End the flights that have waited for too long."""
