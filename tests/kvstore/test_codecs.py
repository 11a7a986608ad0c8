"""LMCache's codecs behind our interface: bounds of their error, what stays exact, and that twice is as good as once."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from contracts.errors import ConfigError, PieceLost
from contracts.kv import KvShape
from kvstore.tiers.codec import Codec, Unencodable
from kvstore.tiers.codecs import Codecs

pytest.importorskip("lmcache", reason="the extra [lmcache] is not installed")
torch = pytest.importorskip("torch")

DTYPES = ("float32", "bfloat16", "float16")
CODECS = Codecs()
#: e4m3 keeps four bits of the significand, and its least step is 2^-9 of the scale, which is at most twice what 448
#: steps need.
_RELATIVE, _LEAST_STEP = 2**-4, 2**-9 * 2 / 448


def codec(name: str) -> Codec:
    found = CODECS.find(name)
    assert found is not None
    return found


@st.composite
def pieces(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES) -> tuple[KvShape, memoryview]:
    """A piece of any size, each head's K and V of its own magnitude, with some zeros and extremes."""
    dtype = draw(st.sampled_from(dtypes))
    shape = KvShape.of_heads(
        b"f" * 32, 4, draw(st.integers(1, 3)), draw(st.integers(1, 24)), draw(st.integers(1, 20)), dtype
    )
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = generator.standard_normal((shape.kv_heads, 2, shape.chunk_tokens, shape.head_dim))
    limit = 4.5 if dtype == "float16" else 35.0
    magnitudes = generator.uniform(-limit, limit, (shape.kv_heads, 2, 1, 1)) if draw(st.booleans()) else 0.0
    values = values * 10.0**magnitudes
    values[generator.random(values.shape) < draw(st.sampled_from([0.0, 0.1, 1.0]))] = 0.0
    if draw(st.booleans()):
        values[0, draw(st.integers(0, 1)), 0, 0] = (
            draw(st.sampled_from([1.0, -1.0])) * torch.finfo(getattr(torch, dtype)).max
        )
    most = torch.finfo(getattr(torch, dtype)).max
    made = torch.from_numpy(values).clamp(-most, most).to(getattr(torch, dtype))
    return shape, memoryview(bytearray(made.contiguous().view(-1).view(torch.uint8).numpy().tobytes()))


def tensor(piece: memoryview, shape: KvShape):
    return torch.frombuffer(piece, dtype=getattr(torch, shape.dtype)).view(
        shape.kv_heads, 2, shape.chunk_tokens, shape.head_dim
    )


def through(name: str, piece: memoryview, shape: KvShape, layer: int = 0) -> memoryview:
    into = memoryview(bytearray(b"\xa5" * len(piece)))
    codec(name).decode(codec(name).encode(piece, shape, layer), into, shape, layer)
    return into


def assert_within(original, decoded) -> None:
    """No value of a head's K or V is further off than float8 with a power-of-two scale allows, and the model's own
    type."""
    own_step = 2.0**-25 if original.dtype is torch.float16 else 2.0**-134
    original, decoded = original.double(), decoded.double()
    largest = original.abs().amax(dim=(-2, -1), keepdim=True)
    allowed = torch.maximum(original.abs() * _RELATIVE, largest * _LEAST_STEP) + own_step
    assert bool(((original - decoded).abs() <= allowed).all())


@settings(deadline=None, max_examples=200)
@given(pieces())
def test_fp8_stays_within_its_bounds_in_a_byte_a_value(made):
    shape, piece = made
    assert len(codec("fp8").encode(piece, shape, 0)) == tensor(piece, shape).numel() + 2 * shape.kv_heads
    assert_within(tensor(piece, shape), tensor(through("fp8", piece, shape), shape))


@settings(deadline=None, max_examples=200)
@given(pieces(("bfloat16", "float16")))
def test_k16v8_keeps_k_bit_for_bit_and_v_within_its_bounds(made):
    shape, piece = made
    original, decoded = tensor(piece, shape), tensor(through("k16v8", piece, shape), shape)
    assert torch.equal(original[:, 0].contiguous().view(torch.int16), decoded[:, 0].contiguous().view(torch.int16))
    assert_within(original[:, 1], decoded[:, 1])


@settings(deadline=None, max_examples=100)
@given(pieces(("float32",)))
def test_k16v8_of_float32_rounds_k_to_half_precision_or_refuses(made):
    shape, piece = made
    original = tensor(piece, shape)
    if bool((original[:, 0].abs() >= 65520).any()):
        with pytest.raises(Unencodable):
            codec("k16v8").encode(piece, shape, 0)
        return
    decoded = tensor(through("k16v8", piece, shape), shape)
    assert torch.equal(decoded[:, 0], original[:, 0].half().float())
    assert_within(original[:, 1], decoded[:, 1])


@pytest.mark.parametrize("name", ["fp8", "k16v8"])
@settings(deadline=None, max_examples=200)
@given(made=pieces())
def test_a_second_time_through_a_codec_changes_nothing(name, made):
    shape, piece = made
    try:
        once = through(name, piece, shape)
    except Unencodable:
        return
    assert through(name, once, shape) == once


@pytest.mark.parametrize("name", ["fp8", "k16v8"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_no_numbers_are_refused(name, value, dtype):
    shape = KvShape.of_heads(b"f" * 32, 4, 2, 8, 16, dtype)
    piece = memoryview(bytearray(shape.piece_bytes))
    tensor(piece, shape)[1, 1, 3, 3] = value
    with pytest.raises(Unencodable):
        codec(name).encode(piece, shape, 0)


@pytest.mark.parametrize("name", ["fp8", "k16v8"])
def test_bytes_of_another_length_are_a_lost_piece(name):
    shape = KvShape.of_heads(b"f" * 32, 4, 2, 8, 16, "bfloat16")
    piece = memoryview(bytearray(shape.piece_bytes))
    stored = codec(name).encode(piece, shape, 0)
    for wrong in (stored[:-1], memoryview(bytes(stored) + b"\0"), memoryview(b"")):
        with pytest.raises(PieceLost):
            codec(name).decode(wrong, piece, shape, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cachegen_without_cuda_stops_the_start_with_the_remedy():
    with pytest.raises(ConfigError, match=r"kv\.ssd_codec = 'cachegen'.*CUDA.*set kv\.ssd_codec: raw"):
        Codecs().configured("kv.ssd_codec", "cachegen")
