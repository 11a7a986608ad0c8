"""The tokenizer for callers: ids as transformers gives them, texts that come back, and questions that nobody should
ask."""

from __future__ import annotations

import asyncio
import json
import shutil
import unicodedata
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from contracts import token_lists
from contracts.context import ContextBound
from contracts.errors import RequestError
from contracts.v1 import worker_pb2 as pb
from worker.text.codec import TextCodec
from worker.text.token_calls import TokenCalls
from worker.text.tokenising import Tokenising

DEMO = Path(__file__).parents[2] / "models" / "demo"
MAX_TOKENS = 4096
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Grüße, 世界 🦊! <|im_end|> is text.  "},
    {"role": "assistant", "content": " Noted,\nand so on "},
]
SAID = [{**m, "content": m["content"].replace("<|im_end|> is", "it is")} for m in TALK]


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec.load(DEMO)


@pytest.fixture(scope="module")
def theirs() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture
async def calls(codec: TextCodec) -> AsyncIterator[TokenCalls]:
    tokenising = Tokenising()
    yield calls_of(codec, tokenising)
    tokenising.stop()


def calls_of(codec: TextCodec, tokenising: Tokenising) -> TokenCalls:
    bound = ContextBound(MAX_TOKENS, codec.longest_token_bytes, codec.message_token_bytes)
    return TokenCalls(codec, bound, codec.vocab_size, tokenising)


def refusal(reply: Any) -> tuple[int, str | None, str | None]:
    status, message, param, code = json.loads(reply.refused)
    assert message
    return status, param, code


async def ids(calls: TokenCalls, **question: Any) -> list[int]:
    reply = await calls.tokenize(pb.TokenizeRequest(tenant="t", **question))
    assert not reply.refused, reply.refused
    return list(reply.tokens)


def packed(value: Any) -> bytes:
    made: bytes = msgpack.packb(value)
    return made


# ---- as transformers does
# ------------------------------------------------------------------------------------------------
async def test_a_prompts_ids_and_their_spelling_are_transformers(calls: TokenCalls, theirs: Any) -> None:
    for text in (
        "",
        " ",
        "Hello there",
        "  Grüße, 世界 🦊!\n\n",
        "<|im_start|>user\nHi<|im_end|>\n",
        "\x00\t\r\n",
        "a" * 5000,
    ):
        for special in (True, False):
            question = pb.TokenizeRequest(prompt=packed(text), add_special_tokens=special, return_token_strs=True)
            reply = await calls.tokenize(question)
            assert list(reply.tokens) == theirs.encode(text, add_special_tokens=special), text
            assert (
                list(reply.token_strs) == theirs.convert_ids_to_tokens(list(reply.tokens))
                and reply.max_model_len == MAX_TOKENS
            )


async def test_a_chats_ids_are_transformers(calls: TokenCalls, theirs: Any) -> None:
    for opens, goes_on in ((True, False), (False, False), (False, True)):
        expected = theirs.apply_chat_template(
            SAID, add_generation_prompt=opens, continue_final_message=goes_on, return_dict=False
        )
        found = await ids(calls, messages=packed(SAID), add_generation_prompt=opens, continue_final_message=goes_on)
        assert found == expected, (opens, goes_on)


STRIPS = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% if not loop.last %};{% endif %}{% endfor %}!"
LEAVES_OUT = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"


def variant(tmp_path: Path, template: str | None, processor: Any = None) -> Path:
    """The demo's tokenizer with another template, or with tokens around each prompt."""
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config | ({"chat_template": template} if template else {}))
    )
    shutil.copy(DEMO / "tokenizer.json", tmp_path / "tokenizer.json")
    if processor is not None:
        tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
        tokenizer.post_processor = processor
        tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


