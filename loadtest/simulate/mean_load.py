"""A node's number of requests, averaged over time."""

from __future__ import annotations

from loadtest.simulate.events import Events


class MeanLoad:
    """See the module."""

    def __init__(self, events: Events) -> None:
        self._events, self._requests = events, 0
        self._area = self._since = 0.0

    def changed(self, requests: int) -> None:
        """Set the present number of requests."""
        now = self._events.now
        self._area += (now - self._since) * self._requests
        self._since, self._requests = now, requests

    def take(self, window_s: float) -> float:
        """The mean since the last call, which was `window_s` seconds ago."""
        self.changed(self._requests)
        area, self._area = self._area, 0.0
        return area / window_s
