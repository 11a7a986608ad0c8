"""What only a CUDA device can show: the driver's calls, copies in order with compute, capture beside copies."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from contracts.kv import KvShape
from tests.gpu.harness import DEVICE, ONLY_CUDA
from tests.worker.owners import KV
from worker.devices.cuda.queue import CudaQueue
from worker.memory.cuda_copier import CudaCopier
from worker.memory.cuda_driver import CudaDriver
from worker.memory.cuda_memory import cuda_memory
from worker.memory.cuda_streams import CudaStream
from worker.memory.cuda_weights import WeightCopies
from worker.memory.paged_kv import PagedKv
from worker.memory.tensors import tensor_at

pytestmark = ONLY_CUDA
SHAPE = KvShape.of_heads(bytes(32), layers=2, kv_heads=8, head_dim=128, chunk_tokens=64, dtype="bfloat16")
PAGES = 256


class Harness:
    def __init__(self) -> None:
        self.driver, self.queue = CudaDriver(), CudaQueue()
        self.pool = cuda_memory(self.driver, 256 << 20, 2 << 20, DEVICE)
        self.kv = PagedKv.reserve(self.pool, SHAPE, PAGES, KV)
        for slab in range(self.kv.slab_count):
            self.kv.map_slab(slab)
        streams = (
            CudaStream(self.driver, DEVICE, self.queue.stream),
            CudaStream(self.driver, DEVICE),
            CudaStream(self.driver, DEVICE),
        )
        self.copier = CudaCopier(self.kv, self.driver, *streams)
        self.arena = np.frombuffer(mmap.mmap(-1, PAGES * SHAPE.piece_bytes), dtype=np.uint8)
        self.arena[:] = np.random.default_rng(0).integers(0, 256, self.arena.size, dtype=np.uint8)
        self.copier.adopt(self.arena)

    def page(self, page: int) -> torch.Tensor:
        return self.kv.flat[page].view(torch.uint8).flatten()

    def piece(self, n: int) -> torch.Tensor:
        return torch.from_numpy(self.arena[n * SHAPE.piece_bytes : (n + 1) * SHAPE.piece_bytes].copy())


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.copier.drop()
    torch.cuda.synchronize()
    made.pool.close()


@pytest.mark.parametrize("batches", [True, False])
def test_pieces_come_to_their_pages_and_back_byte_for_byte(harness: Harness, batches: bool) -> None:
    harness.driver._batches = harness.driver._batches and batches
    order = np.random.default_rng(1).permutation(PAGES)
    harness.copier.load(harness.arena, order * SHAPE.piece_bytes, np.arange(PAGES))
    harness.copier.settle()
    for page in (0, 7, PAGES - 1):
        assert torch.equal(harness.page(page).cpu(), harness.piece(int(order[page])))
    before = harness.arena.copy()
    harness.arena[:] = 0
    harness.copier.save(harness.arena, order * SHAPE.piece_bytes, np.arange(PAGES))
    assert np.array_equal(harness.arena, before)


def test_compute_sees_the_load_it_waits_for_and_a_save_sees_what_was_computed(harness: Harness) -> None:
    pages = np.arange(64)
    harness.copier.load(harness.arena, pages * SHAPE.piece_bytes, pages)
    with harness.queue.computing():
        harness.copier.wait_for(pages)
        total = harness.kv.flat[:64].view(torch.uint8).sum(dtype=torch.int64)
        torch.cuda._sleep(50_000_000)
        harness.kv.view.zero_()
        harness.copier.written()
    harness.copier.save(harness.arena, np.array([100]) * SHAPE.piece_bytes, np.array([5]))
    assert int(total) == int(harness.arena[: 64 * SHAPE.piece_bytes].sum(dtype=np.int64))
    assert not harness.piece(100).any()


def test_a_graph_is_captured_while_another_thread_copies(harness: Harness) -> None:
    stop, failed = threading.Event(), []

    def copy_on() -> None:
        try:
            while not stop.is_set():
                harness.copier.load(harness.arena, np.arange(8) * SHAPE.piece_bytes, np.arange(8))
                harness.copier.settle()
        except Exception as error:
            failed.append(error)

    copying = threading.Thread(target=copy_on)
    copying.start()
    x, out = torch.randn(64, 64, device=DEVICE), torch.empty(64, 64, device=DEVICE)
    with harness.queue.computing():
        torch.mm(x, x, out=out)
        replays = [harness.queue.capture(lambda: torch.mm(x, x, out=out)).replay for _ in range(50)]
        out.zero_()
        replays[-1]()
    harness.queue.finish()
    stop.set()
    copying.join()
    assert not failed
    torch.testing.assert_close(out, x @ x)


def test_a_graph_replays_on_memory_that_was_lent_and_came_back(harness: Harness) -> None:
    span = harness.pool.reserve(2 << 20, KV)
    span.map(0, harness.pool.take(1, KV))
    seen = tensor_at(span.address, torch.float32, [1024], DEVICE)
    out = torch.empty(1024, device=DEVICE)
    with harness.queue.computing():
        seen.fill_(1)
        out.copy_(seen)
        replay = harness.queue.capture(lambda: out.copy_(seen)).replay
    harness.queue.finish()
    harness.pool.give(span.unmap(0, 1))
    span.map(0, harness.pool.take(1, KV))
    with harness.queue.computing():
        seen.fill_(3)
        replay()
    harness.queue.finish()
    assert (out == 3).all()


def test_a_graph_is_captured_after_all_others_have_gone(harness: Harness) -> None:
    out = torch.zeros(64, device=DEVICE)
    with harness.queue.computing():
        out.add_(1)
        for _ in range(3):
            captured = harness.queue.capture(lambda: out.add_(1))
            captured.replay()
            del captured
    harness.queue.finish()
    assert (out == 4).all()


def test_weights_come_from_page_locked_memory_that_is_only_read(
    harness: Harness, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = np.random.default_rng(2).integers(0, 256, 3 << 20, dtype=np.uint8)
    (tmp_path / "image").write_bytes(written.tobytes())
    with (tmp_path / "image").open("rb") as file:
        read = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
    weights = WeightCopies(harness.driver, DEVICE)
    unlock = weights.lock(read.ctypes.data, read.nbytes)
    weights.copy(harness.kv.span.address, read.ctypes.data, read.nbytes)
    unlock()
    seen = tensor_at(harness.kv.span.address, torch.uint8, [read.nbytes], DEVICE)
    assert np.array_equal(seen.cpu().numpy(), written)
    assert "not page-locked" not in "".join(capsys.readouterr())