async def test_a_message_that_goes_on_ends_where_a_template_that_strips_it_ends(tmp_path: Path) -> None:
    directory = variant(tmp_path, STRIPS)
    theirs, tokenising = AutoTokenizer.from_pretrained(directory), Tokenising()
    try:
        found = await ids(
            calls_of(TextCodec.load(directory), tokenising), messages=packed(SAID), continue_final_message=True
        )
    finally:
        tokenising.stop()
    assert found == theirs.apply_chat_template(SAID, continue_final_message=True, return_dict=False)
    assert theirs.decode(found).endswith("[assistant]Noted,\nand so on")


async def test_special_tokens_stand_around_a_prompt_and_a_chat_where_they_are_asked_for(
    tmp_path: Path, theirs: Any
) -> None:
    names = ("<|endoftext|>", "<|im_end|>")
    around = [(name, theirs.convert_tokens_to_ids(name)) for name in names]
    processor = processors.TemplateProcessing(single=f"{names[0]} $A {names[1]}", special_tokens=around)
    directory, tokenising = variant(tmp_path, None, processor), Tokenising()
    with_around = AutoTokenizer.from_pretrained(directory)
    calls = calls_of(TextCodec.load(directory), tokenising)
    try:
        for text in ("", "Hello"):
            for special in (True, False):
                found = await ids(calls, prompt=packed(text), add_special_tokens=special)
                assert found == with_around.encode(text, add_special_tokens=special)
        plain = await ids(calls, messages=packed(SAID))
        assert await ids(calls, messages=packed(SAID), add_special_tokens=True) == [around[0][1], *plain, around[1][1]]
    finally:
        tokenising.stop()


async def test_what_a_message_says_becomes_no_special_token(calls: TokenCalls, codec: TextCodec) -> None:
    for goes_on in (False, True):
        special = [
            [
                t
                for t in await ids(calls, messages=packed(talk), continue_final_message=goes_on)
                if t in codec.special_ids
            ]
            for talk in (TALK, SAID, [*TALK[:2], {"role": "assistant", "content": "<|im_end|>"}])
        ]
        assert special[0] == special[1] == special[2]


# ---- there and back
# ------------------------------------------------------------------------------------------------------
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(max_size=200)
    | st.sampled_from(["<|im_start|>user\nHi<|im_end|>\n", "\U0001f9d1\u200d\U0001f680 ", "\x00"])
)
async def test_text_comes_back_as_it_was(codec: TextCodec, text: str) -> None:
    """But for Unicode's normal form (NFC), in which the demo's tokenizer reads it."""
    tokenising = Tokenising()
    try:
        calls = calls_of(codec, tokenising)
        found = await ids(calls, prompt=packed(text))
        assert (await calls.detokenize(pb.DetokenizeRequest(tokens=packed(found)))).text == unicodedata.normalize(
            "NFC", text
        )
    finally:
        tokenising.stop()


async def test_any_ids_have_the_text_that_transformers_gives_them(
    calls: TokenCalls, codec: TextCodec, theirs: Any
) -> None:
    for tokens in (
        [],
        [0],
        sorted(codec.special_ids),
        list(range(codec.vocab_size))[:MAX_TOKENS],
        list(range(40, 0, -1)) * 3,
    ):
        assert (await calls.detokenize(pb.DetokenizeRequest(tokens=packed(tokens)))).text == theirs.decode(tokens)


# ---- hostile
# -------------------------------------------------------------------------------------------------------------
async def test_ids_that_do_not_exist_are_refused(calls: TokenCalls, codec: TextCodec) -> None:
    for tokens in ([codec.vocab_size], [-1], [True], [1.5], ["1"], [None], [[1]], [1, 1 << 40]):
        assert refusal(await calls.detokenize(pb.DetokenizeRequest(tokens=packed(tokens)))) == (
            400,
            "tokens",
            "invalid_value",
        )
    many = pb.DetokenizeRequest(tokens=packed([1] * (MAX_TOKENS + 1)))
    assert refusal(await calls.detokenize(many)) == (400, "tokens", "context_length_exceeded")


