"""Copies a model's weights into its spans, layer by layer, so that a prefill can begin while later layers still come.

Prism, section 5.3, loads in pieces of about 30 MB from pinned host memory. Copy threads take pieces in order, map their
granules and copy them, so that the thread that runs steps does neither; a fence for each span says when it is whole.
Pieces may also come over other devices' links (`worker.models.other_links`). Without an image one thread packs each
span from the checkpoint instead.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contracts.errors import UpbeatError
from runtime import telemetry
from worker.core.link_plan import LinkPlan
from worker.memory import mappings
from worker.models.image import HostImage
from worker.models.other_links import LinkBusy, OtherLinks
from worker.models.weights import WeightSpan

log = telemetry.logger("worker.models.filling")
#: Bytes of a piece at most, if a granule is not larger (Prism, section 5.3).
PIECE_BYTES = 30 << 20
#: A lane without a piece asks again after this time, in seconds.
_ASK_S = 0.01

#: copy(to, source, bytes): from host memory to the device's; returns when done. Any thread.
Copy = Callable[[int, int, int], object]


def host_copy(to: int, source: int, bytes_: int) -> None:
    """A `Copy` within host memory."""
    mappings.populate(to, bytes_)  # where the system cannot, the copy faults
    ctypes.memmove(to, source, bytes_)


class FillFailed(UpbeatError):
    """The weights could not be brought onto the device."""


@dataclass(slots=True)
class _Piece:
    """Granules of a span, of `bytes` in all. source, to: addresses of its bytes. shown: its granules are mapped."""

    number: int
    span: WeightSpan
    first: int
    granules: int
    source: int
    to: int
    bytes: int
    shown: bool = False

    def show(self) -> None:
        if not self.shown:
            self.span.span.show(self.first, self.granules)
            self.shown = True


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
        others: OtherLinks | None = None,
    ) -> None:
        """Begins at once; the spans have taken their granules. landed: called on a copy thread when a span is whole,
        and at the end. threads: that copy from the image. others: links of other devices that it may use."""
        self._spans, self._image, self._copy, self._landed = spans, image, copy, landed
        self.bytes = sum(span.packed_bytes for span in spans)
        #: Leading spans that are whole.
        self.ready = 0
        self.failed: BaseException | None = None
        self.began_s, self.seconds = time.monotonic(), 0.0
        self._pieces = [piece for number in range(len(spans)) for piece in self._cut(number)]
        #: Pieces of each span that are not here yet.
        self._left = [0] * len(spans)
        for piece in self._pieces:
            self._left[piece.number] += 1
        self._others = others = others if others is not None and image is not None else OtherLinks()
        own = [0] * (threads if image is not None else 1)
        self._plan = LinkPlan([piece.bytes for piece in self._pieces], own + others.lanes, others.paces)
        lock = threading.RLock()
        self._whole, self._more = threading.Condition(lock), threading.Condition(lock)
        self._cancelled = False
        for lane, link in enumerate(own + others.lanes):
            bring = self._bring if link == 0 else self._bring_through
            threading.Thread(target=bring, args=(lane, link), name="weights", daemon=True).start()

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

    @property
    def carried(self) -> list[int]:
        """Bytes that came over each link, the device's own first."""
        return list(self._plan.carried)

    def wait(self, span: int) -> None:
        """Wait until this span is whole. Raises FillFailed."""
        if self.ready > span:
            return
        with self._whole:
            self._whole.wait_for(lambda: self.ready > span or self.failed is not None)
        if self.ready <= span:
            raise FillFailed(f"weights were not loaded: {self.failed}")

    def cancel(self) -> None:
        """Stop; when this returns, nothing is written to the device any more."""
        with self._whole:
            self._cancelled = True
            self._more.notify_all()
            self._whole.wait_for(lambda: not self._plan.writing)

    # ---- copying -----------------------------------------------------------------------------------------------
    def _cut(self, number: int) -> list[_Piece]:
        """The pieces of a span; without an image, the span."""
        span = self._spans[number]
        size, granules = span.memory.granule_bytes, span.span.granules
        source, to = self._image.addresses[number] if self._image else 0, span.span.address
        most = max(PIECE_BYTES // size, 1) if self._image else granules
        return [
            _Piece(
                number,
                span,
                first,
                min(most, granules - first),
                source + first * size,
                to + first * size,
                min(most * size, span.packed_bytes - first * size),
            )
            for first in range(0, granules, most)
        ]

    def _bring(self, lane: int, link: int) -> None:
        """Brings pieces over the device's own link, or packs them."""
        try:
            while (piece := self._next(lane)) is not None:
                piece.show()
                if self._image is not None:
                    self._copy(piece.to, piece.source, piece.bytes)
                else:
                    piece.span.pack_into(piece.span.views)
                self._done(lane)
        except BaseException as error:
            log.exception("weights were not loaded")
            with self._whole:
                self.failed = self.failed or error
                self._plan.failed(lane)
                self._whole.notify_all()
                self._more.notify_all()
            self._landed()

    def _bring_through(self, lane: int, link: int) -> None:
        """Brings pieces over another device's link. If it fails, the other lanes bring the rest."""
        try:
            with self._others.buffer(link, max(piece.bytes for piece in self._pieces)) as buffer:
                while (piece := self._next(lane)) is not None:
                    buffer.stage(piece.source, piece.bytes)
                    if self._claim(lane):
                        piece.show()
                        buffer.deliver(piece.to, piece.bytes)
                        self._done(lane)
        except BaseException as error:
            if not isinstance(error, LinkBusy):
                log.warning("weights do not come this way", link=self._others.links[link - 1].name, error=str(error))
            with self._whole:
                self._plan.failed(lane)
                self._whole.notify_all()
                self._more.notify_all()

    def _next(self, lane: int) -> _Piece | None:
        """What the lane is to bring; waits while others may still give something back. None: no more."""
        with self._more:
            while not (self._cancelled or self.failed or self._plan.over):
                if (number := self._plan.take(lane, time.monotonic())) is not None:
                    return self._pieces[number]
                if self._plan.out(lane):
                    break
                self._more.wait(_ASK_S)
        return None

    def _claim(self, lane: int) -> bool:
        with self._whole:
            return not self._cancelled and self.failed is None and self._plan.claim(lane, time.monotonic())

    def _done(self, lane: int) -> None:
        with self._whole:
            self._left[self._pieces[self._plan.done(lane, time.monotonic())].number] -= 1
            before = self.ready
            while self.ready < len(self._spans) and not self._left[self.ready]:
                self.ready += 1
            if self.ready == len(self._spans):
                self.seconds = time.monotonic() - self.began_s
                self._more.notify_all()
            moved = self.ready > before
            self._whole.notify_all()
        if moved:
            self._landed()
