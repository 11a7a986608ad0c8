"""The vLLM server's model as schedulers see an engine (`runtime.reporter.ReportedEngine`)."""

from __future__ import annotations

import collections
from collections.abc import Callable

from contracts.counts import Counts
from contracts.kv import KvShape
from sidecar.core.flights import Flight, Flights
from sidecar.watching import Watching

#: Ended requests that wait for a scheduler to be told; as many as a link of the reporter keeps.
_MOST_FINISHED = 100_000


class ServedModel:
    """See the module. Used on the event loop only."""

    def __init__(self, name: str, shape: KvShape, flights: Flights, watching: Watching) -> None:
        #: shape: sizes of its KV (`sidecar.core.shape`).
        self.model_name, self.shape = name, shape
        self._flights, self._watching = flights, watching
        self.finished: collections.deque[str] = collections.deque(maxlen=_MOST_FINISHED)
        self.on_requests: Callable[[], None] = lambda: None

    @property
    def counts(self) -> Counts:
        """Its load now."""
        return self._flights.load(self._watching.pace, self._watching.sample, self.shape)

    @property
    def stalled_s(self) -> float:
        """See `sidecar.core.server_state`."""
        return self._watching.stalled_s

    def begin(self, flight: Flight) -> None:
        """A request has come."""
        self._flights.begin(flight)
        self.on_requests()

    def refused(self, request_id: str) -> None:
        """A request that was placed here did not begin."""
        self.finished.append(request_id)
        self.on_requests()

    def end(self, flight: Flight) -> None:
        """It has ended."""
        self._flights.end(flight)
        self.finished.append(flight.request_id)
        self.on_requests()
