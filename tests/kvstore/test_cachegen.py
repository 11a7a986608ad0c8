"""CacheGen's adapter, with LMCache's kernels in plain Python; with those in CUDA where there is a device."""

from __future__ import annotations

import pytest

from contracts.errors import PieceLost
from contracts.kv import KvShape
from kvstore.tiers.codec import Unavailable, Unencodable

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache", reason="the extra [lmcache] is not installed")
pytest.importorskip("numba", reason="LMCache's kernels need numba and more of its dependencies")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def cachegen(request: pytest.FixtureRequest):
    from kvstore.tiers.codecs_cachegen import CacheGen

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    try:
        return CacheGen(request.param)
    except Unavailable as e:
        pytest.skip(str(e))


def piece_of(shape: KvShape, seed: int = 0) -> memoryview:
    values = torch.randn(
        shape.kv_heads, 2, shape.chunk_tokens, shape.head_dim, generator=torch.Generator().manual_seed(seed)
    )
    return memoryview(bytearray(values.to(getattr(torch, shape.dtype)).view(-1).view(torch.uint8).numpy().tobytes()))


def tensor(piece: memoryview, shape: KvShape):
    return torch.frombuffer(piece, dtype=getattr(torch, shape.dtype)).view(
        shape.kv_heads, 2, shape.chunk_tokens, shape.head_dim
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layer", [0, 12])
def test_each_value_is_within_half_a_level_and_a_second_time_changes_nothing(cachegen, dtype, layer):
    from kvstore.tiers.codecs_cachegen import levels_of

    shape = KvShape.of_heads(b"f" * 32, 16, 2, 16, 32, dtype)
    piece, once, twice = (
        piece_of(shape),
        memoryview(bytearray(shape.piece_bytes)),
        memoryview(bytearray(shape.piece_bytes)),
    )
    cachegen.decode(cachegen.encode(piece, shape, layer), once, shape, layer)
    original = tensor(piece, shape).float()
    largest = original.abs().amax(dim=(0, 3))[None, :, :, None]  # of a token's K or V, all heads
    steps = levels_of(layer) // 2 - 1
    assert bool(
        ((tensor(once, shape).float() - original).abs() <= largest / steps * 0.501 + original.abs() * 2**-8).all()
    )
    cachegen.decode(cachegen.encode(once, shape, layer), twice, shape, layer)
    assert once == twice


def test_bytes_that_were_cut_are_a_lost_piece(cachegen):
    shape = KvShape.of_heads(b"f" * 32, 4, 1, 16, 32, "bfloat16")
    stored, into = cachegen.encode(piece_of(shape), shape, 0), memoryview(bytearray(shape.piece_bytes))
    for cut in (0, 10, 2000, len(stored) - 1):
        with pytest.raises(PieceLost):
            cachegen.decode(stored[:cut], into, shape, 0)


def test_what_it_cannot_hold_is_refused(cachegen):
    shape = KvShape.of_heads(b"f" * 32, 4, 1, 16, 32, "bfloat16")
    silent = piece_of(shape)
    tensor(silent, shape)[:, 1, 5] = 0.0
    with pytest.raises(Unencodable):
        cachegen.encode(silent, shape, 0)
    long = KvShape.of_heads(b"f" * 32, 4, 1, 1, 300, "bfloat16")
    with pytest.raises(Unencodable):
        cachegen.encode(piece_of(long), long, 0)
