"""Which of a node's streams counts: the latest connection of the process that said hello last."""

from __future__ import annotations

from typing import NamedTuple


class Stream(NamedTuple):
    """One stream of reports. instance: of the process, new at every start; connection: counts its streams from 1, 0: not counted."""

    node: str
    instance: str
    connection: int


class Attached:
    """The streams that count, at most one a node."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}

    def join(self, stream: Stream) -> bool:
        """A hello came. False: it is late, as a newer stream of the same process is here."""
        known = self._streams.get(stream.node)
        if known is not None and known.instance == stream.instance and known.connection > stream.connection:
            return False
        self._streams[stream.node] = stream
        return True

    def counts(self, stream: Stream | None) -> bool:
        """It is the one that was let in last."""
        return stream is not None and self._streams.get(stream.node) is stream

    def leave(self, stream: Stream | None) -> bool:
        """The stream ended. True: the node has no other."""
        if stream is None or not self.counts(stream):
            return False
        del self._streams[stream.node]
        return True
