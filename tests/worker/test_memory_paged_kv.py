"""Paged KV: slabs that waste little, pages that are pieces byte for byte, and the same numbers through every view."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contracts.kv import KvShape
from contracts.memory.slab_size import slab_granules
from tests.worker.owners import KV
from worker.core.granules import OutOfGranules
from worker.memory.device_memory import host_memory
from worker.memory.paged_kv import PagedKv


def shape(kv_heads: int = 2, head_dim: int = 8, chunk_tokens: int = 20, dtype: str = "float32") -> KvShape:
    return KvShape.of_heads(bytes(32), 3, kv_heads, head_dim, chunk_tokens, dtype)


@pytest.fixture(params=[(80 << 10, True), (64 << 10, False)], ids=["no-waste", "some-waste"])
def kv(request: pytest.FixtureRequest) -> Iterator[PagedKv]:
    granule, uniform = request.param
    pool = host_memory(8 * granule, granule)
    kv = PagedKv.reserve(pool, shape(), 100, KV)
    assert (kv.slab_bytes == kv.pages_per_slab * kv.page_bytes) is uniform
    yield kv
    pool.validate()
    pool.close()


@given(page=st.integers(1, 3 << 20), granule=st.sampled_from([4096, 64 << 10, 2 << 20]))
def test_a_slab_is_the_smallest_that_wastes_at_most_five_percent(page: int, granule: int) -> None:
    def waste(granules: int) -> float:
        return 1.0 if granules * granule < page else granules * granule % page / (granules * granule)

    size = slab_granules(page, granule)
    assert waste(size) <= 0.05
    assert all(waste(smaller) > 0.05 for smaller in range(1, size))


def test_pages_of_a_13b_model_fill_slabs_of_five_granules_exactly() -> None:
    page = shape(kv_heads=40, head_dim=128, chunk_tokens=64, dtype="bfloat16").piece_bytes
    assert page == 1.25 * 2**20
    assert slab_granules(page, 2 << 20) == 5


def test_slabs_take_and_give_granules(kv: PagedKv) -> None:
    free = kv.memory.free
    kv.map_slab(1)
    assert kv.memory.free == free - kv.slab_granules and kv.mapped_slabs == [1]
    with pytest.raises(ValueError, match="mapped already"):
        kv.map_slab(1)
    with pytest.raises(ValueError, match="not mapped"):
        kv.unmap_slab(0)
    kv.unmap_slab(1)
    assert kv.memory.free == free and kv.mapped_slabs == []


def test_a_slab_that_finds_no_memory_is_not_mapped(kv: PagedKv) -> None:
    kv.memory.take(kv.memory.free, KV)
    with pytest.raises(OutOfGranules):
        kv.map_slab(0)
    assert kv.mapped_slabs == []


def test_page_bytes_lie_apart_and_are_what_the_views_show(kv: PagedKv) -> None:
    for slab in range(kv.slab_count):
        kv.map_slab(slab)
    assert kv.max_pages >= 100
    for page in range(kv.max_pages):
        kv.page_bytes_view(page).view(np.float32)[:] = page
    gathered = kv.gather(torch.arange(kv.max_pages))
    assert gathered.shape == (kv.max_pages, 2, 2, 20, 8)
    assert (gathered == torch.arange(kv.max_pages).view(-1, 1, 1, 1, 1)).all()
    some = kv.view[1, 3]
    assert (some == kv.pages_per_slab + 3).all()


def test_what_is_written_token_by_token_is_gathered_for_attention(kv: PagedKv) -> None:
    for slab in range(kv.slab_count):
        kv.map_slab(slab)
    kv.clear(torch.arange(kv.max_pages))
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randn(50, 2, 8, generator=generator) for _ in range(2))
    pages = torch.tensor([7, kv.max_pages - 1, 30])
    tokens = torch.arange(50)
    kv.write(pages[tokens // 20], tokens % 20, k, v)
    heads = kv.gather_heads(pages[None])
    assert heads.shape == (1, 2, 2, 60, 8)
    assert torch.equal(heads[0, :, 0, :50], k.transpose(0, 1)) and torch.equal(heads[0, :, 1, :50], v.transpose(0, 1))
    assert (heads[0, :, :, 50:] == 0).all()
    both = kv.gather_heads(torch.stack((pages, pages.flip(0))))
    assert torch.equal(both[1, :, 0, 40:], k.transpose(0, 1)[:, :20])
    untouched = [p for p in range(kv.max_pages) if p not in pages.tolist()]
    assert (kv.gather(torch.tensor(untouched)) == 0).all()


def test_clearing_pages_clears_them_and_no_others(kv: PagedKv) -> None:
    for slab in range(kv.slab_count):
        kv.map_slab(slab)
    for page in range(kv.max_pages):
        kv.page_bytes_view(page)[:] = 1
    kv.clear(torch.tensor([0, 40]))
    assert [p for p in range(kv.max_pages) if not kv.page_bytes_view(p).any()] == [0, 40]


def test_address_space_may_exceed_memory_by_far() -> None:
    pool = host_memory(4 << 20, 2 << 20)
    kv = PagedKv.reserve(pool, shape(kv_heads=8, head_dim=128, chunk_tokens=64, dtype="bfloat16"), 1 << 20, KV)
    kv.map_slab(kv.slab_count - 1)
    kv.page_bytes_view(kv.max_pages - 1)[:] = 5
    assert pool.resident_bytes() == kv.slab_bytes
    pool.close()
