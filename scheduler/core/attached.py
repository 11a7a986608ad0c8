"""Decides which stream of a node's store or a device's worker is current: the latest connection of the process that
said hello last."""

from __future__ import annotations

from typing import NamedTuple


class Stream(NamedTuple):
    """One stream of reports.

    name: of the node or device. instance: of the process, new at every start. connection: number of the process's
    stream, from 1; 0: not numbered.
    """

    name: str
    instance: str
    connection: int


class Attached:
    """The current streams, at most one per name."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}

    def join(self, stream: Stream) -> bool:
        """A stream said hello; it becomes the current one. False if the same process has a newer stream."""
        known = self._streams.get(stream.name)
        if known is not None and known.instance == stream.instance and known.connection > stream.connection:
            return False
        self._streams[stream.name] = stream
        return True

    def current(self, name: str) -> Stream | None:
        """The current stream of this name."""
        return self._streams.get(name)

    def counts(self, stream: Stream | None) -> bool:
        """Whether this is the current stream of its name."""
        return stream is not None and self._streams.get(stream.name) is stream

    def leave(self, stream: Stream | None) -> bool:
        """The stream ended. True if it was the current one, so that the name has none now."""
        if stream is None or not self.counts(stream):
            return False
        del self._streams[stream.name]
        return True
