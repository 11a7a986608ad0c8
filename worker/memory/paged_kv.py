"""The paged KV cache of one model: addresses of pages, and how attention reads and writes them.

One page holds one piece, byte for byte: `[kv_heads, 2 (K, V), chunk_tokens, head_dim]`. Memory is taken and given back
in slabs, the smallest number of granules that pages fill with at most 5 % waste. Page id = slab * pages_per_slab +
index.

`worker.core` decides who owns a page and which slabs are mapped.
"""

from __future__ import annotations

import numpy as np
import torch

from contracts.kv import KvShape
from contracts.memory.slab_size import slab_granules
from worker.core.granules import Owner
from worker.memory.device_memory import DeviceMemory, Span
from worker.memory.tensors import bytes_at, tensor_at


class PagedKv:
    """A model's slabs, contiguous in `span`, which maps nothing yet. Slabs are mapped one by one with granules of the
    span's owner.

    Invariant: a slab is mapped completely or not at all. Access to a page of an unmapped slab kills the process.
    """

    def __init__(self, span: Span, shape: KvShape) -> None:
        """Raises ValueError for a span that holds no slab, and for pieces that are not K and V of heads."""
        if not shape.is_of_heads:
            raise ValueError(
                f"pieces of {shape.piece_bytes} bytes are not K and V of {shape.kv_heads} heads: these pages hold "
                "nothing else"
            )
        self.span, self.memory = span, span.memory
        self.shape = shape
        self.dtype: torch.dtype = getattr(torch, shape.dtype)
        self.page_bytes = shape.piece_bytes
        self.slab_granules = slab_granules(self.page_bytes, self.memory.granule_bytes)
        self.slab_bytes = self.slab_granules * self.memory.granule_bytes
        self.pages_per_slab = self.slab_bytes // self.page_bytes
        self.slab_count = span.granules // self.slab_granules
        if self.slab_count < 1:
            raise ValueError(f"a span of {span.granules} granules holds no slab of {self.slab_granules}")
        self.max_pages = self.slab_count * self.pages_per_slab
        #: All bytes; only in host memory.
        self._bytes = (
            bytes_at(span.address, self.slab_count * self.slab_bytes) if self.memory.device.type == "cpu" else None
        )
        self._build_views()

    @classmethod
    def reserve(cls, memory: DeviceMemory, shape: KvShape, pages: int, owner: Owner) -> PagedKv:
        """A cache over a new span, with address space for `pages` pages, rounded up to whole slabs."""
        if pages < 1:
            raise ValueError(f"pages must be at least 1, got {pages}")
        granules = slab_granules(shape.piece_bytes, memory.granule_bytes)
        slab_bytes = granules * memory.granule_bytes
        return cls(memory.reserve(-(-pages // (slab_bytes // shape.piece_bytes)) * slab_bytes, owner), shape)

    def _build_views(self) -> None:
        """Strided views over the whole range: pages, runs (K or V of one head of one page) and tokens within runs."""
        s = self.shape
        self._uniform = self.slab_bytes == self.pages_per_slab * self.page_bytes
        elements = tensor_at(
            self.span.address,
            self.dtype,
            [self.slab_count * self.slab_bytes // self.dtype.itemsize],
            self.memory.device,
        )
        page, run, slab = (
            s.kv_heads * 2 * s.chunk_tokens * s.head_dim,
            s.chunk_tokens * s.head_dim,
            self.slab_bytes // self.dtype.itemsize,
        )
        self.view = torch.as_strided(
            elements,
            (self.slab_count, self.pages_per_slab, s.kv_heads, 2, s.chunk_tokens, s.head_dim),
            (slab, page, 2 * run, run, s.head_dim, 1),
        )
        runs = self.pages_per_slab * s.kv_heads * 2
        self._runs = torch.as_strided(elements, (self.slab_count, runs, run), (slab, run, 1))
        self._tokens = torch.as_strided(
            elements, (self.slab_count, runs * s.chunk_tokens, s.head_dim), (slab, s.head_dim, 1)
        )
        if self._uniform:
            #: `[max_pages, kv_heads, 2, chunk_tokens, head_dim]`; only where slabs have no waste.
            self.flat = self.view.view(self.max_pages, *self.view.shape[2:])
            self._runs = self._runs.view(-1, run)
            self._tokens = self._tokens.view(-1, s.head_dim)
        self._scratch = torch.empty(0, run, dtype=self.dtype, device=self.memory.device)
        # Offsets of a page's runs: [kv_heads, 2, 1].
        self._run_of = torch.arange(s.kv_heads * 2, device=self.memory.device).view(s.kv_heads, 2, 1)

    @property
    def mapped_slabs(self) -> list[int]:
        """The mapped slabs, ascending."""
        return [slab for slab in range(self.slab_count) if self._is_mapped(slab)]

    def _is_mapped(self, slab: int) -> bool:
        return self.span.shows(slab * self.slab_granules, 1)

    def map_slab(self, slab: int) -> None:
        """Takes and maps granules for `slab`; its pages have undefined content. Raises OutOfGranules, changing nothing,
        when too few are free."""
        if self._is_mapped(slab):
            raise ValueError(f"slab {slab} is mapped already")
        self.span.map(slab * self.slab_granules, self.memory.take(self.slab_granules, self.span.owner))

    def unmap_slab(self, slab: int, *, keep: bool = False) -> None:
        """Gives the granules of `slab` back; their content is lost. keep: their memory stays allocated (warm)."""
        if not self._is_mapped(slab):
            raise ValueError(f"slab {slab} is not mapped")
        self.memory.give(self.span.unmap(slab * self.slab_granules, self.slab_granules), keep=keep)

    def offsets(self, pages: np.ndarray) -> np.ndarray:
        """Byte offset of each page from `span.address`, int64, of the same shape."""
        found: np.ndarray
        if self._uniform:
            found = pages * self.page_bytes
            return found
        slabs, index = np.divmod(pages, self.pages_per_slab)
        found = slabs * self.slab_bytes + index * self.page_bytes
        return found

    def page_bytes_view(self, page: int) -> np.ndarray:
        """The page's bytes, uint8 `[page_bytes]`, writable, without a copy. Raises ValueError unless pages are in host
        memory."""
        if self._bytes is None:
            raise ValueError(f"pages are on {self.memory.device}; a copier moves their bytes")
        slab, index = divmod(page, self.pages_per_slab)
        at = slab * self.slab_bytes + index * self.page_bytes
        return self._bytes[at : at + self.page_bytes]

    def gather(self, page_ids: torch.Tensor) -> torch.Tensor:
        """A copy of the pages `page_ids [n]`: `[n, kv_heads, 2, chunk_tokens, head_dim]`."""
        if self._uniform:
            return self.flat.index_select(0, page_ids)
        return self.view[page_ids // self.pages_per_slab, page_ids % self.pages_per_slab]

    def gather_heads(self, page_ids: torch.Tensor) -> torch.Tensor:
        """A copy of the pages `page_ids [batch, n]` for attention: `[batch, kv_heads, 2, n * chunk_tokens, head_dim]`.

        The next call overwrites it: a scratch buffer avoids page faults of fresh memory.
        """
        s = self.shape
        batch, n = page_ids.shape
        pages = page_ids.view(batch, 1, 1, n)
        per_page = s.kv_heads * 2
        if self._uniform:
            index = (pages * per_page + self._run_of).view(-1)
            if self._scratch.shape[0] < index.shape[0]:
                with torch.inference_mode(False):  # so that the scratch is usable outside of a step
                    self._scratch = self._runs.new_empty(1 << (index.shape[0] - 1).bit_length(), self._runs.shape[1])
            runs = self._scratch[: index.shape[0]]
            torch.index_select(self._runs, 0, index, out=runs)
        else:
            slabs, index = pages // self.pages_per_slab, pages % self.pages_per_slab
            runs = self._runs[slabs, index * per_page + self._run_of]
        return runs.view(batch, s.kv_heads, 2, n * s.chunk_tokens, s.head_dim)

    def write(self, page_ids: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes token i's `k[i]`, `v[i]` (`[n, kv_heads, head_dim]`) at `offsets[i]` of page `page_ids[i]`."""
        s = self.shape
        n = page_ids.shape[0]
        both = torch.stack((k, v), dim=2).view(n * s.kv_heads * 2, s.head_dim)
        tokens = (self._run_of.view(1, -1) * s.chunk_tokens) + offsets.view(n, 1)
        per_page = s.kv_heads * 2 * s.chunk_tokens
        if self._uniform:
            self._tokens.index_copy_(0, (page_ids.view(n, 1) * per_page + tokens).view(-1), both)
        else:
            slabs = (page_ids // self.pages_per_slab).repeat_interleave(s.kv_heads * 2)
            inside = (page_ids % self.pages_per_slab).view(n, 1) * per_page + tokens
            self._tokens[slabs, inside.view(-1)] = both

    def clear(self, page_ids: torch.Tensor) -> None:
        """Zeroes whole pages. Needed for pages that are written in part: attention masks tokens past a sequence's end,
        but a masked NaN is still NaN."""
        if self._uniform:
            self.flat.index_fill_(0, page_ids, 0)
        else:
            self.view[page_ids // self.pages_per_slab, page_ids % self.pages_per_slab] = 0

    def close(self) -> None:
        """Gives all memory back. Views become invalid."""
        self.span.close()
