"""Copy and compute streams of a CUDA device, and marks in them: the seam that lets a test run the copier without a device."""

from __future__ import annotations

from typing import Protocol

import torch

from worker.core.pages import Pages
from worker.memory.cuda_driver import CudaDriver


class Mark(Protocol):
    """A place in a stream. Any thread."""

    def reached(self) -> bool:
        """Whether all that was queued before it has run."""
        ...

    def wait(self) -> None:
        """Return when it is reached."""
        ...


class Stream(Protocol):
    """Work in order. `copy` is one thread's; the rest any thread's."""

    def copy(self, to: Pages, source: Pages, bytes_: int) -> None:
        """Queue copies of `bytes_` each between addresses, int64 `[n]`, in any order among themselves."""
        ...

    def mark(self) -> Mark:
        """A mark behind what is queued so far."""
        ...

    def wait_for(self, mark: Mark) -> None:
        """What is queued from now on runs after `mark`, of whatever stream."""
        ...


class CudaMark:
    """An event that was recorded."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # whoever waits sleeps
        self.event.record(stream)

    def reached(self) -> bool:
        """See `Mark.reached`."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """See `Mark.wait`."""
        self.event.synchronize()


class CudaStream:
    """A torch stream, its own unless one is given."""

    def __init__(self, driver: CudaDriver, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._driver, self._stream = driver, stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, to: Pages, source: Pages, bytes_: int) -> None:
        """See `Stream.copy`."""
        self._driver.copy(to.tolist(), source.tolist(), bytes_, self._stream.cuda_stream)

    def mark(self) -> Mark:
        """See `Stream.mark`."""
        return CudaMark(self._stream)

    def wait_for(self, mark: Mark) -> None:
        """See `Stream.wait_for`."""
        assert isinstance(mark, CudaMark)
        self._stream.wait_event(mark.event)
