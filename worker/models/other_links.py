"""Loading weights through other devices' links to host memory too (Prism, section 5.3).

A link is slow beside a device's memory and the links between devices. So pieces are also copied to small buffers on
other devices, each over its own link, and from there to this device. Which piece goes where: `worker.core.link_plan`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

from contracts.errors import UpbeatError
from worker.core.link_plan import LinkPaces

#: Lanes of another device's link: while one buffer is read, the other is filled.
LANES = 2


class Buffer(Protocol):
    """Memory on another device for one piece. One thread uses it."""

    def stage(self, source: int, bytes_: int) -> None:
        """Copies from host memory into the buffer; returns when done. Writes nothing else."""
        ...

    def deliver(self, to: int, bytes_: int) -> None:
        """Copies from the buffer to this device; returns when done."""
        ...

    def close(self) -> None:
        """Frees it."""
        ...


class Link(Protocol):
    """Another device's link. name: for logs."""

    name: str

    def buffer(self, bytes_: int) -> Buffer:
        """A new buffer. Raises UpbeatError when that device has no memory for it. Any thread."""
        ...


class LinkBusy(UpbeatError):
    """Another load uses the link."""


class OtherLinks:
    """The links of other devices that a device's loads may use; link n of the plan is `links[n - 1]`. Buffers exist
    only during a load, at most LANES at a link. Any thread."""

    def __init__(self, links: Sequence[Link] = ()) -> None:
        self.links = tuple(links)
        #: Of the device's own link, then of these.
        self.paces = LinkPaces(1 + len(self.links))
        self._used = [0] * len(self.links)
        self._changed = threading.Condition()

    @property
    def lanes(self) -> list[int]:
        """The number of each lane's link."""
        return [number for number in range(1, 1 + len(self.links)) for _ in range(LANES)]

    @contextlib.contextmanager
    def buffer(self, number: int, bytes_: int) -> Iterator[Buffer]:
        """A buffer at link `number`. Raises LinkBusy, and what `Link.buffer` raises."""
        link = self.links[number - 1]
        with self._changed:
            if self._used[number - 1] == LANES:
                raise LinkBusy(f"another load uses {link.name}")
            self._used[number - 1] += 1
        try:
            made = link.buffer(bytes_)
            try:
                yield made
            finally:
                made.close()
        finally:
            with self._changed:
                self._used[number - 1] -= 1
                self._changed.notify_all()

    def settled(self, timeout_s: float) -> bool:
        """Whether no buffer is in use, waiting for that at most so long: staging reads host memory."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(self._used), timeout_s)
