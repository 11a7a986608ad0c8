"""Weights through a buffer on another CUDA device; with one device, through a buffer on itself."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gpu.harness import CUDA, DEVICE, ONLY_CUDA
from tests.worker.engine_harness import CHUNK, tiny_model
from tests.worker.owners import KV
from worker.memory.cuda_driver import CudaDriver
from worker.memory.cuda_links import CudaBuffer, CudaLink
from worker.memory.cuda_memory import cuda_memory
from worker.memory.cuda_streams import CudaStream
from worker.memory.cuda_weights import WeightCopies
from worker.memory.tensors import tensor_at
from worker.models import filling
from worker.models.filling import Filling
from worker.models.image import image_of
from worker.models.load import Model, lay_out, load_model
from worker.models.other_links import OtherLinks

pytestmark = ONLY_CUDA
_TWO = pytest.mark.skipif(not CUDA or torch.cuda.device_count() < 2, reason="needs two CUDA devices")
#: The device that has the buffer.
ANOTHER = pytest.mark.parametrize("another", [0, pytest.param(1, marks=_TWO)])


def link_through(own: CudaDriver, another: int) -> CudaLink:
    peer = CudaDriver(another)
    assert own.reach(peer) and own.reach(peer), "a second time is no error"
    staging = CudaStream(peer, torch.device("cuda", another))
    return CudaLink(f"cuda:{another}", peer, staging, CudaStream(own, DEVICE, peer=peer))


@ANOTHER
def test_a_piece_comes_to_its_granules_byte_for_byte(another: int, capsys: pytest.CaptureFixture[str]) -> None:
    own = CudaDriver()
    memory = cuda_memory(own, 64 << 20, 2 << 20, DEVICE)
    span = memory.reserve(30 << 20, KV)
    span.map(0, memory.take(15, KV))
    host = np.frombuffer(mmap.mmap(-1, 30 << 20), dtype=np.uint8)
    host[:] = np.random.default_rng(0).integers(0, 256, host.size, dtype=np.uint8)
    unlock = WeightCopies(own, DEVICE).lock(host.ctypes.data, host.nbytes)
    buffer = link_through(own, another).buffer(host.nbytes)
    buffer.stage(host.ctypes.data, host.nbytes)
    seen = tensor_at(span.address, torch.uint8, [host.nbytes], DEVICE)
    assert not seen.any(), "staging writes nothing to this device's granules"
    buffer.deliver(span.address, host.nbytes)
    assert np.array_equal(seen.cpu().numpy(), host)
    buffer.close()
    unlock()
    assert "not page-locked" not in "".join(capsys.readouterr())
    span.close()
    memory.close()


@ANOTHER
def test_a_model_comes_over_both_links(another: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "PIECE_BYTES", 1)
    directory, own = tiny_model(tmp_path / "tiny"), CudaDriver()
    memory = cuda_memory(own, 128 << 20, 2 << 20, DEVICE)
    expected = contents(load_model(directory, memory, "float32", "cuda", CHUNK, None))
    model, weights = lay_out(directory, memory, "float32", "cuda", CHUNK, None), WeightCopies(own, DEVICE)
    image = image_of(tmp_path, b"key", model.spans, 1 << 30, weights.lock)
    assert image is not None
    link, carried = Watched(link_through(own, another)), list[int]()
    others = OtherLinks([link])
    for _ in range(2):
        model.take()
        load = Filling(model.spans, image, lambda: None, copy=link.before(weights.copy), others=others)
        load.wait(len(load) - 1)
        carried = load.carried
        assert all(torch.equal(a, b) for a, b in zip(contents(model), expected, strict=True))
        model.unload()
    assert min(carried) > 0 and sum(carried) == sum(span.packed_bytes for span in model.spans)
    assert others.settled(10)
    image.close()
    torch.cuda.synchronize()
    memory.close()


class Watched:
    """A link, and a copy that waits until its buffer is made: else a small model would be here before that."""

    def __init__(self, link: CudaLink) -> None:
        self.name, self._link, self._made = link.name, link, threading.Event()

    def buffer(self, bytes_: int) -> CudaBuffer:
        made = self._link.buffer(bytes_)
        self._made.set()
        return made

    def before(self, copy: Callable[[int, int, int], None]) -> Callable[[int, int, int], None]:
        def later(to: int, source: int, bytes_: int) -> None:
            assert self._made.wait(30)
            copy(to, source, bytes_)

        return later


def contents(model: Model) -> list[torch.Tensor]:
    return [view.clone() for span in model.spans for view in span.views.values()]
