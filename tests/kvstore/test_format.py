"""The object format: what is written is read back, and nothing that was changed is believed."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import msgpack
import pytest
import xxhash
from hypothesis import given

from contracts.errors import PieceLost
from contracts.ids import SessionKey
from contracts.kv import DTYPE_BYTES, KvShape, Manifest
from kvstore.tiers.format import (
    BLOCK,
    Header,
    Layout,
    decode_header,
    encode_header,
    header_bytes,
    object_bytes,
    piece_offset,
    raw_layout,
)
from kvstore.tiers.manifests import decode_manifest, encode_manifest, manifest_path

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


@given(keys, shapes | others, st.randoms())
def test_a_header_reads_back_as_it_was_written(key, shape, random):
    sums = tuple(random.getrandbits(64) for _ in range(shape.layers))
    header = encode_header(key, shape, sums)
    assert len(header) == header_bytes(shape.layers) and len(header) % BLOCK == 0
    assert decode_header(header) == Header(key, shape, raw_layout(shape), sums)


@given(keys, shapes, st.sampled_from(["fp8", "k16v8", "x" * 16]), st.randoms())
def test_a_header_of_encoded_pieces_tells_their_codec_and_where_each_lies(key, shape, codec, random):
    lengths = [random.randint(1, shape.piece_bytes) for _ in range(shape.layers)]
    layout = Layout(codec, lengths)
    header = decode_header(encode_header(key, shape, tuple(range(shape.layers)), layout))
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
            decode_header(encode_header(b"k" * 32, shape, (0, 0, 0), layout))


def test_a_codec_is_believed_only_of_k_and_v_of_heads():
    shape = replace(KvShape.of_heads(b"f" * 32, 1, 1, 5, 16, "float32"), dtype="fp8", piece_bytes=640)
    with pytest.raises(PieceLost, match="codec"):
        decode_header(encode_header(b"k" * 32, shape, (0,), Layout("fp8", [640])))


@given(keys, shapes, st.data())
def test_any_flipped_bit_of_a_header_is_noticed(key, shape, data):
    header = bytearray(encode_header(key, shape, tuple(range(shape.layers))))
    bit = data.draw(st.integers(0, len(header) * 8 - 1))
    header[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PieceLost):
        decode_header(bytes(header))


@given(st.binary(max_size=3 * BLOCK))
def test_arbitrary_bytes_are_no_header(data):
    with pytest.raises(PieceLost):
        decode_header(data)


def test_pieces_are_aligned_in_layer_order_and_the_first_layers_are_one_range():
    shape = KvShape.of_heads(b"f" * 32, 3, 1, 5, 16, "float32")
    offsets = [piece_offset(shape, layer) for layer in range(4)]
    assert offsets == [4096, 8192, 12288, 16384] and object_bytes(shape) == 16384
    assert header_bytes(300) == BLOCK and header_bytes(500) == 2 * BLOCK
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


@pytest.mark.parametrize("more", [[], [b"e" * 32], [b"e" * 32, 4]])
def test_a_manifest_of_an_older_store_reads_as_one_without_what_that_did_not_know(more: list[object]):
    body = msgpack.packb(["t", "s", "model", b"f" * 32, b"k" * 64, 32, 12.5, *more])
    old = b"UPBEATMF\x01" + xxhash.xxh3_64_digest(body) + body
    former, life = ([b"e" * 32] if more else []), (4 if len(more) == 2 else 0)
    wanted = Manifest(SessionKey("t", "s"), "model", b"f" * 32, [b"k" * 32] * 2, 32, 12.5, former, life)
    assert decode_manifest(old) == wanted


def test_a_manifest_reads_back_and_any_flipped_byte_is_noticed():
    keys = [bytes([i]) * 32 for i in range(5)]
    manifest = Manifest(SessionKey("t", "s"), "model", b"f" * 32, keys, 333, 12.5, [b"e" * 32], 4, b"note")
    data = encode_manifest(manifest)
    assert decode_manifest(data) == manifest
    for i in range(len(data)):
        with pytest.raises(PieceLost):
            decode_manifest(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
    for length in range(len(data)):
        with pytest.raises(PieceLost):
            decode_manifest(data[:length])
