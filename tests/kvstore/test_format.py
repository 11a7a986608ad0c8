"""The object format: what is written is read back, and nothing that was changed is believed."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from contracts.errors import PieceLost
from contracts.ids import SessionKey
from contracts.kv import DTYPE_BYTES, KvShape, Manifest
from kvstore.tiers.format import (
    BLOCK,
    Header,
    Layout,
    Seal,
    decode_header,
    encode_header,
    header_bytes,
    object_bytes,
    piece_offset,
    raw_layout,
)
from kvstore.tiers.key_names import KeyName
from kvstore.tiers.manifests import decode_manifest, encode_manifest, manifest_path
from tests.kvstore.tier_harness import KEYS

shapes = st.builds(
    KvShape.of_heads,
    st.binary(min_size=32, max_size=32),
    st.integers(1, 1200),
    st.integers(1, 8),
    st.integers(1, 128),
    st.integers(1, 64),
    st.sampled_from(sorted(DTYPE_BYTES)),
)
#: With pieces of any size, and elements that have no known one.
others = st.builds(
    lambda shape, dtype, more: replace(shape, dtype=dtype, piece_bytes=shape.chunk_tokens + more),
    shapes,
    st.sampled_from(["float32", "float8_e4m3fn", "fp8"]),
    st.integers(0, 1 << 20),
)
keys = st.binary(min_size=32, max_size=32)
seals = st.none() | st.builds(
    lambda tag, life, number, salt: Seal(KeyName(tag, life, number), salt, ()),
    st.binary(min_size=16, max_size=16).filter(any),
    st.integers(0, 1 << 63),
    st.binary(min_size=8, max_size=8),
    st.binary(min_size=16, max_size=16),
)


def raw_header(key: bytes, shape: KvShape, layout: Layout | None = None) -> bytes:
    """A header without a seal, with some digests."""
    return encode_header(KEYS, Header(key, shape, layout or raw_layout(shape), tuple(range(shape.layers))))


@given(keys, shapes | others, seals, st.randoms())
def test_a_header_reads_back_as_it_was_written(key, shape, seal, random):
    sums, rests = (tuple(random.getrandbits(64) for _ in range(shape.layers)) for _ in range(2))
    written = Header(key, shape, raw_layout(shape), sums, replace(seal, rests=rests) if seal else None)
    header = encode_header(KEYS, written)
    assert len(header) == header_bytes(shape.layers) and len(header) % BLOCK == 0
    assert decode_header(KEYS, header) == written


@given(keys, shapes, st.sampled_from(["fp8", "k16v8", "x" * 16]), st.randoms())
def test_a_header_of_encoded_pieces_tells_their_codec_and_where_each_lies(key, shape, codec, random):
    lengths = [random.randint(1, shape.piece_bytes) for _ in range(shape.layers)]
    layout = Layout(codec, lengths)
    header = decode_header(KEYS, raw_header(key, shape, layout))
    assert header.layout == layout
    at = header_bytes(shape.layers)
    for offset, length in zip(layout.offsets[:-1], lengths, strict=True):
        assert offset == at and offset % BLOCK == 0
        at += -(-length // BLOCK) * BLOCK
    assert layout.object_bytes == at


def test_impossible_lengths_and_codecs_are_no_header_whatever_their_checksum():
    shape = KvShape.of_heads(b"f" * 32, 3, 1, 5, 16, "float32")
    whole = shape.piece_bytes
    for layout in (
        Layout("raw", [whole, whole, whole - 1]),
        Layout("fp8", [whole, whole, whole + 1]),
        Layout("fp8", [whole, 0, 1]),
        Layout("", [whole] * 3),
        Layout("FP 8", [whole] * 3),
    ):
        with pytest.raises(PieceLost):
            decode_header(KEYS, raw_header(b"k" * 32, shape, layout))


def test_a_codec_is_believed_only_of_k_and_v_of_heads():
    shape = replace(KvShape.of_heads(b"f" * 32, 1, 1, 5, 16, "float32"), dtype="fp8", piece_bytes=640)
    with pytest.raises(PieceLost, match="codec"):
        decode_header(KEYS, raw_header(b"k" * 32, shape, Layout("fp8", [640])))


@given(keys, shapes, st.data())
def test_any_flipped_bit_of_a_header_is_noticed(key, shape, data):
    header = bytearray(raw_header(key, shape))
    bit = data.draw(st.integers(0, len(header) * 8 - 1))
    header[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PieceLost):
        decode_header(KEYS, bytes(header))


@given(st.binary(max_size=3 * BLOCK))
def test_arbitrary_bytes_are_no_header(data):
    with pytest.raises(PieceLost):
        decode_header(KEYS, data)


def test_pieces_are_aligned_in_layer_order_and_the_first_layers_are_one_range():
    shape = KvShape.of_heads(b"f" * 32, 3, 1, 5, 16, "float32")
    offsets = [piece_offset(shape, layer) for layer in range(4)]
    assert offsets == [4096, 8192, 12288, 16384] and object_bytes(shape) == 16384
    assert header_bytes(194) == BLOCK and header_bytes(195) == 2 * BLOCK
    assert raw_layout(shape).offsets == tuple(offsets) and raw_layout(shape).object_bytes == object_bytes(shape)


@given(st.text(max_size=300), st.text(max_size=300))
def test_no_name_leaves_its_folder(tenant, session_id):
    path = manifest_path(SessionKey(tenant, session_id))
    parts = path.split("/")
    assert len(parts) == 3 and parts[0] == "manifests"
    for part in parts[1:]:
        assert part not in ("", ".", "..") and len(part) < 250 and "\0" not in part and not part.startswith(".")


def test_distinct_sessions_have_distinct_objects():
    odd = ["a", "a/b", "a=2Fb", "..", ".", "", "a" * 500, "a" * 501, "A", "ä", "a:b", "a.b"]
    paths = {manifest_path(SessionKey(t, s)) for t in odd for s in odd}
    assert len(paths) == len(odd) ** 2


def test_a_manifest_reads_back_and_any_flipped_byte_is_noticed():
    keys = [bytes([i]) * 32 for i in range(5)]
    manifest = Manifest(SessionKey("t", "s"), "model", b"f" * 32, keys, 333, 12.5, [b"e" * 32], 4, b"note")
    data, path = encode_manifest(KEYS, manifest), manifest_path(manifest.session)
    assert decode_manifest(KEYS, path, data) == manifest
    for i in range(len(data)):
        with pytest.raises(PieceLost):
            decode_manifest(KEYS, path, data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
    for length in range(len(data)):
        with pytest.raises(PieceLost):
            decode_manifest(KEYS, path, data[:length])
