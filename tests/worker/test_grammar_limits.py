"""Schemas that hang, eat or crash what compiles them end there: real helper processes, and what the worker makes of
their end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from contracts.errors import InvalidRequest, RateLimited, RequestError
from contracts.request import GenerateRequest, Sampling, ToolUse
from runtime.sections import WorkerSection
from tests.pace import crowded_s
from tests.worker.engine_harness import DEMO, VOCAB
from worker.core.grammar_spec import MOST_CHARACTERS
from worker.sampling.grammars import GrammarCompiler, GrammarConstraint, Grammars
from worker.sampling.output import Guide
from worker.text.codec import TextCodec

EOS = 2
PLAIN = '{"type":"object"}'


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TextCodec.load(DEMO), VOCAB, {EOS})


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a helper process gets its second of processor time late, and the client is told to try again.
    Here the limit of processor time is tested."""
    monkeypatch.setattr("worker.sampling.grammars._BUSY_S", 60.0)


@contextlib.contextmanager
def within_seconds() -> Iterator[None]:
    """The block takes less than 5 s, beside those in which somebody had no core."""
    began, crowded = time.monotonic(), crowded_s()
    yield
    assert time.monotonic() - began < 5 + crowded_s() - crowded


@pytest.fixture(scope="module")
async def grammars(compiler: GrammarCompiler) -> AsyncIterator[Grammars]:
    made = Grammars(compiler, WorkerSection())
    yield made
    await made.close()


def request(schema: Any, tenant: str = "t", tools: Any = None) -> GenerateRequest:
    text = schema if schema is None or isinstance(schema, str) else json.dumps(schema)
    use = None if tools is None else ToolUse(json.dumps(tools))
    return GenerateRequest("r", tenant, "s", "m", Sampling(), messages=[], json_schema=text, tool_use=use)


def patterns(count: int) -> dict[str, Any]:
    """Doubles the time with each pattern."""
    return {"allOf": [{"type": "string", "pattern": f"(.*{chr(97 + i % 26)}{i}.*)"} for i in range(count)]}


def references(count: int) -> dict[str, Any]:
    """A chain that overflows the stack: outside of a process of its own, it is the worker that ends."""
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": {**chain, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("count", [20, 24, 200])
async def test_a_schema_that_takes_too_long_is_refused_within_seconds_and_again_at_once(
    grammars: Grammars, count: int
) -> None:
    with within_seconds(), pytest.raises(InvalidRequest) as caught:
        await grammars.guide(request(patterns(count)))
    assert caught.value.param == "response_format" and caught.value.code == "unsupported_schema"
    began = time.process_time()
    with pytest.raises(InvalidRequest) as again:
        await grammars.guide(request(patterns(count)))
    assert time.process_time() - began < 0.1 and again.value.message == caught.value.message
    assert await grammars.guide(request(PLAIN)), "everything works again"


async def seconds(grammars: Grammars, text: str) -> float:
    """What a new schema of somebody else takes."""
    began = time.monotonic()
    assert await grammars.guide(request({"enum": [text]}, "victim"))
    return time.monotonic() - began


async def test_others_are_served_at_their_pace_meanwhile(grammars: Grammars) -> None:
    await grammars.guide(request({"enum": ["a process is there for each"]}, "victim"))
    quiet = [await seconds(grammars, f"a quiet schema {n}") for n in range(3)]
    hostile = [asyncio.ensure_future(grammars.guide(request(patterns(21 + n), "attacker"))) for n in range(3)]
    await asyncio.sleep(0.1)
    served, turn = [], 0.0
    while len(served) < 10 and not hostile[2].done():
        served.append(await seconds(grammars, f"schema {len(served)}"))
        began = time.thread_time()
        await asyncio.sleep(0)
        turn = max(turn, time.thread_time() - began)
    assert len(served) > 2, "they do not wait until the attacker's third has ended"
    assert statistics.median(served) < 0.5 + 5 * max(quiet) and turn < 0.1, (served, quiet, turn)
    for task in hostile:
        with pytest.raises(RequestError):
            await task


@pytest.mark.parametrize(
    "schema",
    [
        references(10_000),
        {"type": "string", "pattern": "(((((.{1,1000}b){1,1000}c){1,1000}d){1,1000}e){1,1000}f){1,1000}"},
        {"const": "ab c" * 100_000},
        {"enum": [f"value {n}" for n in range(30_000)]},
        {"anyOf": [{"type": "object", "properties": {f"p{n}": {}}, "required": [f"p{n}"]} for n in range(8000)]},
        {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(8000)}},
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {"type": "string"}}} for j in range(4)]} for i in range(12)]},
        {"type": "integer", "multipleOf": 10**9 + 7},
        '{"const": "\\ud800"}',
        '{"properties": {"a": ' * 300 + "{}" + "}}" * 300,
    ],
    ids=[
        "$ref chain",
        "counters",
        "const",
        "enum",
        "anyOf",
        "properties",
        "$ref self",
        "$ref cycle",
        "allOf",
        "multipleOf",
        "text",
        "deep",
    ],
)
async def test_other_monsters_are_used_or_refused_within_seconds(grammars: Grammars, schema: Any) -> None:
    with within_seconds():
        [end] = await asyncio.gather(grammars.guide(request(schema)), return_exceptions=True)
    if isinstance(end, Guide):
        steps(end, 20)
    else:
        assert isinstance(end, InvalidRequest) and end.param == "response_format" and end.code == "unsupported_schema"


