"""The object format: what is written is read back, and nothing that was changed is believed."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from contracts.errors import PieceLost
from contracts.ids import SessionKey
from contracts.kv import DTYPE_BYTES, KvShape, Manifest
from kvstore.tiers.format import BLOCK, decode_header, encode_header, header_bytes, object_bytes, piece_offset
from kvstore.tiers.manifests import decode_manifest, encode_manifest, manifest_path

shapes = st.builds(
    KvShape,
    st.binary(min_size=32, max_size=32),
    st.integers(1, 1200),
    st.integers(1, 8),
    st.integers(1, 128),
    st.integers(1, 64),
    st.sampled_from(sorted(DTYPE_BYTES)),
)
keys = st.binary(min_size=32, max_size=32)


@given(keys, shapes, st.randoms())
def test_a_header_reads_back_as_it_was_written(key, shape, random):
    sums = tuple(random.getrandbits(64) for _ in range(shape.layers))
    header = encode_header(key, shape, sums)
    assert len(header) == header_bytes(shape.layers) and len(header) % BLOCK == 0
    assert decode_header(header) == (key, shape, sums)


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
    shape = KvShape(b"f" * 32, 3, 1, 5, 16, "float32")
    offsets = [piece_offset(shape, layer) for layer in range(4)]
    assert offsets == [4096, 8192, 12288, 16384] and object_bytes(shape) == 16384
    assert header_bytes(500) == 2 * BLOCK


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
    manifest = Manifest(SessionKey("t", "s"), "model", b"f" * 32, [bytes([i]) * 32 for i in range(5)], 333, 12.5)
    data = encode_manifest(manifest)
    assert decode_manifest(data) == manifest
    for i in range(len(data)):
        with pytest.raises(PieceLost):
            decode_manifest(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
    for length in range(len(data)):
        with pytest.raises(PieceLost):
            decode_manifest(data[:length])
