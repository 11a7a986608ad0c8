"""Answers that must be JSON or calls are, whatever the model would rather say: a random model, greedy and drawn, in a
real engine."""

from __future__ import annotations

import json
import queue
import random
import re
import unicodedata
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from contracts.errors import InvalidRequest
from contracts.frames import StepFrame
from contracts.request import GenerateRequest, Sampling, ToolUse
from gateway.openai.forms import forms_of
from runtime.sections import WorkerSection
from tests.worker.engine_harness import DEMO, VOCAB, Harness, random_prompt, tiny_model
from worker.core.grammar_spec import GrammarSpec
from worker.core.tool_calls import GENERIC, HERMES, LLAMA, CallReader, Dialect, call_grammar, json_grammar
from worker.engine.engine import Submit
from worker.sampling.grammars import GrammarCompiler, GrammarConstraint, Grammars
from worker.text.chat_template import PLAIN_TEMPLATE, ChatTemplate
from worker.text.codec import TextCodec

EOS = 2
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["a", "bb", "ccc"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS = json.dumps([WEATHER, TIME])


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    made = Harness(tiny_model(tmp_path_factory.mktemp("tiny")))
    yield made
    made.settle()
    made.close()


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(TextCodec.load(DEMO), VOCAB, {EOS})


@pytest.fixture(scope="module")
async def judged(grammars: GrammarCompiler) -> AsyncIterator[Grammars]:
    """With helper processes, as the worker has it."""
    made = Grammars(grammars, WorkerSection())
    yield made
    await made.close()


def is_person(text: str) -> bool:
    value = json.loads(text)
    assert set(value) == {"name", "age", "kind", "tags"}
    assert len(value["name"]) <= 8 and 0 <= value["age"] <= 150 and value["kind"] in ("a", "bb", "ccc")
    assert len(value["tags"]) <= 2 and all(len(t) <= 4 for t in value["tags"])
    return True


def right_call(name: str, arguments: str) -> bool:
    given_ = json.loads(arguments)
    if name == "get_time":
        return bool(given_ == {})
    return (
        name == "get_weather"
        and set(given_) == {"city", "days"}
        and given_["city"] in ("Rome", "Oslo")
        and 1 <= given_["days"] <= 9
    )


# ---- in the engine
# -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.5, "seed": 3}, {"temperature": 1.0, "seed": 4, "top_p": 0.5, "repetition_penalty": 1.3}],
)
def test_an_answer_satisfies_its_schema_and_ends_there(harness: Harness, sampling: dict[str, Any]) -> None:
    prompts = [random_prompt(random.Random(n), 20) for n in range(4)]
    asked = [
        harness.submit(p, 400, json_schema=json.dumps(PERSON), session=f"j{n}", **sampling)
        for n, p in enumerate(prompts)
    ]
    plain = harness.submit(prompts[0], 10)  # beside them, without a grammar
    for result in harness.wait(*asked):
        assert result.finish == "stop" and is_person(result.text), result.text
    assert harness.wait(plain)[0].finish == "length"


def test_any_object_is_an_object_as_far_as_it_goes(harness: Harness) -> None:
    constrained = harness.run(
        random_prompt(random.Random(9), 20), 60, json_schema='{"type":"object"}', temperature=1.0, seed=1
    )
    assert constrained.text.lstrip().startswith("{")
    if constrained.finish == "stop":
        assert isinstance(json.loads(constrained.text), dict)


def test_a_required_call_is_made_and_named_ones_are_named(harness: Harness) -> None:
    prompt = random_prompt(random.Random(5), 20)
    one = harness.run(prompt, 300, tool_use=ToolUse(TOOLS, "required", "get_weather"))
    assert one.finish == "stop" and one.text == ""
    [[call, name, arguments]] = one.calls
    assert call.startswith("call_") and name == "get_weather" and right_call(name, arguments)
    single = harness.run(
        prompt, 300, tool_use=ToolUse(TOOLS, "required", None, parallel=False), temperature=1.0, seed=8
    )
    assert len(single.calls) == 1 and single.finish == "stop" and right_call(single.calls[0][1], single.calls[0][2])
    several = harness.run(prompt, 300, tool_use=ToolUse(TOOLS, "required"), temperature=1.5, seed=2)
    whole = several.calls if several.finish == "stop" else several.calls[:-1]
    assert several.calls and all(right_call(name, arguments) for _, name, arguments in whole)