def steps(guide: Guide, count: int) -> float:
    """Take so many allowed tokens, or fewer; the longest time of one."""
    constraint, longest, rng = guide.constraint, 0.0, random.Random(1)
    for _ in range(count):
        began = time.thread_time()
        tokens = np.flatnonzero(constraint.allowed())
        constraint.took(int(rng.choice(tokens)))
        longest = max(longest, time.thread_time() - began)
        if constraint.error or constraint.complete:
            break
    return longest


COUNTS = [{"type": "string", kind: 10**9} for kind in ("minLength", "maxLength")] + [
    {"type": "array", "items": {"type": "integer"}, kind: 10**9} for kind in ("minItems", "maxItems")
]


@pytest.mark.parametrize("schema", COUNTS, ids=["minLength", "maxLength", "minItems", "maxItems"])
async def test_huge_counts_cost_no_more_than_small_ones(grammars: Grammars, schema: Any) -> None:
    guide = await grammars.guide(request(schema))
    assert guide is not None and steps(guide, 300) < 0.1


async def test_a_lexer_that_grows_at_every_token_fails_its_answer_before_it_costs_much(grammars: Grammars) -> None:
    words = [{"type": "object", "properties": {"a": {"type": "string", "pattern": f"^.*{c}{d}.{{400}}$"}},
    "required": ["a"]}
             for c in "aeiouthrsn" for d in "aeiouthrsndlcmwfgypb"]  # fmt: skip
    guide = await grammars.guide(request({"anyOf": words}))
    assert guide is not None
    began = time.thread_time()
    longest = steps(guide, 400)
    assert guide.constraint.error and longest < 0.15 and time.thread_time() - began < 0.6


async def test_masks_beyond_their_budget_end_the_answer_with_the_reason(compiler: GrammarCompiler) -> None:
    constraint = GrammarConstraint(compiler.matcher("start: /(.|\\n)*/\n", "test"), VOCAB)
    constraint._spent(0.2)
    assert constraint.allowed().any() and not constraint.error
    constraint._spent(0.2)
    assert "too long at each token" in constraint.error


async def test_a_long_forced_text_is_written_exactly(grammars: Grammars, compiler: GrammarCompiler) -> None:
    text = "Über" + "".join(f"{n} cats, " for n in range(400))
    guide = await grammars.guide(request({"const": text}))
    assert guide is not None
    written = b""
    while not guide.constraint.complete:
        allowed = np.flatnonzero(guide.constraint.allowed())
        if EOS in allowed:
            break
        guide.constraint.took(int(allowed[0]))
        assert not guide.constraint.error
        written += compiler._codec.token_bytes(int(allowed[0]))
    assert json.loads(written) == text


async def test_the_tool_that_cannot_be_enforced_is_named(grammars: Grammars) -> None:
    good = tool("good", {"type": "object"})
    with pytest.raises(InvalidRequest) as refused:
        await grammars.guide(request(None, tools=[good, tool("bad", {"properties": {"x": {"not": {}}}})]))
    assert refused.value.param == "tools[1].function.parameters"
    with pytest.raises(InvalidRequest) as killed:
        await grammars.guide(request(None, tools=[good, tool("slow", {"properties": {"x": patterns(22)}})]))
    assert killed.value.param == "tools" and killed.value.code == "unsupported_schema"


async def test_a_schema_of_megabytes_is_refused_before_anybody_reads_it(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest, match="at most") as caught:
        await grammars.guide(request('"' + "x" * MOST_CHARACTERS + '"'))
    assert caught.value.param == "response_format"


async def test_equal_schemas_that_come_together_are_compiled_once_and_a_cancelled_one_disturbs_no_other(
    grammars: Grammars,
) -> None:
    schema = {"enum": ["together"]}
    done = grammars._children.statistics.done if grammars._children else 0
    asked = [asyncio.ensure_future(grammars.guide(request(schema))) for _ in range(8)]
    await asyncio.sleep(0)
    asked[0].cancel()
    guides = await asyncio.gather(*asked[1:])
    assert len({id(guide) for guide in guides}) == 7
    assert grammars._children is not None and grammars._children.statistics.done == done + 1


async def test_a_tenant_with_too_many_new_schemas_at_a_time_is_told_to_wait(compiler: GrammarCompiler) -> None:
    made = Grammars(compiler, WorkerSection(grammar_s=0.1))
    asked = [asyncio.ensure_future(made.guide(request(patterns(22 + n), "flood"))) for n in range(40)]
    refused = [e for e in await asyncio.gather(*asked, return_exceptions=True) if isinstance(e, RateLimited)]
    assert len(refused) >= 20 and all(isinstance(e, RequestError) for e in refused)
    await made.close()
