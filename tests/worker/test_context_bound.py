"""What can be said of a prompt's tokens before it is tokenised: the bound holds for whatever text, and is not claimed
where it may not."""

from __future__ import annotations

import sys
import threading
import time
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.context import ContextBound, said_bytes
from contracts.errors import InvalidRequest
from runtime.model_config import read_json
from tests.pace import thread_waited_s
from worker.core.token_bytes import most_bytes_of_a_token
from worker.text.chat_template import ChatTemplate
from worker.text.codec import TextCodec

DEMO = Path(__file__).parents[2] / "models" / "demo"
DESCRIPTION = read_json(DEMO / "tokenizer.json")
codec = TextCodec.load(DEMO)
LETTERS = st.one_of(st.characters(codec="utf-8"), st.sampled_from("\u1100\u1161\u11a8K\u212b\u0301 \n<|endof>"))
TEXT = st.text(alphabet=LETTERS, max_size=300)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ m.content "
    "}}{% endfor %}"
)


@settings(max_examples=200, deadline=None)
@given(TEXT)
def test_no_text_has_fewer_tokens_than_its_bytes_say(text: str) -> None:
    assert codec.longest_token_bytes > 0
    tokens = codec.encode(text) if text else []
    assert len(text.encode()) <= len(tokens) * codec.longest_token_bytes


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), TEXT), min_size=1, max_size=5))
def test_no_conversation_has_fewer_tokens_than_its_bytes_say(said: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": text} for role, text in said]
    assert said_bytes(messages) <= len(codec.render(messages)) * codec.message_token_bytes


def test_unicode_shrinks_no_text_by_more_than_is_reckoned() -> None:
    """Each character's decomposition, its parts spelled as long as Unicode allows, against the character."""
    longest: dict[str, int] = {}
    characters = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    for c in characters:
        for form in ("NFC", "NFD"):
            normal = unicodedata.normalize(form, c)
            longest[normal] = max(longest.get(normal, 0), len(c.encode()))
    for c in characters:
        parts = unicodedata.normalize("NFD", c)
        written = sum(max(longest.get(part, 0), len(part.encode())) for part in parts)
        assert written <= 4 * len(unicodedata.normalize("NFC", c).encode()), hex(ord(c))


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Strip"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Split", "behavior": "Removed"}, {"type": "ByteLevel"}],
            }
        },
        {"pre_tokenizer": None},
        {"added_tokens": [{"id": 0, "content": "x", "lstrip": True}]},
        {"model": {"vocab": {"a": 0}}},
        {"model": {"vocab": {"a": 0}, "byte_fallback": True}},
    ],
)
def test_where_text_may_vanish_nothing_is_claimed(change: dict[str, Any]) -> None:
    assert most_bytes_of_a_token(DESCRIPTION, 13) == 52
    assert most_bytes_of_a_token(DESCRIPTION | change, 13) == 0


def test_sentencepiece_with_every_byte_is_known() -> None:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces]}
    assert most_bytes_of_a_token({"normalizer": normalizer, "model": {"vocab": vocab, "byte_fallback": True}}, 16) == 16


@pytest.mark.parametrize(
    ("template", "keeps"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}", True),
        (NO_SYSTEM, True),
        ("{{ messages[-1].content }}", False),
        ("{% for m in messages %}{{ m.content | replace('\n\n', '\n') }}{% endfor %}", False),
        ("{{ raise_exception('never') }}", False),
    ],
)
def test_a_template_that_leaves_words_out_is_found_out(template: str, keeps: bool) -> None:
    assert ChatTemplate(template, {}).keeps_texts() is keeps


def test_what_a_template_may_leave_out_does_not_count() -> None:
    messages = [
        {"role": "user", "content": "  four \n"},
        {"role": "assistant", "content": "<think>" + "t" * 1000 + "</think>\n\nfive!"},
        {"role": "tool", "content": "r" * 1000},
        {"role": "user", "content": [{"type": "text", "text": "ü"}, {"type": "text"}, 7]},
        "nonsense",
        {"role": "user"},
    ]
    assert said_bytes(messages) == 4 + 5 + 2


def test_too_long_is_said_from_the_first_token_that_leaves_no_room() -> None:
    bound = ContextBound(10, 4, 4)
    bound.check_prompt("x" * 36)
    bound.check_prompt(list(range(9)))
    bound.check_messages([{"role": "user", "content": "x" * 36}])
    ContextBound(10).check_prompt("x" * 10_000)
    ContextBound().check_prompt([1] * 10_000)
    for wrong in ("x" * 37, list(range(10))):
        with pytest.raises(InvalidRequest) as caught:
            bound.check_prompt(wrong)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(InvalidRequest):
        bound.check_messages([{"role": "user", "content": "x" * 20}, {"role": "user", "content": "y" * 20}])


def test_tokenising_a_megabyte_keeps_nobody_from_running() -> None:
    """The interpreter's lock is free meanwhile: the engine's thread goes on. With `Tokenizer.encode` this waits for
    half a second."""
    done = threading.Event()

    def work() -> None:
        codec.encode("The quick brown fox jumps. " * 40_000)
        done.set()

    def clock_s() -> float:
        """Stands still while this thread waits for a core. Waiting for the interpreter's lock is no such wait."""
        return time.perf_counter() - thread_waited_s(threading.get_native_id())

    thread, waits, last = threading.Thread(target=work), [], clock_s()
    thread.start()
    while not done.is_set():
        time.sleep(0.001)
        now = clock_s()
        waits.append(now - last)
        last = now
    thread.join()
    assert max(waits) < 0.25, max(waits)
