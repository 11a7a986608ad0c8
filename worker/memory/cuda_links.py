"""Copies to a CUDA device through a buffer on another one: over that device's link to host memory, then over the link
between the two (Prism, section 5.3)."""

from __future__ import annotations

import threading
from typing import Protocol

import numpy as np

from worker.memory.cuda_streams import PeerStream, Stream


class PeerMemory(Protocol):
    """Memory of the other device, by `worker.memory.cuda_driver.CudaDriver`."""

    def allocate(self, bytes_: int) -> int:
        """Allocates memory and returns its address. Raises CudaError."""
        ...

    def deallocate(self, address: int) -> None:
        """Frees it."""
        ...


class CudaLink:
    """See `worker.models.other_links.Link`."""

    def __init__(self, name: str, peer: PeerMemory, staging: Stream, delivering: PeerStream) -> None:
        """staging: a stream of the other device, whose memory is `peer`; delivering: one of this device."""
        self.name, self._peer, self._staging, self._delivering = name, peer, staging, delivering
        self._queueing = threading.Lock()

    def buffer(self, bytes_: int) -> CudaBuffer:
        """See `Link.buffer`. Raises CudaError."""
        return CudaBuffer(self, self._peer.allocate(bytes_))

    def _stage(self, buffer: int, source: int, bytes_: int) -> None:
        with self._queueing:
            self._staging.copy(np.array([buffer]), np.array([source]), bytes_)
            mark = self._staging.mark()
        mark.wait()

    def _deliver(self, to: int, buffer: int, bytes_: int) -> None:
        with self._queueing:
            self._delivering.copy_from_peer(to, buffer, bytes_)
            mark = self._delivering.mark()
        mark.wait()


class CudaBuffer:
    """See `worker.models.other_links.Buffer`."""

    def __init__(self, link: CudaLink, address: int) -> None:
        self._link, self._address = link, address

    def stage(self, source: int, bytes_: int) -> None:
        """See `Buffer.stage`."""
        self._link._stage(self._address, source, bytes_)

    def deliver(self, to: int, bytes_: int) -> None:
        """See `Buffer.deliver`."""
        self._link._deliver(to, self._address, bytes_)

    def close(self) -> None:
        """See `Buffer.close`."""
        self._link._peer.deallocate(self._address)
