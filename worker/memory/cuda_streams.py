"""Streams of a CUDA device and marks (events) in them, behind an interface so that tests need no device."""

from __future__ import annotations

from typing import Protocol

import torch

from worker.core.pages import Pages
from worker.memory.cuda_driver import CudaDriver


class Mark(Protocol):
    """A point in a stream. Any thread."""

    def reached(self) -> bool:
        """Whether all work queued before it has run."""
        ...

    def wait(self) -> None:
        """Returns when it is reached."""
        ...


class Stream(Protocol):
    """Work in order. One thread calls `copy`; any thread may call the rest."""

    def copy(self, to: Pages, source: Pages, bytes_: int) -> None:
        """Queues copies of `bytes_` each between addresses (int64 `[n]`), in any order among themselves."""
        ...

    def mark(self) -> Mark:
        """A mark after the work queued so far."""
        ...

    def wait_for(self, mark: Mark) -> None:
        """Work queued from now on runs after `mark`, which may be of another stream."""
        ...


class PeerStream(Stream, Protocol):
    """A stream that also copies from one other device."""

    def copy_from_peer(self, to: int, source: int, bytes_: int) -> None:
        """Queues a copy from the other device's memory to this one's."""
        ...


class CudaMark:
    """A recorded event."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # waiting threads sleep
        self.event.record(stream)

    def reached(self) -> bool:
        """See `Mark.reached`."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """See `Mark.wait`."""
        self.event.synchronize()


class CudaStream:
    """A torch stream; a new one unless given. peer: the device for `copy_from_peer`; by default the same one."""

    def __init__(
        self,
        driver: CudaDriver,
        device: torch.device,
        stream: torch.cuda.Stream | None = None,
        peer: CudaDriver | None = None,
    ) -> None:
        self._driver, self._peer = driver, peer or driver
        self._stream = stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, to: Pages, source: Pages, bytes_: int) -> None:
        """See `Stream.copy`."""
        self._driver.copy(to.tolist(), source.tolist(), bytes_, self._stream.cuda_stream)

    def copy_from_peer(self, to: int, source: int, bytes_: int) -> None:
        """See `PeerStream.copy_from_peer`."""
        self._driver.copy_from(self._peer, to, source, bytes_, self._stream.cuda_stream)

    def mark(self) -> Mark:
        """See `Stream.mark`."""
        return CudaMark(self._stream)

    def wait_for(self, mark: Mark) -> None:
        """See `Stream.wait_for`."""
        assert isinstance(mark, CudaMark)
        self._stream.wait_event(mark.event)
