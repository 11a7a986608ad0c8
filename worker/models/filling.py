"""Copies a model's weights into its spans, layer by layer, so that a prefill can begin while later layers still come.

Prism, section 5.3, loads in pieces of about 30 MB from pinned host memory. Copy threads take pieces in order, map their
granules and copy them, so that the thread that runs steps does neither; a fence for each span says when it is whole.
Without an image one thread packs each span from the checkpoint instead.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from contracts.errors import UpbeatError
from runtime import telemetry
from worker.memory import mappings
from worker.models.image import HostImage
from worker.models.weights import WeightSpan

log = telemetry.logger("worker.models.filling")
#: Bytes of a piece at most, if a granule is not larger (Prism, section 5.3).
PIECE_BYTES = 30 << 20

#: copy(to, source, bytes): from host memory to the device's; returns when done. Any thread.
Copy = Callable[[int, int, int], object]


def host_copy(to: int, source: int, bytes_: int) -> None:
    """A `Copy` within host memory."""
    mappings.populate(to, bytes_)  # where the system cannot, the copy faults
    ctypes.memmove(to, source, bytes_)


class FillFailed(UpbeatError):
    """The weights could not be brought onto the device."""


class Filling:
    """One model's weights on their way. Attributes may be read on any thread."""

    def __init__(
        self,
        spans: Sequence[WeightSpan],
        image: HostImage | None,
        landed: Callable[[], object],
        *,
        copy: Copy = host_copy,
        threads: int = 1,
    ) -> None:
        """Begins at once; the spans have taken their granules. landed: called on a copy thread when a span is whole,
        and at the end. threads: that copy from the image."""
        self._spans, self._image, self._copy, self._landed = spans, image, copy, landed
        self.bytes = sum(span.packed_bytes for span in spans)
        #: Leading spans that are whole.
        self.ready = 0
        self.failed: BaseException | None = None
        self.began_s, self.seconds = time.monotonic(), 0.0
        #: Pieces of each span that are not here yet.
        self._left = [len(self._cuts(span)) for span in spans]
        self._whole = threading.Condition()
        self._cancelled = False
        self._work = self._copies() if image is not None else self._packs()
        self._taking = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, name="weights", daemon=True)
            for _ in range(threads if image is not None else 1)
        ]
        for thread in self._threads:
            thread.start()

    def __len__(self) -> int:
        return len(self._spans)

    @property
    def layerwise(self) -> bool:
        """Whether a step may begin before all is here: copies from host memory do not fail."""
        return self._image is not None

    @property
    def over(self) -> bool:
        """All is here, or it failed."""
        return self.ready == len(self._spans) or self.failed is not None

    @property
    def span_s(self) -> float:
        """Mean time of a span so far; 0: unknown."""
        return (time.monotonic() - self.began_s) / self.ready if self.ready else 0.0

    def wait(self, span: int) -> None:
        """Wait until this span is whole. Raises FillFailed."""
        if self.ready > span:
            return
        with self._whole:
            self._whole.wait_for(lambda: self.ready > span or self.failed is not None)
        if self.ready <= span:
            raise FillFailed(f"weights were not loaded: {self.failed}")

    def cancel(self) -> None:
        """Stop; when this returns, nothing is written any more."""
        self._cancelled = True
        for thread in self._threads:
            thread.join()

    # ---- copying -----------------------------------------------------------------------------------------------
    def _cuts(self, span: WeightSpan) -> range:
        """First granules of the pieces of a span."""
        granules = span.span.granules
        return range(0, granules, max(PIECE_BYTES // span.memory.granule_bytes, 1) if self._image else granules)

    def _copies(self) -> Iterator[tuple[int, Callable[[], object]]]:
        assert self._image is not None
        for number, (span, source) in enumerate(zip(self._spans, self._image.addresses, strict=True)):
            cuts = self._cuts(span)
            for first in cuts:
                yield number, functools.partial(self._bring, span, source, first, cuts.step)

    def _bring(self, span: WeightSpan, source: int, first: int, most: int) -> None:
        granule = span.memory.granule_bytes
        span.span.show(first, min(most, span.span.granules - first))
        at = first * granule
        self._copy(span.span.address + at, source + at, min(most * granule, span.packed_bytes - at))

    def _packs(self) -> Iterator[tuple[int, Callable[[], object]]]:
        for number, span in enumerate(self._spans):
            yield number, functools.partial(self._pack, span)

    def _pack(self, span: WeightSpan) -> None:
        span.span.show(0, span.span.granules)
        span.pack_into(span.views)

    def _run(self) -> None:
        try:
            while not self._cancelled:
                with self._taking:
                    piece = next(self._work, None)
                if piece is None:
                    return
                number, act = piece
                act()
                self._done(number)
        except BaseException as error:
            log.exception("weights were not loaded")
            with self._whole:
                self.failed = error
                self._whole.notify_all()
            self._landed()

    def _done(self, number: int) -> None:
        with self._whole:
            self._left[number] -= 1
            before = self.ready
            while self.ready < len(self._spans) and not self._left[self.ready]:
                self.ready += 1
            if self.ready == len(self._spans):
                self.seconds = time.monotonic() - self.began_s
            moved = self.ready > before
            self._whole.notify_all()
        if moved:
            self._landed()
