"""Which of the streams of one name, of a node's store or a device's worker, counts: the latest connection of the process that said hello
last."""

from __future__ import annotations

from typing import NamedTuple


class Stream(NamedTuple):
    """One stream of reports. name: of the node or device; instance: of the process, new at every start; connection: counts its streams from
    1, 0: not counted."""

    name: str
    instance: str
    connection: int


class Attached:
    """The streams that count, at most one a name."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}

    def join(self, stream: Stream) -> bool:
        """A hello came. False: it is late, as a newer stream of the same process is here."""
        known = self._streams.get(stream.name)
        if known is not None and known.instance == stream.instance and known.connection > stream.connection:
            return False
        self._streams[stream.name] = stream
        return True

    def counts(self, stream: Stream | None) -> bool:
        """It is the one that was let in last."""
        return stream is not None and self._streams.get(stream.name) is stream

    def leave(self, stream: Stream | None) -> bool:
        """The stream ended. True: the name has no other."""
        if stream is None or not self.counts(stream):
            return False
        del self._streams[stream.name]
        return True
