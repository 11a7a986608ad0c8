"""Notes about sessions' tokens, and the connector's messages to its sidecar."""

from __future__ import annotations

import zlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.ids import SessionKey
from contracts.kv import MAX_NOTE_BYTES
from contracts.warm_up import MOST_TOKENS, decode_warm_up, encode_forget, encode_warm_up, note_of

SESSION = SessionKey("tenant", "session")


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=300), st.text(max_size=20), st.data())
def test_tokens_come_back(tokens: list[int], salt: str, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(tokens)))
    found = decode_warm_up(encode_warm_up(SESSION, note_of(salt, tokens), count, 2.5))
    assert (found.session, found.cache_salt, list(found.tokens)) == (SESSION, salt, tokens[:count])
    assert found.expires_s == 2.5


def test_an_erased_session_has_no_tokens() -> None:
    found = decode_warm_up(encode_forget(SESSION))
    assert found.session == SESSION and not found.tokens


@given(st.binary(max_size=200))
def test_anything_else_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="no message about a session"):
        decode_warm_up(message)


def test_a_note_that_is_too_long_is_none() -> None:
    assert note_of("", [7] * (MOST_TOKENS + 1)) == b""
    noise = [(n * 2_654_435_761) % (1 << 32) for n in range(MAX_NOTE_BYTES // 3)]
    assert note_of("", noise) == b"", "it does not compress"


@pytest.mark.parametrize("packed", [zlib.compress(bytes(4 * MOST_TOKENS + 4)), zlib.compress(b"123"), b"no zlib", b""])
def test_a_note_that_unpacks_into_no_list_of_tokens_is_refused(packed: bytes) -> None:
    with pytest.raises(ValueError, match="no message about a session"):
        decode_warm_up(encode_warm_up(SESSION, msgpack.packb(["", packed]), 1, 1.0))
