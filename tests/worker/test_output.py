"""What a client reads, delta by delta: whole characters, nothing of a stop string, and together what comes at once."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contracts.request import GenerateRequest, Output, Sampling
from worker.core.sequence import Sequence
from worker.sampling.output import Writer
from worker.sampling.sampler import Choice
from worker.text.codec import TextCodec

CODEC = TextCodec.load(Path(__file__).parents[2] / "models" / "demo")
EOS = 2
FOX = CODEC.plain_tokens("🦊")
TEXT_IDS = [t for t in range(CODEC.vocab_size) if t not in CODEC.special_ids]
#: Tokens that are a part of a character only: the pieces at which streams break.
PARTS = [t for t in TEXT_IDS if CODEC.token_bytes(t).decode("utf-8", "replace").count("\ufffd")]


def write(
    tokens: list[int], max_tokens: int = 10_000, resume: int = 0, logprob: float | None = None, **settings: Any
) -> list[Output]:
    """The outputs of a request that samples these tokens after `resume` of them came from another worker; up to its
    end."""
    request = GenerateRequest("r", "t", "s", "m", Sampling(**settings), prompt=".", resume_tokens=tokens[:resume])
    sequence = Sequence(request, 1, [7, *tokens[:resume]], max_tokens, 0)
    writer = Writer(sequence, CODEC, {EOS})
    outputs: list[Output] = []
    for token in tokens[resume:]:
        outputs.append(writer.take(Choice(token, logprob, [(token, logprob)] if logprob is not None else None)))
        sequence.tokens.append(token)
        if outputs[-1].finish_reason:
            break
    return outputs


def text_of(outputs: list[Output]) -> str:
    return "".join(o.text for o in outputs)


def expected(tokens: list[int], stops: list[str], include: bool) -> str:
    """The text of whole tokens: decoded at once, without half a character at its end, cut at the first stop string."""
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(map(CODEC.token_bytes, tokens)))
    ends = sorted((text.find(s) + len(s), text.find(s)) for s in stops if s in text)
    return text if not ends else text[: ends[0][0] if include else ends[0][1]]


ids = st.lists(st.sampled_from(TEXT_IDS) | st.sampled_from(PARTS) | st.sampled_from(FOX), min_size=1, max_size=40)


@given(ids, st.lists(st.text("ae t🦊é\n", min_size=1, max_size=3), max_size=3), st.booleans(), st.data())
@settings(max_examples=400, deadline=None)
@example([*FOX, *FOX[:3]], [], False, None)
@example([*FOX, *FOX], ["🦊🦊"], True, None)
def test_deltas_join_to_the_whole_text_and_stop_strings_never_leak(
    tokens: list[int], stops: list[str], include: bool, data: Any
) -> None:
    outputs = write(tokens, max_tokens=1 + len(tokens), stop=stops, include_stop=include, ignore_eos=True)
    finished = outputs[-1].finish_reason
    whole = expected(tokens, stops, include)
    if finished is None:  # end it
        outputs = write([*tokens, EOS], stop=stops, include_stop=include)
    shown = text_of(outputs)
    assert shown == whole
    so_far = ""
    for output in outputs:
        so_far += output.text
        assert whole.startswith(so_far)
        assert include or not any(s in so_far for s in stops)
    if data is not None and len(outputs) > 1:  # a request that is resumed in between continues without a gap
        at = data.draw(st.integers(1, len(outputs) - 1))
        rest = write([*tokens, EOS], resume=at, stop=stops, include_stop=include)
        assert text_of(outputs[:at]) + text_of(rest) == shown


def test_no_delta_holds_a_part_of_a_character() -> None:
    outputs = write([*FOX, *FOX, EOS])
    assert [o.text for o in outputs] == ["", "", "", "🦊"] * 2 + [""]
    assert PARTS, "the demo tokenizer has no tokens inside of characters: the property above shows nothing"


def test_an_end_of_text_token_is_no_text_and_has_no_logprob() -> None:
    outputs = write([*CODEC.plain_tokens("Hi"), EOS], logprob=-0.5)
    assert outputs[-1].finish_reason == "stop" and outputs[-1].logprobs is None and outputs[-1].tokens == [EOS]
    assert all(o.logprobs for o in outputs[:-1])


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_ends_the_answer_with_its_text_if_asked(include: bool) -> None:
    before, [stop] = CODEC.plain_tokens("so"), CODEC.plain_tokens("!")
    outputs = write([*before, stop, *before], stop_token_ids=[stop], include_stop=include, ignore_eos=True)
    assert outputs[-1].finish_reason == "stop" and text_of(outputs) == ("so!" if include else "so")


def test_special_tokens_have_text_only_if_asked() -> None:
    tokens = [*CODEC.plain_tokens("a"), EOS, *CODEC.plain_tokens("b")]
    assert text_of(write(tokens, ignore_eos=True)) == "ab"
    assert text_of(write(tokens, ignore_eos=True, skip_special_tokens=False)) == "a<|im_end|>b"
    assert text_of(write(tokens, skip_special_tokens=False)) == "a"
    assert text_of(write(tokens, skip_special_tokens=False, include_stop=True)) == "a<|im_end|>"


def test_logprobs_have_the_bytes_of_tokens_and_the_spelling_of_special_ones() -> None:
    outputs = write([*FOX, EOS], ignore_eos=True, logprob=-0.25)
    spelled = [o.logprobs[0].token for o in outputs if o.logprobs]
    assert b"".join(spelled) == "🦊<|im_end|>".encode() and len(spelled) == 5
    assert outputs[0].logprobs is not None and outputs[0].logprobs[0].top == [(spelled[0], -0.25)]


def test_a_limit_ends_the_answer_and_shows_what_was_held() -> None:
    tokens = CODEC.plain_tokens("the EN")
    outputs = write(tokens, max_tokens=len(tokens), stop=["END"])
    assert outputs[-1].finish_reason == "length" and text_of(outputs) == "the EN"
