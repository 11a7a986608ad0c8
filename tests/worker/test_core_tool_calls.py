"""Calls are spelled as the model's template spells them, and read back however the text is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.request import ToolCallDelta
from worker.core.tool_calls import (
    GENERIC,
    HERMES,
    LLAMA,
    CallReader,
    Dialect,
    call_id,
    dialect_of,
    generic_notice,
    parameters_of,
)

QWEN = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools> answer within "
    "<tool_call></tool_call>{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "knows_tools", "expected"),
    [
        (QWEN, True, HERMES),
        (QWEN, False, GENERIC),
        ('{% if tools %}respond as {"name": function, "parameters": {}}{% endif %}', True, LLAMA),
        ("<tool_call><function=name>{{ tools }}", True, GENERIC),
        ("[AVAILABLE_TOOLS]{{ tools }}", True, GENERIC),
        ("{{ messages }}", False, GENERIC),
    ],
)
def test_the_dialect_is_told_from_the_template(source: str, knows_tools: bool, expected: Dialect) -> None:
    assert dialect_of(source, knows_tools) is expected


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
calls = st.lists(
    st.tuples(st.sampled_from(["f", "get_weather", "a-b"]), st.dictionaries(st.text(max_size=5), values, max_size=3)),
    max_size=3,
)


def spelled(dialect: Dialect, said: str, called: list[tuple[str, dict[str, Any]]], indent: int | None) -> str:
    texts = [
        dialect.begin
        + dialect.head
        + name
        + dialect.between
        + json.dumps(given, indent=indent)
        + dialect.tail
        + dialect.end
        for name, given in called
    ]
    return said + (dialect.separator or "").join(texts)


def joined(said: list[str], deltas: list[ToolCallDelta]) -> tuple[str, list[list[str]]]:
    found: list[list[str]] = []
    for delta in deltas:
        if delta.index == len(found):
            assert delta.id and delta.name
            found.append([delta.id, delta.name, ""])
        else:
            assert not delta.id and not delta.name
        found[delta.index][2] += delta.arguments
    return "".join(said), found


@pytest.mark.parametrize("dialect", [HERMES, LLAMA])
@given(
    said=st.text("ab<tol_c{>\n ", max_size=20),
    called=calls,
    indent=st.sampled_from([None, 2]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_calls_come_back_however_the_text_is_cut(
    dialect: Dialect, said: str, called: list[tuple[str, dict[str, Any]]], indent: int | None, seed: int
) -> None:
    if dialect is LLAMA:  # a call is the whole answer there
        called = called[:1]
        said = "" if called else said
    if HERMES.begin in said:
        return
    text = spelled(dialect, said, called, indent)
    rng = random.Random(seed)
    cuts = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, 12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    reader = CallReader(dialect, "answer", forced=False)
    gained = [reader.push(piece, last=n == len(pieces) - 1) for n, piece in enumerate(pieces)]
    shown, found = joined([g[0] for g in gained], [d for g in gained for d in g[1]])
    assert shown == said
    assert [[name, json.loads(given)] for _, name, given in found] == [list(call) for call in called]
    assert [i for i, _, _ in found] == [call_id("answer", n) for n in range(len(called))]

    # A request that is resumed in between continues without a gap.
    at = rng.randint(0, len(pieces))
    resumed = CallReader(dialect, "answer", forced=False)
    resumed.push("".join(pieces[:at]))
    later = [resumed.push(piece, last=at + n == len(pieces) - 1) for n, piece in enumerate(pieces[at:])]
    deltas = [d for g in gained[:at] for d in g[1]] + [d for g in later for d in g[1]]
    assert joined([g[0] for g in gained[:at]] + [g[0] for g in later], deltas) == (shown, found)


def test_a_forced_call_is_read_from_its_first_character() -> None:
    reader = CallReader(HERMES, "a", forced=True)
    said, deltas = reader.push(spelled(HERMES, "", [("f", {"x": 1})], None), last=True)
    assert said == "" and [(d.name, d.arguments) for d in deltas] == [("f", '{"x": 1}')]


def test_a_call_that_is_cut_off_keeps_what_it_has() -> None:
    reader = CallReader(HERMES, "a", forced=False)
    said, deltas = reader.push('Well <tool_call>\n{"name": "f", "arguments": {"x": "}', last=True)
    assert said == "Well " and [(d.name, d.arguments) for d in deltas] == [("f", '{"x": "}')]
    assert CallReader(HERMES, "a", forced=False).push('<tool_call>\n{"na', last=True) == ("", [])


def test_what_only_looks_like_a_call_is_text() -> None:
    assert CallReader(HERMES, "a", forced=False).push("a <tool_", last=True)[0] == "a <tool_"
    assert CallReader(LLAMA, "a", forced=False).push('{"nam', last=True)[0] == '{"nam'
    assert CallReader(LLAMA, "a", forced=False).push('{"age": 3}', last=True)[0] == '{"age": 3}'
    assert CallReader(LLAMA, "a", forced=False).push('so {"name": "f", "parameters": {}}', last=True)[1] == []


def test_a_function_without_parameters_takes_none() -> None:
    assert parameters_of({"function": {"name": "f"}}) == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }
    assert parameters_of({"function": {"name": "f", "parameters": {"properties": {}}}}) == {
        "type": "object",
        "properties": {},
    }


def test_the_notice_names_every_function_and_shows_the_spelling() -> None:
    notice = generic_notice([{"function": {"name": "f", "description": "d"}}, {"function": {"name": "g"}}])
    assert '{"name": "f", "description": "d"}' in notice and '{"name": "g"}' in notice
    assert '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>' in notice
