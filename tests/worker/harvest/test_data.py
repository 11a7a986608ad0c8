"""What is learnt of a conversation: the assistant's turns, each with its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import ConfigError, InvalidRequest
from runtime.model_config import load_config
from worker.harvest.data import Examples, Reader
from worker.models.load import find_eos_ids
from worker.text.chat_template import PLAIN_TEMPLATE, ChatTemplate
from worker.text.codec import TextCodec

DEMO = Path(__file__).parents[3] / "models" / "demo"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: As Qwen3: the last answer has a block of reasoning, earlier ones have none.
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if loop.last and m['role'] == 'assistant' %}<think>\n\n"
    "</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER, OTHER = {"role": "user", "content": "the  key?"}, {"role": "user", "content": "and\n\nnow?"}


def said(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def reader(
    max_tokens: int = 1000, template: str | None = None, vocab_size: int = 2560, created_s: float = 0.0
) -> Reader:
    codec = TextCodec.load(DEMO)
    if template is not None:
        codec._template = ChatTemplate(template, {})
    return Reader(codec, find_eos_ids(DEMO, load_config(DEMO)), vocab_size, max_tokens, created_s=created_s)


def learnt(line: dict[str, Any], of: Reader) -> list[str]:
    """The spans that are learnt, as text."""
    ids, flags = of.example(line, 1)
    spans: list[list[int]] = []
    for at, flag in enumerate(flags):
        if flag:
            if not at or not flags[at - 1]:
                spans.append([])
            spans[-1].append(int(ids[at]))
    return [of._codec.text_of(span) for span in spans]


@pytest.mark.parametrize("template", [None, CHATML])
def test_each_turn_of_the_assistant_is_learnt_up_to_its_end(template: str | None) -> None:
    line = {"messages": [{"role": "system", "content": "Be brief."}, USER, said("It is 7."), OTHER, said("8")]}
    assert learnt(line, reader(template=template)) == ["It is 7.<|im_end|>", "8<|im_end|>"]


def test_a_turn_of_weight_0_is_not_learnt() -> None:
    line = {"messages": [USER, said("one", weight=0), OTHER, said("two", weight=1)]}
    assert learnt(line, reader()) == ["two<|im_end|>"]


def test_an_empty_answer_is_its_end() -> None:
    assert learnt({"messages": [USER, said("")]}, reader()) == ["<|im_end|>"]


def test_special_tokens_that_a_message_spells_are_no_ends() -> None:
    assert learnt({"messages": [USER, said("a<|im_end|>\nb")]}, reader()) == ["a<|im_end|>\nb<|im_end|>"]
    ids, _ = reader().example({"messages": [USER, said("a<|im_end|>\nb")]}, 1)
    assert list(ids).count(2) == 2, "one a message"


def test_line_breaks_that_merge_with_the_prompt_s_last_token_are_learnt() -> None:
    [text] = learnt({"messages": [USER, said("\n\nyes")]}, reader())
    assert text.lstrip("\n") == "yes<|im_end|>"


def test_without_a_template_an_answer_ends_with_its_line() -> None:
    line = {"messages": [USER, said("7"), OTHER, said("8")]}
    assert learnt(line, reader(template=PLAIN_TEMPLATE)) == [" 7\n", " 8\n"]


def test_a_template_that_changes_earlier_turns_is_refused_unless_only_the_last_is_learnt() -> None:
    line = {"messages": [USER, said("7"), OTHER, said("8")]}
    with pytest.raises(InvalidRequest, match=r"^line 5: .* up to messages\[1\] otherwise .*learn only the last turn"):
        reader(template=REASONING).example(line, 5)
    line["messages"][1]["weight"] = 0
    assert learnt(line, reader(template=REASONING)) == ["<think>\n\n</think>\n\n8<|im_end|>"]


def test_templates_see_the_time_of_the_job_s_creation_whenever_it_goes_on() -> None:
    dated = reader(template="{{ strftime_now('%d %b %Y') }}\n" + CHATML, created_s=86400.0 * 365)
    ids, _ = dated.example({"messages": [USER, said("7")]}, 1)
    assert dated._codec.text_of([int(i) for i in ids]).startswith("01 Jan 1971\n")


def test_a_conversation_that_the_template_cannot_render_is_refused_with_its_line() -> None:
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequest, match=r"^line 3: messages do not fit .*roles must alternate"):
        reader(template=strict).example({"messages": [USER, said("7")]}, 3)
    with pytest.raises(InvalidRequest, match=r"^line 3: "):
        reader(template=CHATML.replace("<|im_start|>assistant\n", "")).example({"messages": [said("7")]}, 3)


def test_all_of_a_text_is_learnt_but_its_first_token() -> None:
    ids, flags = reader().example({"text": "The sky is blue."}, 1)
    examples = Examples([ids, ids], [flags, flags])
    assert examples.lengths == [len(ids)] * 2 and examples.target_count(1) == len(ids) - 1
    at, labels = examples.targets(1)
    assert at.tolist() == list(range(len(ids) - 1)) and labels.tolist() == list(ids[1:])
    assert examples.tokens(1).tolist() == list(ids)


def test_examples_are_cut_to_max_tokens_and_refused_when_nothing_is_left_to_learn() -> None:
    line = {"messages": [USER, said("one two three four five six"), OTHER, said("8")]}
    ids, _ = reader().example(line, 1)
    start = len(reader()._codec.render([USER]))
    short, flags = reader(start + 3).example(line, 1)
    assert list(short) == list(ids[: start + 3]) and flags.tolist() == [False] * start + [True] * 3
    with pytest.raises(InvalidRequest, match=r"^line 9: has nothing to learn within its first \d+ tokens .* max_t"):
        reader(start).example(line, 9)
    with pytest.raises(InvalidRequest, match="nothing to learn"):
        reader().example({"text": "a"}, 9)
    with pytest.raises(InvalidRequest, match=r"^line 9: has token .* which the model lacks"):
        reader(vocab_size=20).example(line, 9)


def test_a_file_is_read_line_by_line_and_its_digest_is_that_of_what_is_learnt(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [{"text": "The sky is blue."}, {"messages": [USER, said("7")]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first = reader().read(path)
    assert len(first) == 2
    path.write_text("".join(json.dumps(line, indent=None, separators=(",", ":")) + "\r\n" for line in lines))
    assert reader().read(path).digest() == first.digest()
    path.write_text("".join(json.dumps(line) + "\n" for line in reversed(lines)))
    assert reader().read(path).digest() != first.digest()
    path.write_text(json.dumps(lines[0]) + "\n" + json.dumps({"messages": [USER]}) + "\n")
    with pytest.raises(InvalidRequest, match=r"^line 2: has no assistant message"):
        reader().read(path)
    path.write_text("")
    with pytest.raises(InvalidRequest, match="the file is empty"):
        reader().read(path)
    with pytest.raises(ConfigError, match=r"missing.jsonl cannot be read: No such file"):
        reader().read(tmp_path / "missing.jsonl")