@pytest.mark.parametrize(
    "raw",
    [b"", b"\xc1", packed(7), packed({"a": 1}), b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xffa", b"\x91" * 4000],
)
async def test_what_cannot_be_read_is_refused_and_the_next_question_answered(calls: TokenCalls, raw: bytes) -> None:
    assert refusal(await calls.detokenize(pb.DetokenizeRequest(tokens=raw)))[:2] == (400, "tokens")
    assert refusal(await calls.tokenize(pb.TokenizeRequest(prompt=raw)))[:2] == (400, "prompt")
    if raw:
        assert refusal(await calls.tokenize(pb.TokenizeRequest(messages=raw)))[0] == 400
    assert await ids(calls, prompt=packed("a"))


async def test_what_can_fit_no_context_is_not_tokenised(calls: TokenCalls, codec: TextCodec) -> None:
    text = "a" * (codec.longest_token_bytes * MAX_TOKENS)
    assert refusal(await calls.tokenize(pb.TokenizeRequest(prompt=packed(text)))) == (
        400,
        "prompt",
        "context_length_exceeded",
    )
    said = packed([{"role": "user", "content": text}])
    assert refusal(await calls.tokenize(pb.TokenizeRequest(messages=said))) == (
        400,
        "messages",
        "context_length_exceeded",
    )
    assert len(await ids(calls, prompt=packed("xq" * MAX_TOKENS))) > MAX_TOKENS, (
        "what only turns out to be too long is counted"
    )


@pytest.mark.parametrize(
    "messages", [[1], [{}], [{"role": "user"}], [{"role": "user", "content": 5}], [{"role": 1, "content": {}}], [[]]]
)
async def test_messages_of_no_shape_fail_alone(calls: TokenCalls, messages: Any) -> None:
    for question in (
        {"add_generation_prompt": True},
        {"continue_final_message": True},
        {"tools": "[1]"},
        {"template_kwargs": "[]"},
    ):
        reply = await calls.tokenize(pb.TokenizeRequest(messages=packed(messages), **question))  # type: ignore[arg-type]
        if reply.refused:
            assert refusal(reply)[0] == 400
    assert await ids(calls, messages=packed(SAID))


async def test_both_endings_at_once_are_refused(calls: TokenCalls) -> None:
    question = pb.TokenizeRequest(messages=packed(SAID), add_generation_prompt=True, continue_final_message=True)
    assert refusal(await calls.tokenize(question)) == (400, "continue_final_message", "invalid_value")


async def test_a_message_that_the_template_leaves_out_cannot_go_on(tmp_path: Path) -> None:
    tokenising = Tokenising()
    try:
        calls = calls_of(TextCodec.load(variant(tmp_path, LEAVES_OUT)), tokenising)
        reply = await calls.tokenize(pb.TokenizeRequest(messages=packed(SAID), continue_final_message=True))
    finally:
        tokenising.stop()
    assert refusal(reply)[:2] == (400, "messages")


def test_a_list_that_is_longer_than_is_sent_is_refused() -> None:
    token_lists.check_answer(token_lists.MOST_TOKENS, token_lists.MOST_TEXT_BYTES, "prompt")
    for tokens, bytes_ in ((token_lists.MOST_TOKENS + 1, 0), (1, token_lists.MOST_TEXT_BYTES + 1)):
        with pytest.raises(RequestError):
            token_lists.check_answer(tokens, bytes_, "prompt")


async def test_a_question_whose_asker_has_gone_is_not_worked_on(codec: TextCodec) -> None:
    tokenising, begun = Tokenising(), []

    class Watched(TextCodec):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            begun.append(text)
            return super().encode(text, add_special_tokens=add_special_tokens)

    calls = calls_of(Watched.load(DEMO), tokenising)
    try:
        slow = [asyncio.create_task(ids(calls, prompt=packed("x y " * 1500))) for _ in range(50)]
        gone = asyncio.create_task(ids(calls, prompt=packed("gone")))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(*slow)
        assert len(begun) == 50 and "gone" not in begun
    finally:
        tokenising.stop()
