"""The seam between the gateway and a node: what a request's life (`generate`) and its watchman (`workers`) ask of whatever answers there.

`ModelInfo.wire` says how a model is reached. `frames`: token frames over one stream (`workers.WorkerStream`), which another node can go on
with from any token. `http`: the engine's own HTTP, its body and its events passed on as they are, tried elsewhere only before the first
byte; nothing speaks it yet, and a scheduler refuses a worker that registers such a model (`scheduler.convert.models_from_wire`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from contracts.request import GenerateRequest
from gateway.core.overdue import Waits
from gateway.flights import Flight, WorkerLost


class Question(NamedTuple):
    """A call beside the requests for text: the method of `Worker` in proto/, and its message."""

    method: str
    message: Any


class Backend(Protocol):
    """One node. Invariant: `flights` holds exactly the requests submitted on the standing connection that have not ended."""

    node: str
    address: str
    flights: dict[str, Flight]
    #: When it last said anything.
    heard_s: float

    @property
    def connected(self) -> bool:
        """A connection stands."""

    async def run(self) -> None:
        """Keep the connection up, for ever."""

    async def submit(self, request: GenerateRequest, connect_s: float, *, pinned: bool = False) -> Flight | WorkerLost:
        """Start `request` there; WorkerLost when no connection stands within `connect_s` seconds. pinned: no other node may have it."""

    async def ask(self, question: Question, timeout_s: float) -> Any:
        """The reply to a call; timeout_s 0: however long it takes. Raises Unavailable when there is none."""

    def drop(self, flight: Flight) -> None:
        """Forget a flight, and have it end there."""

    def give_up(self, flights: Sequence[Flight], *, silent: bool) -> None:
        """What runs there does not get on: these are lost. silent: as nothing is heard of it."""

    def let_go(self, waits: Waits) -> None:
        """End the flights that wait for longer than they may."""
