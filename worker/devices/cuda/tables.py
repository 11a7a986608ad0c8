"""Inputs of a step's kernels besides weights and pages: page tables on the device, and the step's integers in one
upload.

Sequence i of a step uses row i of the tables. Only differences from the previous step are uploaded, so decode uploads
one column per sequence every `chunk_tokens` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from worker.devices.cuda.queue import Queue
from worker.devices.runner import Slice
from worker.memory.paged_kv import PagedKv


class PageTables:
    """Byte addresses of pages, `on_device[layer, row, chunk]` int64. Entries past a sequence's end are undefined."""

    def __init__(self, kv: PagedKv, queue: Queue, rows: int, chunks: int) -> None:
        self._kv, self._queue = kv, queue
        layers = kv.shape.layers
        self.rows, self.chunks = rows, chunks
        self.on_device = torch.zeros(layers, rows, chunks, dtype=torch.int64, device=queue.device)
        self._shown = np.full((rows, layers, chunks), -1, dtype=np.int64)  # page ids
        #: Columns uploaded so far.
        self.uploaded = 0

    def show(self, slices: Sequence[Slice]) -> None:
        """Sets row i to the pages of slice i. Call it within `queue.computing()`, with enough rows and chunks."""
        for row, s in enumerate(slices):
            chunks = s.pages.shape[1]
            shown = self._shown[row, :, :chunks]
            if np.array_equal(shown, s.pages):
                continue
            first = int(np.argmax((shown != s.pages).any(0)))
            shown[:, first:] = s.pages[:, first:]
            addresses = self._kv.offsets(s.pages[:, first:]) + self._kv.span.address
            self.on_device[:, row, first:chunks] = torch.from_numpy(addresses).to(self._queue.device)
            self.uploaded += chunks - first


class StepInputs:
    """A step's int32 arrays in one buffer, uploaded at once."""

    def __init__(self, queue: Queue, capacity: int) -> None:
        self._queue = queue
        self.on_device = torch.zeros(capacity, dtype=torch.int32, device=queue.device)

    def upload(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Device views of `arrays`, each `[n, ...]` of integers. The next upload overwrites them. Arrays of the same
        shapes get the same addresses."""
        total = sum(-(-a.size // 4) * 4 for a in arrays)
        if total > self.on_device.numel():
            raise ValueError(f"a step of {total} numbers does not fit {self.on_device.numel()}")
        staged = self._queue.host(max(total, 1), dtype=torch.int32)
        flat, views, at = staged.numpy(), [], 0
        for a in arrays:
            flat[at : at + a.size] = a.ravel()
            views.append(self.on_device[at : at + a.size].view(a.shape))
            at += -(-a.size // 4) * 4  # 16-byte aligned
        self.on_device[:total].copy_(staged[:total], non_blocking=True)
        return views
