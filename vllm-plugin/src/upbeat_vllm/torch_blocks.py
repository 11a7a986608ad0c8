"""vLLM's KV tensors of one rank as runs of bytes, and the copies between them and the arena.

On the host bytes are copied by address. On CUDA the arena's pages are locked and copies run on a stream of their own;
the forward pass waits for their end on its stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.models.utils import extract_layer_index

from upbeat_vllm.geometry import Geometry
from upbeat_vllm.settings import Refused


class TorchBlocks:
    """Implements `rank_side.Blocks`."""

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
        self._tensors = [tensor for _, tensor in by_number]
        self._addresses = []
        for number, tensor in by_number:
            stride = tensor.stride(0) * tensor.element_size()
            inner = sum((n - 1) * s for n, s in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)) + 1
            if stride != self.share_bytes or inner * tensor.element_size() != self.share_bytes:
                raise Refused(
                    f"a block of layer {number} takes {inner * tensor.element_size()} bytes at every {stride}, not one "
                    f"run of {self.share_bytes}; vLLM's KV layout must keep a block together (LBHNC)"
                )
            self._addresses.append(tensor.data_ptr())
        self._cuda = self._tensors[0].is_cuda
        self._stream: Any = torch.cuda.Stream() if self._cuda else None  # type: ignore[no-untyped-call]
        self._after: Any = None
        self._arena_address = 0
        self._arena: Any = None
        self._views: list[torch.Tensor] = []

    def adopt(self, arena: memoryview) -> None:
        """See `Blocks`."""
        if self._cuda and self._arena_address:
            torch.cuda.cudart().cudaHostUnregister(self._arena_address)  # type: ignore[no-untyped-call]
        self._arena = torch.frombuffer(arena, dtype=torch.uint8)
        self._arena_address = self._arena.data_ptr()
        if self._cuda:
            torch.cuda.cudart().cudaHostRegister(self._arena_address, self._arena.numel(), 0)  # type: ignore[no-untyped-call]
            self._views = [_bytes_of(tensor, self.share_bytes) for tensor in self._tensors]

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
        at = layer - self.layers.start
        if self._cuda:
            with torch.cuda.stream(self._stream):
                if self._after is not None and not into:
                    self._stream.wait_event(self._after)
                for block, offset in pieces:
                    ours = self._views[at][block]
                    theirs = self._arena[offset + self.share_at : offset + self.share_at + self.share_bytes]
                    ours.copy_(theirs, non_blocking=True) if into else theirs.copy_(ours, non_blocking=True)
            self._stream.synchronize()
            return
        base, share = self._addresses[at], self.share_bytes
        for block, offset in pieces:
            inside, outside = base + block * share, self._arena_address + offset + self.share_at
            ctypes.memmove(inside if into else outside, outside if into else inside, share)


def _bytes_of(tensor: torch.Tensor, share: int) -> torch.Tensor:
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    first = tensor.storage_offset() * tensor.element_size()
    return storage[first : first + tensor.shape[0] * share].view(tensor.shape[0], share)
