"""The device of a run: memory, streams and a model with random weights made on the device."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from contracts.kv import KvShape
from runtime.model_config import ModelConfig, parse_config
from worker.core.granules import Owner, Use
from worker.devices.cuda.queue import CudaQueue, Queue
from worker.memory.copier import Arena, Copier, Fence, HostCopier, HostFence
from worker.memory.cuda_copier import CudaCopier
from worker.memory.cuda_driver import CudaDriver
from worker.memory.cuda_memory import cuda_memory
from worker.memory.cuda_streams import CudaStream
from worker.memory.cuda_weights import WeightCopies
from worker.memory.device_memory import DeviceMemory, host_memory
from worker.memory.paged_kv import PagedKv
from worker.models.filling import Copy, host_copy
from worker.models.image import Lock, no_lock
from worker.models.llama import RopeTable
from worker.models.load import Model
from worker.models.weights import SlotTable, TopWeights, WeightSpan, layer_parts, top_parts

GRANULE = 2 << 20
_LLAMA = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "rope_theta": 500_000.0}
#: The shape of an 8B model of the Llama family.
EIGHT_B = _LLAMA | {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 65_536,
}
TINY = _LLAMA | {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
}


class RandomCheckpoint:
    """Answers `layer_parts` and `top_parts` with random tensors of the right shapes; equal shapes share one tensor."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.tensors: dict[Any, torch.Tensor] = {}
        self._dtype, self._device = dtype, device

    def get(self, name: str, shape: list[int]) -> torch.Tensor:
        key = (*shape, name.endswith("norm.weight"))
        if key not in self.tensors:
            made = torch.randn(shape, dtype=self._dtype, device=self._device) * 0.02
            self.tensors[key] = made + 1 if key[-1] else made
        return self.tensors[key]

    def forget(self, tensor: torch.Tensor) -> None:
        pass


@dataclass(slots=True)
class Setting:
    """Everything a measurement needs. arena: host memory like the store's, page-locked by the copier."""

    config: ModelConfig
    model: Model
    kv: PagedKv
    queue: Queue
    copier: Copier
    fence: Fence
    arena: Arena
    driver: CudaDriver | None
    #: Copies weights, and page-locks where they come from.
    copy: Copy = host_copy
    lock: Lock = no_lock

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights read by a decode step: all but the embedding."""
        c, item = self.config, self.model.dtype.itemsize
        attention = (2 * c.heads + 2 * c.kv_heads) * c.head_dim * c.hidden_size
        return (c.layers * (attention + 3 * c.hidden_size * c.intermediate_size) + c.vocab_size * c.hidden_size) * item


def make(rehearse: bool, arena_gib: float) -> Setting:
    """Make the setting on CUDA device 0 with half of its free memory; in a rehearsal, a tiny model on the CPU."""
    config = parse_config(TINY if rehearse else EIGHT_B)
    chunk, dtype = (16, torch.float32) if rehearse else (64, torch.bfloat16)
    driver: CudaDriver | None = None
    if rehearse:
        from tests.gpu.harness import HostQueue

        queue: Queue = HostQueue()
        memory: DeviceMemory = host_memory(16 << 20, 64 << 10)
    else:
        queue, driver = CudaQueue(), CudaDriver()
        memory = cuda_memory(driver, driver.free_bytes()[0] // 2 // GRANULE * GRANULE, GRANULE, queue.device)
    weights = Owner(Use.WEIGHTS, "bench")
    checkpoint: Any = RandomCheckpoint(dtype, queue.device)
    spans = [WeightSpan(memory, weights, layer_parts(checkpoint, config, n), dtype) for n in range(config.layers)]
    top = WeightSpan(memory, weights, top_parts(checkpoint, config), dtype)
    views, layers = top.load(), SlotTable(spans)
    for n in range(config.layers):
        layers.load_layer(n)
    checkpoint.tensors.clear()
    shape = KvShape.of_heads(
        bytes(32), config.layers, config.kv_heads, config.head_dim, chunk, str(dtype).removeprefix("torch.")
    )
    model = Model(
        config=config,
        shape=shape,
        dtype=dtype,
        layers=layers,
        top=TopWeights(views["embedding"], views["norm"], views["head"]),
        rope=RopeTable(config, dtype),
        max_tokens=config.max_tokens,
        eos_ids=set(),
        spans=[top, *spans],
        weight_bytes=0,
    )
    kv = PagedKv.reserve(
        memory, shape, memory.free * memory.granule_bytes // shape.piece_bytes - 1, Owner(Use.KV, "bench")
    )
    slabs = memory.free // kv.slab_granules
    for slab in range(min(slabs, kv.slab_count)):
        kv.map_slab(slab)
        kv.view[slab].normal_()
    arena = np.frombuffer(mmap.mmap(-1, int(arena_gib * 2**30)), dtype=np.uint8)
    arena[:: mmap.PAGESIZE] = 1
    if driver is None:
        return Setting(config, model, kv, queue, HostCopier(kv), HostFence(), arena, None)
    assert isinstance(queue, CudaQueue)
    streams = (
        CudaStream(driver, queue.device, queue.stream),
        CudaStream(driver, queue.device),
        CudaStream(driver, queue.device),
    )
    copier, weights_copies = CudaCopier(kv, driver, *streams), WeightCopies(driver, queue.device)
    copier.adopt(arena)
    return Setting(config, model, kv, queue, copier, copier, arena, driver, weights_copies.copy, weights_copies.lock)
