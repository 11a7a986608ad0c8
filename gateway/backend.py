"""The interface between the gateway and a node: what `generate`, `relay` and `workers` require of a connection to it.

`ModelInfo.wire` says how a model is reached; `workers.WorkerStream` knows both ways. `frames`: token frames over one
stream (`submit`, `generate`); another node can continue from any token. `http`: the engine's HTTP, passed through
unchanged, over a call of its own (`call_http`, `relay`); it begins again on another node only before its caller has a
byte of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from contracts.request import GenerateRequest
from contracts.v1 import worker_pb2
from gateway.core.overdue import Waits
from gateway.flights import Carried, Flight, WorkerLost
from gateway.http_flights import HttpFlight


class Question(NamedTuple):
    """A unary call to a worker: the method of `Worker` in proto/, and its message."""

    method: str
    message: Any


class Backend(Protocol):
    """The connection to one node. Invariant: `flights` holds exactly the requests that were submitted on the current
    connection and have not ended."""

    node: str
    address: str
    flights: dict[str, Carried]
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

    async def call_http(
        self, head: worker_pb2.HttpRequest, body: bytes, connect_s: float, *, timed: bool, pinned: bool = False
    ) -> HttpFlight | WorkerLost:
        """Like `submit`, for an engine with HTTP of its own. timed: see `HttpFlight`."""

    async def ask(self, question: Question, timeout_s: float) -> Any:
        """The reply to a call; timeout_s 0: no limit. Raises Unavailable when there is none."""

    def drop(self, flight: Carried) -> None:
        """Forget a flight and cancel it on the node."""

    def give_up(self, flights: Sequence[Carried], *, silent: bool) -> None:
        """Treat these flights as lost, because the node makes no progress. silent: nothing is heard of it."""

    def let_go(self, waits: Waits) -> None:
        """End the flights that have waited for too long."""
