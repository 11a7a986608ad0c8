"""What only a CUDA device can show: the driver's calls, copies in order with compute, capture beside copies."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from contracts.kv import KvShape
from tests.gpu.house import DEVICE, ONLY_CUDA
from tests.worker.owners import KV
from worker.devices.cuda.queue import CudaQueue
from worker.memory.cuda_copier import CudaCopier
from worker.memory.cuda_driver import CudaDriver
from worker.memory.cuda_memory import cuda_memory
from worker.memory.cuda_streams import CudaStream
from worker.memory.paged_kv import PagedKv

pytestmark = ONLY_CUDA
SHAPE = KvShape.of_heads(bytes(32), layers=2, kv_heads=8, head_dim=128, chunk_tokens=64, dtype="bfloat16")
PAGES = 256


class House:
    def __init__(self) -> None:
        self.driver, self.queue = CudaDriver(), CudaQueue()
        self.pool = cuda_memory(self.driver, 256 << 20, 2 << 20, DEVICE)
        self.kv = PagedKv.reserve(self.pool, SHAPE, PAGES, KV)
        for slab in range(self.kv.slab_count):
            self.kv.map_slab(slab)
        streams = CudaStream(self.driver, DEVICE, self.queue.stream), CudaStream(self.driver, DEVICE), CudaStream(self.driver, DEVICE)
        self.copier = CudaCopier(self.kv, self.driver, *streams)
        self.arena = np.frombuffer(mmap.mmap(-1, PAGES * SHAPE.piece_bytes), dtype=np.uint8)
        self.arena[:] = np.random.default_rng(0).integers(0, 256, self.arena.size, dtype=np.uint8)
        self.copier.adopt(self.arena)

    def page(self, page: int) -> torch.Tensor:
        return self.kv.flat[page].view(torch.uint8).flatten()

    def piece(self, n: int) -> torch.Tensor:
        return torch.from_numpy(self.arena[n * SHAPE.piece_bytes : (n + 1) * SHAPE.piece_bytes].copy())


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.copier.drop()
    torch.cuda.synchronize()
    made.pool.close()


@pytest.mark.parametrize("batches", [True, False])
def test_pieces_come_to_their_pages_and_back_byte_for_byte(house: House, batches: bool) -> None:
    house.driver._batches = house.driver._batches and batches
    order = np.random.default_rng(1).permutation(PAGES)
    house.copier.load(house.arena, order * SHAPE.piece_bytes, np.arange(PAGES))
    house.copier.settle()
    for page in (0, 7, PAGES - 1):
        assert torch.equal(house.page(page).cpu(), house.piece(int(order[page])))
    before = house.arena.copy()
    house.arena[:] = 0
    house.copier.save(house.arena, order * SHAPE.piece_bytes, np.arange(PAGES))
    assert np.array_equal(house.arena, before)


def test_compute_sees_the_load_it_waits_for_and_a_save_sees_what_was_computed(house: House) -> None:
    pages = np.arange(64)
    house.copier.load(house.arena, pages * SHAPE.piece_bytes, pages)
    with house.queue.computing():
        house.copier.wait_for(pages)
        total = house.kv.flat[:64].view(torch.uint8).sum(dtype=torch.int64)
        torch.cuda._sleep(50_000_000)
        house.kv.view.zero_()
        house.copier.written()
    house.copier.save(house.arena, np.array([100]) * SHAPE.piece_bytes, np.array([5]))
    assert int(total) == int(house.arena[: 64 * SHAPE.piece_bytes].sum(dtype=np.int64))
    assert not house.piece(100).any()


def test_a_graph_is_captured_while_another_thread_copies(house: House) -> None:
    stop, failed = threading.Event(), []

    def copy_on() -> None:
        try:
            while not stop.is_set():
                house.copier.load(house.arena, np.arange(8) * SHAPE.piece_bytes, np.arange(8))
                house.copier.settle()
        except Exception as error:
            failed.append(error)

    copying = threading.Thread(target=copy_on)
    copying.start()
    x, out = torch.randn(64, 64, device=DEVICE), torch.empty(64, 64, device=DEVICE)
    with house.queue.computing():
        torch.mm(x, x, out=out)
        replays = [house.queue.capture(lambda: torch.mm(x, x, out=out)).replay for _ in range(50)]
        out.zero_()
        replays[-1]()
    house.queue.finish()
    stop.set()
    copying.join()
    assert not failed
    torch.testing.assert_close(out, x @ x)


def test_a_graph_replays_on_memory_that_was_lent_and_came_back(house: House) -> None:
    span = house.pool.reserve(2 << 20, KV)
    span.map(0, house.pool.take(1, KV))
    from worker.memory.tensors import tensor_at

    seen = tensor_at(span.address, torch.float32, [1024], DEVICE)
    out = torch.empty(1024, device=DEVICE)
    with house.queue.computing():
        seen.fill_(1)
        out.copy_(seen)
        replay = house.queue.capture(lambda: out.copy_(seen)).replay
    house.queue.finish()
    house.pool.give(span.unmap(0, 1))
    span.map(0, house.pool.take(1, KV))
    with house.queue.computing():
        seen.fill_(3)
        replay()
    house.queue.finish()
    assert (out == 3).all()