def test_a_grammar_and_its_calls_go_on_after_a_worker_was_lost(harness: Harness) -> None:
    prompt = random_prompt(random.Random(6), 20)
    spec: dict[str, Any] = {
        "tool_use": ToolUse(TOOLS, "required", None, parallel=False),
        "temperature": 1.0,
        "seed": 8,
        "group": "g",
    }
    whole = harness.run(prompt, 300, **spec)
    for cut in (1, len(whole.tokens) // 2, len(whole.tokens) - 1):
        rest = harness.run(prompt, 300, resume=whole.tokens[:cut], **spec)
        assert rest.tokens == whole.tokens[cut:] and rest.finish == "stop"
        if rest.calls and rest.calls[0][0]:  # the call began after the cut
            assert rest.calls[0][:2] == whole.calls[0][:2]
        assert whole.calls[0][2].endswith("".join(c[2] for c in rest.calls))


def test_text_stays_text_where_no_call_may_be(harness: Harness) -> None:
    said = harness.run(random_prompt(random.Random(7), 20), 40, tool_use=ToolUse(TOOLS, "none"))
    assert not said.calls and said.text and said.finish in ("stop", "length")


# ---- what a grammar allows
# ---------------------------------------------------------------------------------------------
def walk(grammars: GrammarCompiler, grammar: str, text: str) -> GrammarConstraint | str:
    """The constraint after `text`, or the part of it that was not allowed."""
    constraint = GrammarConstraint(grammars.matcher(grammar, "test"), VOCAB)
    codec = grammars._codec
    done: list[int] = []
    for token in codec.plain_tokens(text):
        done.append(token)
        if not constraint.allowed()[token]:
            return codec.decode(done)
        constraint.took(token)
        assert not constraint.error
    return constraint


WEATHER_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
TIME_CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
LLAMA_CALL = '{"name": "get_weather", "parameters": {"days": 3, "city": "Rome"}}'
LLAMA_CALL_IN_ORDER = '{"name": "get_weather", "parameters": {"city": "Rome", "days": 3}}'


@pytest.mark.parametrize(
    ("dialect", "use", "text", "may_end"),
    [
        (HERMES, ToolUse(TOOLS), "Hello <tool> there", True),
        (HERMES, ToolUse(TOOLS), "", True),
        (HERMES, ToolUse(TOOLS), f"Let me see.\n{WEATHER_CALL}", True),
        (HERMES, ToolUse(TOOLS), f"{WEATHER_CALL}\n{TIME_CALL}", True),
        (HERMES, ToolUse(TOOLS), WEATHER_CALL[:-5], False),
        (HERMES, ToolUse(TOOLS, "none"), "no <tool_cal here", True),
        (HERMES, ToolUse(TOOLS, "required"), TIME_CALL, True),
        (LLAMA, ToolUse(TOOLS), "Hello {", True),
        (LLAMA, ToolUse(TOOLS), "", True),
        (LLAMA, ToolUse(TOOLS), LLAMA_CALL_IN_ORDER, True),
        (LLAMA, ToolUse(TOOLS, "required", "get_weather"), LLAMA_CALL_IN_ORDER, True),
        (LLAMA, ToolUse(TOOLS, "none"), '{"nam', True),
    ],
)
def test_what_may_be_said(grammars: GrammarCompiler, dialect: Dialect, use: ToolUse, text: str, may_end: bool) -> None:
    constraint = walk(grammars, call_grammar(dialect, use, None), text)
    assert isinstance(constraint, GrammarConstraint), constraint
    assert (constraint.complete or bool(constraint.allowed()[EOS])) is may_end


@pytest.mark.parametrize(
    ("dialect", "use", "text"),
    [
        (HERMES, ToolUse(TOOLS), '<tool_call>\n{"name": "other"'),
        (HERMES, ToolUse(TOOLS), WEATHER_CALL.replace("Rome", "Paris")),
        (HERMES, ToolUse(TOOLS), WEATHER_CALL + " and more"),
        (HERMES, ToolUse(TOOLS, parallel=False), f"{WEATHER_CALL}\n{TIME_CALL}"),
        (HERMES, ToolUse(TOOLS, "required"), "Hello"),
        (HERMES, ToolUse(TOOLS, "required", "get_time"), WEATHER_CALL),
        (HERMES, ToolUse(TOOLS, "none"), "x <tool_call>"),
        (LLAMA, ToolUse(TOOLS), '{"name": "other"'),
        (LLAMA, ToolUse(TOOLS), LLAMA_CALL_IN_ORDER + "; x"),
        (LLAMA, ToolUse(TOOLS, "none"), '{"name": "'),
    ],
)
def test_what_may_not_be_said(grammars: GrammarCompiler, dialect: Dialect, use: ToolUse, text: str) -> None:
    constraint = walk(grammars, call_grammar(dialect, use, None), text)
    assert isinstance(constraint, str) or constraint.complete, "all of it was allowed"


def test_an_answer_may_be_json_or_a_call(grammars: GrammarCompiler) -> None:
    both = call_grammar(
        HERMES,
        ToolUse(TOOLS),
        json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
    )
    for text in ('{"a": 1}', WEATHER_CALL):
        assert isinstance(walk(grammars, both, text), GrammarConstraint)
    assert isinstance(walk(grammars, both, "Hello"), str)


def test_json_is_one_line_with_or_without_spaces(grammars: GrammarCompiler) -> None:
    grammar = json_grammar(json.dumps(PERSON))
    person = {"name": "Ada", "age": 36, "kind": "bb", "tags": ["x"]}
    for separators in ((",", ":"), (", ", ": ")):
        assert isinstance(walk(grammars, grammar, json.dumps(person, separators=separators)), GrammarConstraint)
    assert isinstance(walk(grammars, grammar, json.dumps(person, indent=1)), str)
    assert isinstance(walk(grammars, grammar, '{"name":  '), str)


def test_special_tokens_are_no_text_of_a_grammar(grammars: GrammarCompiler) -> None:
    constraint = GrammarConstraint(grammars.matcher(call_grammar(HERMES, ToolUse(TOOLS), None), "test"), VOCAB)
    allowed = np.flatnonzero(constraint.allowed())
    assert {t for t in grammars._codec.special_ids if t in allowed} == {EOS}
    assert len(allowed) > 1500


@pytest.mark.parametrize("ends", [set(), {EOS, 0}])
def test_other_ends_of_text_and_none_at_all(ends: set[int]) -> None:
    made = GrammarCompiler(TextCodec.load(DEMO), VOCAB + 64, ends)  # the model's vocabulary is padded
    constraint = GrammarConstraint(made.matcher('start: "a"?', "test"), VOCAB + 64)
    allowed = set(np.flatnonzero(constraint.allowed()).tolist())
    assert allowed & {0, 1, 2} == ends and max(allowed) < VOCAB
    constraint.took(made._codec.plain_tokens("a")[0])
    assert constraint.complete and not constraint.error


# ---- refusals
# ----------------------------------------------------------------------------------------------------------
def request(json_schema: str | None = None, tool_use: ToolUse | None = None) -> GenerateRequest:
    return GenerateRequest("r", "t", "s", "m", Sampling(), messages=[], json_schema=json_schema, tool_use=tool_use)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "string", "not": {"const": "x"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "thing"}, "thing"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "nsatisfiable"),
    ],
)
async def test_a_schema_that_cannot_be_enforced_is_refused_with_the_reason(
    judged: Grammars, schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await judged.guide(request(json.dumps(schema)))
    assert (
        caught.value.param == "response_format"
        and reason in caught.value.message
        and "<state>" not in caught.value.message
    )
    bad = {
        "type": "function",
        "function": {"name": "g", "parameters": {"properties": {"x": schema}, "required": ["x"]}},
    }
    if "$ref" in schema:
        return
    with pytest.raises(InvalidRequest) as caught:
        await judged.guide(request(tool_use=ToolUse(json.dumps([WEATHER, bad]))))
    assert caught.value.param == "tools[1].function.parameters" and reason in caught.value.message


async def test_a_request_without_a_grammar_has_no_guide_and_costs_nothing() -> None:
    fresh = Grammars(GrammarCompiler(TextCodec.load(DEMO), VOCAB, {EOS}), WorkerSection())
    assert await fresh.guide(request()) is None and fresh._children is None and fresh.compiler._tokenizer is None
    await fresh.close()


async def test_a_compiled_grammar_is_kept_and_answers_do_not_disturb_each_other(
    judged: Grammars, grammars: GrammarCompiler
) -> None:
    schema = json.dumps({"enum": ["yes", "no"]})
    first, second = await judged.guide(request(schema)), await judged.guide(request(schema))
    assert first is not None and second is not None
    [quote] = grammars._codec.plain_tokens('"')
    first.constraint.took(quote)
    assert second.constraint.allowed()[quote] and not first.constraint.allowed()[quote]


class Frames:
    """A gateway's stream."""

    def __init__(self) -> None:
        self.queue: queue.Queue[StepFrame] = queue.Queue()

    def put(self, frame: StepFrame) -> None:
        self.queue.put(frame)


def test_a_limit_of_the_library_ends_the_request_with_an_error_and_no_other(harness: Harness) -> None:
    asked = request('{"type":"object"}')
    guide = harness.guide(asked)
    assert guide is not None and isinstance(guide.constraint, GrammarConstraint)
    guide.constraint.took(harness.codec.plain_tokens("x")[0])  # what no JSON object begins with
    assert guide.constraint.error and guide.constraint.allowed().all()
    prompt, stream = random_prompt(random.Random(1), 20), Frames()
    beside = harness.submit(prompt, 20)
    harness.engine.inbox.put(Submit(asked, prompt, 10, stream, guide))
    failed = []
    while not failed:
        failed = stream.queue.get(timeout=30).failed
    assert failed[0].request_id == "r" and failed[0].error[0] == 400 and failed[0].error[2] == "response_format"
    assert len(harness.wait(beside)[0].tokens) == 20


@given(seed=st.integers(0, 2**32), dialect=st.sampled_from([HERMES, GENERIC, LLAMA]), parallel=st.booleans())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_drawn_under_a_call_grammar_is_read_back(
    grammars: GrammarCompiler, seed: int, dialect: Dialect, parallel: bool
) -> None:
    rng = random.Random(seed)
    constraint = GrammarConstraint(
        grammars.matcher(call_grammar(dialect, ToolUse(TOOLS, "required", None, parallel), None), "t"), VOCAB
    )
    reader, detokenizer = CallReader(dialect, "a", forced=True), grammars._codec.detokenizer()
    found: list[list[str]] = []
    for _ in range(600):
        if constraint.complete:
            break
        token = rng.choice(np.flatnonzero(constraint.allowed()).tolist())
        constraint.took(token)
        if token == EOS:
            break
        said, deltas = reader.push(detokenizer.push(token))
        assert said == ""
        for delta in deltas:
            if delta.index == len(found):
                found.append([delta.name, ""])
            found[delta.index][1] += delta.arguments
    else:
        found.pop()
    assert found and all(right_call(*call) for call in found)


def sentencepiece() -> tuple[TextCodec, int]:
    """A tokenizer that puts a space in front of every text, as Llama 2 and Mistral have it, with its number of
    tokens."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "▁ab",
        "ab",
        "é",
        '"',
        '▁"',
    ]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("▁", '"')]
    made = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return TextCodec(made, json.loads(made.to_str()), ChatTemplate(PLAIN_TEMPLATE, {})), len(pieces)


_SENTENCEPIECE = (GrammarCompiler(*sentencepiece(), {EOS}), sentencepiece()[1])
_BYTE_LEVEL = (GrammarCompiler(TextCodec.load(DEMO), VOCAB, {EOS}), VOCAB)


@pytest.mark.parametrize("made", [_SENTENCEPIECE, _BYTE_LEVEL], ids=["sentencepiece", "byte level"])
@given(
    choices=st.lists(
        st.text("ab é🦊<|im_end>/s\n", max_size=8) | st.sampled_from(["<|im_end|>", "</s>", "e\u0301", " a"]),
        min_size=1,
        max_size=3,
    ),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=120, deadline=None)
def test_whatever_text_is_asked_for_can_be_spelled_with_any_tokenizer(
    made: tuple[GrammarCompiler, int], choices: list[str], seed: int
) -> None:
    compiler, vocabulary = made
    constraint = GrammarConstraint(compiler.matcher(json_grammar(json.dumps({"enum": choices})), "test"), vocabulary)
    rng, written = random.Random(seed), b""
    for _ in range(200):
        if constraint.complete:
            break
        token = rng.choice(np.flatnonzero(constraint.allowed()).tolist())
        constraint.took(token)
        assert not constraint.error, (written, constraint.error)
        if token == EOS:
            break
        written += compiler._codec.token_bytes(token)
    assert json.loads(written) in choices


# ---- expressions
# -------------------------------------------------------------------------------------------------------
def accepted(grammars: GrammarCompiler, regex: str, text: str) -> bool:
    """Whether an answer that must match `regex` may be `text`, and may end there."""
    matcher = grammars.matcher(GrammarSpec(GENERIC, None, None, regex).grammar(), "guided_regex")
    tokens = TextCodec.load(DEMO).plain_tokens(text)
    return all(matcher.consume_token(token) for token in tokens) and bool(matcher.is_accepting())


def test_an_answer_matches_its_expression_and_ends_there(harness: Harness) -> None:
    prompt = random_prompt(random.Random(6), 20)
    for n in range(4):
        result = harness.run(prompt, 60, regex=r"[a-c]{3}/\d\d", temperature=1.5, seed=n)
        assert result.finish == "stop" and re.fullmatch(r"[a-c]{3}/\d\d", result.text), result.text
    chosen = {harness.run(prompt, 60, regex="yes|no|maybe", temperature=1.5, seed=n).text for n in range(8)}
    assert chosen <= {"yes", "no", "maybe"} and len(chosen) > 1


@pytest.mark.parametrize(
    ("regex", "text"),
    [
        ("a/b", "a/b"),
        (r"a\/b[/]", "a/b/"),
        ("a\nb", "a\nb"),
        ("a\\\nb", "a\nb"),
        (r"^\d+$", "12"),
        ("(?i)yes", "YES"),
        (r"\\/", "\\/"),
    ],
)
def test_an_expression_says_what_it_says_elsewhere(grammars: GrammarCompiler, regex: str, text: str) -> None:
    assert accepted(grammars, regex, text) and re.fullmatch(regex, text)
    assert not accepted(grammars, regex, text + "!")


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), min_size=1, max_size=4),
    st.text(max_size=4),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_of_a_choice_each_text_is_taken_and_no_other(grammars: GrammarCompiler, choice: list[str], other: str) -> None:
    [form] = forms_of("guided_", None, None, choice)
    assert form.regex is not None
    for text in choice:
        # The demo's tokenizer composes what it reads, so that it has no tokens for other texts.
        assert not unicodedata.is_normalized("NFC", text) or accepted(grammars, form.regex, text)
    if other not in choice and other.isascii():
        assert not accepted(grammars, form.regex, other)


async def test_a_form_that_cannot_be_enforced_is_named_by_its_own_field(judged: Grammars) -> None:
    asked = [
        ("guided_regex", {"regex": r"(?=a)b"}),
        ("structured_outputs.json", {"json_schema": '{"not":{}}'}),
        ("", {"json_schema": '{"not":{}}'}),
    ]
    for name, form in asked:
        request = GenerateRequest("r", "t", "s", "m", Sampling(), messages=[], form_field=name, **form)
        with pytest.raises(InvalidRequest) as refused:
            await judged.guide(request)
        assert refused.value.param == (name or "response_format") and refused.value.message.startswith(
            name or "response_format"
        )
    both = GenerateRequest(
        "r", "t", "s", "m", Sampling(), messages=[], regex="a", json_schema="{}", form_field="guided_regex"
    )
    with pytest.raises(InvalidRequest, match="guided_regex"):
        await judged.guide(both)
