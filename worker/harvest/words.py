"""What worker and trainer tell each other without a message: words in a page of shared memory.

Each word has one writer. Reads and writes of an aligned word are atomic.
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum

import numpy as np

#: Most lanes of a trainer.
MOST_LANES = 64


class Word(IntEnum):
    """A word's place. The worker writes the first ones, the trainer the others."""

    #: Lanes that may compute now.
    LANES = 0
    #: Not 0: the job ends after its next checkpoint (1), or at once (2).
    STOP = 1
    #: Units computed.
    UNITS = 8
    #: Nanoseconds of the longest unit since the job began.
    LONGEST_NS = 9
    #: From here on, of each lane: when its unit began (CLOCK_MONOTONIC, ns); 0: it is in none.
    BEGAN_NS = 64


class Words:
    """See the module. fd: of the page, for the other process."""

    def __init__(self, fd: int | None = None) -> None:
        """fd: of a page that another process made; it stays open. None: makes one."""
        self.fd = os.memfd_create("upbeat-trainer", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, mmap.PAGESIZE)
        self._page = mmap.mmap(self.fd, mmap.PAGESIZE)
        self._words = np.frombuffer(self._page, np.int64)

    def __getitem__(self, word: int) -> int:
        return int(self._words[word])

    def __setitem__(self, word: int, value: int) -> None:
        self._words[word] = value

    def close(self) -> None:
        """Unmaps and closes the page."""
        del self._words
        self._page.close()
        os.close(self.fd)
