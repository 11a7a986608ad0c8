"""vLLM's KV tensors of one rank as runs of bytes, and the copies between them and the arena.

A layer's pieces are copied in one call, during which other threads run Python. On CUDA the arena's pages are locked and
copies run on a stream of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.models.utils import extract_layer_index

from upbeat_vllm.arena_pages import ArenaPages
from upbeat_vllm.geometry import Geometry
from upbeat_vllm.settings import Refused

#: Bytes are copied as words; pieces begin at multiples of their size. torch divides runs of more words among threads,
#: which the forward pass needs.
_WORD, _WORD_BYTES, _RUN_WORDS = torch.int64, 8, 16 << 10


class TorchBlocks:
    """Implements `Blocks`."""

    def __init__(self, caches: Mapping[str, torch.Tensor], geometry: Geometry, tp_rank: int) -> None:
        """Raises Refused when a block of a layer is not one contiguous run of its share's size."""
        by_number = sorted((extract_layer_index(name), tensor) for name, tensor in caches.items())
        numbers = [number for number, _ in by_number]
        self.layers = range(numbers[0], numbers[0] + len(numbers))
        if numbers != list(self.layers) or self.layers.stop > geometry.shape.layers:
            raise Refused(f"layers {numbers} of this rank are not neighbours among {geometry.shape.layers}")
        self.share_bytes = geometry.shape.piece_bytes // geometry.parts
        self.share_at = tp_rank // geometry.replicas * self.share_bytes
        self.saves = tp_rank % geometry.replicas == 0
        for number, tensor in by_number:
            stride = tensor.stride(0) * tensor.element_size()
            inner = sum((n - 1) * s for n, s in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)) + 1
            if stride != self.share_bytes or inner * tensor.element_size() != self.share_bytes:
                raise Refused(
                    f"a block of layer {number} takes {inner * tensor.element_size()} bytes at every {stride}, not one "
                    f"run of {self.share_bytes}; vLLM's KV layout must keep a block together (LBHNC)"
                )
        if self.share_bytes % _WORD_BYTES:
            raise Refused(f"this rank's share of a piece, {self.share_bytes} bytes, is no multiple of {_WORD_BYTES}")
        #: By layer: a row of words for each block.
        self._blocks = [_words_of(tensor, self.share_bytes) for _, tensor in by_number]
        self._cuda = self._blocks[0].is_cuda
        self._stream: Any = torch.cuda.Stream() if self._cuda else None  # type: ignore[no-untyped-call]
        self._after: Any = None
        self._arena: Any = None
        self._pages: ArenaPages | None = None

    def adopt(self, arena: memoryview) -> None:
        """See `Blocks`."""
        if self._pages is not None:
            self._pages.close()
        if self._cuda and self._arena is not None:
            torch.cuda.cudart().cudaHostUnregister(self._arena.data_ptr())  # type: ignore[no-untyped-call]
        self._arena = torch.frombuffer(arena[: arena.nbytes // _WORD_BYTES * _WORD_BYTES], dtype=_WORD)
        if self._cuda:
            torch.cuda.cudart().cudaHostRegister(self._arena.data_ptr(), arena.nbytes, 0)  # type: ignore[no-untyped-call]
        else:
            self._pages = ArenaPages(self._arena.data_ptr(), arena.nbytes)

    def computed(self) -> None:
        """See `Blocks`."""
        if self._cuda:
            self._after = torch.cuda.current_stream().record_event()

    def load(self, layer: int, pieces: Sequence[tuple[int, int]]) -> None:
        """See `Blocks`."""
        self._copy(layer, pieces, into=True)

    def save(self, layer: int, pieces: Sequence[tuple[int, int]]) -> None:
        """See `Blocks`."""
        self._copy(layer, pieces, into=False)

    def _copy(self, layer: int, pieces: Sequence[tuple[int, int]], into: bool) -> None:
        if not pieces:
            return
        blocks, words = self._blocks[layer - self.layers.start], self.share_bytes // _WORD_BYTES
        begins = [(offset + self.share_at) // _WORD_BYTES for _, offset in pieces]
        ours = [run for block, _ in pieces for run in torch.split(blocks[block], _RUN_WORDS)]
        theirs = [run for begin in begins for run in torch.split(self._arena[begin : begin + words], _RUN_WORDS)]
        with torch.cuda.stream(self._stream) if self._cuda else contextlib.nullcontext():
            if self._after is not None and not into:
                self._stream.wait_event(self._after)
            torch._foreach_copy_(ours if into else theirs, theirs if into else ours, non_blocking=True)
        if self._cuda:
            self._stream.synchronize()


def _words_of(tensor: torch.Tensor, share: int) -> torch.Tensor:
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    first = tensor.storage_offset() * tensor.element_size()
    return storage[first : first + tensor.shape[0] * share].view(_WORD).view(tensor.shape[0], share // _WORD_BYTES)
