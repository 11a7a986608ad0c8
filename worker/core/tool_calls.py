"""How a model spells function calls: the text, the grammar that enforces it, and the reader that parses it.

A dialect is the spelling that the model was trained on, detected from its chat template. If the template has no tools
or an unknown spelling, a system message describes the tools, with tags that most models know (`GENERIC`).

Calls are always generated under a grammar (`call_grammar`), so names exist and arguments satisfy their schemas, and the
reader (`CallReader`) meets exactly the dialect's spelling.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from blake3 import blake3

from contracts.request import ToolCallDelta, ToolUse

#: Whitespace between JSON tokens. With more allowed, above all line breaks, models may emit it until max_tokens.
_WHITESPACE = "[ ]?"
_ID_CHARS = 24
Where = Literal["lead", "head", "name", "arguments", "after", "text"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """One spelling: `begin head NAME between ARGUMENTS tail end`, further calls after `separator`.

    begin: a marker that no other text contains; empty if an answer that opens with `head` is a call. told: how the
    prompt lists tools: by the template's variable, or by a system message.
    """

    name: str
    begin: str
    head: str
    between: str
    tail: str
    end: str
    #: None: an answer holds at most one call.
    separator: str | None
    told: Literal["template", "system"]


HERMES = Dialect("hermes", "<tool_call>", '\n{"name": "', '", "arguments": ', "}", "\n</tool_call>", "\n", "template")
LLAMA = Dialect("llama", "", '{"name": "', '", "parameters": ', "}", "", None, "template")
GENERIC = replace(HERMES, name="generic", told="system")


def dialect_of(source: str, knows_tools: bool) -> Dialect:
    """The dialect of a chat template with this source. knows_tools: it uses the variable `tools`."""
    if knows_tools and "<tool_call>" in source and "<function=" not in source:
        return HERMES
    if knows_tools and '"parameters"' in source and '{"name":' in source:
        return LLAMA
    return GENERIC


def json_rule(schema: Any) -> str:
    """The right-hand side of a rule for JSON that satisfies `schema` (an object or a boolean)."""
    schema = schema if isinstance(schema, dict) else {"allOf": [schema]}
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}}, ensure_ascii=False)


def json_grammar(schema: str) -> str:
    """The grammar of a JSON answer that satisfies `schema` (JSON text)."""
    return f"start: {json_rule(json.loads(schema))}\n"


def parameters_of(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments. As in OpenAI's API, a function without parameters takes none."""
    parameters = tool["function"].get("parameters")
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **parameters}


def call_grammar(dialect: Dialect, use: ToolUse, schema: str | None) -> str:
    """The grammar of an answer that may or must call functions. schema: for an answer without calls.

    With "none" the prompt still lists the functions, so that its cache stays valid, but no call can begin.
    """
    tools = [t for t in json.loads(use.tools) if use.name in (None, t["function"]["name"])]
    content = f"content: {json_rule(json.loads(schema))}\n" if schema is not None else ""
    anything = _no_call(dialect)
    if use.choice == "none":
        return "start: content\n" + (content or f"content: TEXT\nTEXT: {anything}\n")
    several = use.parallel and use.name is None and dialect.separator is not None
    more = (
        f" ({_literal(dialect.separator + dialect.begin)} call)*" if several and dialect.separator is not None else ""
    )
    begin = f"{_literal(dialect.begin)} " if dialect.begin else ""
    if use.choice == "required":
        start = f"start: {begin}call{more}\n"
        content = ""
    elif content:
        start = f"start: content | {begin}call{more}\n"
    elif dialect.begin:
        # The first match ends the text before it and opens a call.
        start = f"start: TEXT | lead call{more}\nlead[lazy]: /(.|\\n)*/ {_literal(dialect.begin)}\nTEXT: /(.|\\n)*/\n"
    else:
        start = f"start: TEXT | call\nTEXT: {anything}\n"
    calls = "call: " + " | ".join(f"call_{i}" for i in range(len(tools))) + "\n"
    for i, tool in enumerate(tools):
        opening = dialect.head + tool["function"]["name"] + dialect.between
        calls += f"call_{i}: {_literal(opening)} arguments_{i} {_literal(dialect.tail + dialect.end)}\n"
        calls += f"arguments_{i}: {json_rule(parameters_of(tool))}\n"
    return "%llguidance {}\n" + start + content + calls


def _literal(text: str) -> str:
    return json.dumps(text)


def _no_call(dialect: Dialect) -> str:
    """A terminal for any text in which no call begins."""
    call = f"(.|\\n)*{dialect.begin}" if dialect.begin else dialect.head.replace("{", "\\{")
    return f"/(.|\\n)*/ & ~/{call}(.|\\n)*/"


def call_id(answer: str, index: int) -> str:
    """The id of a call of this answer; deterministic, so a resumed request has the same ids."""
    return "call_" + blake3(f"upbeat tool call {answer} {index}".encode()).hexdigest()[:_ID_CHARS]


class CallReader:
    """Splits an answer's growing text into content and calls.

    The result depends only on the whole text so far, not on how it is split. A text that ends inside a call leaves its
    arguments incomplete, as in OpenAI's API.
    """

    def __init__(self, dialect: Dialect, answer: str, forced: bool) -> None:
        """answer: its id, for call ids. forced: the answer holds only calls."""
        self._dialect, self._answer = dialect, answer
        self._opening = dialect.begin + dialect.head
        self._where: Where = "head" if forced else "lead"
        #: Text not emitted yet: it may begin a call or be part of a call's spelling.
        self._held = ""
        self._calls = -1
        self._depth = 0
        self._quoted = self._escaped = False

    @property
    def called(self) -> bool:
        """Whether a call has begun."""
        return self._calls >= 0

    def push(self, text: str, last: bool = False) -> tuple[str, list[ToolCallDelta]]:
        """`(content, calls)` that `text` adds. last: nothing follows, so nothing is held back."""
        self._held += text
        said: list[str] = []
        called: list[ToolCallDelta] = []
        while self._advance(said, called):
            pass
        if last and self._where in ("lead", "text"):
            said.append(self._held)
            self._held = ""
        return "".join(said), called

    def _advance(self, said: list[str], called: list[ToolCallDelta]) -> bool:
        """One move; False when more text is needed."""
        match self._where:
            case "lead":
                return self._lead(said)
            case "text":
                said.append(self._held)
                self._held = ""
                return False
            case "head":
                return self._skip(self._opening, "name")
            case "name":
                return self._name(called)
            case "arguments":
                return self._arguments(called)
            case "after":
                closing = self._dialect.tail + self._dialect.end + (self._dialect.separator or "")
                return self._skip(closing, "head")

    def _lead(self, said: list[str]) -> bool:
        begin = self._dialect.begin
        if not begin:  # a call only opens an answer
            head = self._dialect.head
            if self._held.startswith(head):
                self._where = "head"
                return True
            if head.startswith(self._held):
                return False
            self._where = "text"
            return True
        at = self._held.find(begin)
        if at >= 0:
            said.append(self._held[:at])
            self._held, self._where = self._held[at:], "head"
            return True
        keep = next(
            (n for n in range(min(len(begin) - 1, len(self._held)), 0, -1) if self._held.endswith(begin[:n])), 0
        )
        said.append(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    def _skip(self, expected: str, then: Where) -> bool:
        if len(self._held) < len(expected):
            return False
        self._held, self._where = self._held[len(expected) :], then
        return True

    def _name(self, called: list[ToolCallDelta]) -> bool:
        between = self._dialect.between
        end = self._held.find('"')
        if end < 0 or len(self._held) < end + len(between):
            return False
        self._calls += 1
        called.append(ToolCallDelta(self._calls, call_id(self._answer, self._calls), self._held[:end]))
        self._held, self._where = self._held[end + len(between) :], "arguments"
        self._depth, self._quoted, self._escaped = 0, False, False
        return True

    def _arguments(self, called: list[ToolCallDelta]) -> bool:
        for at, character in enumerate(self._held):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self._give(called, self._held[: at + 1])
                    self._held, self._where = self._held[at + 1 :], "after"
                    return True
        self._give(called, self._held)
        self._held = ""
        return False

    def _give(self, called: list[ToolCallDelta], arguments: str) -> None:
        if called and called[-1].index == self._calls:
            called[-1].arguments += arguments
        elif arguments:
            called.append(ToolCallDelta(self._calls, arguments=arguments))


def generic_notice(tools: Sequence[dict[str, Any]]) -> str:
    """The system message that describes tools to a model whose template has none."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    shown = GENERIC.begin + GENERIC.head + "NAME" + GENERIC.between + "ARGUMENTS" + GENERIC.tail + GENERIC.end
    return (
        "You can call these functions. Each line is one of them, with a JSON schema of its arguments:\n"
        f"{listed}\n"
        "To call a function, answer with its name and a JSON object of arguments, in exactly this form:\n"
        f"{shown}\n"
        "What it returns comes back between <tool_response> and </tool_response>."
    )


def spelled_calls(message: dict[str, Any]) -> str:
    """An assistant message with calls as plain text, for templates without calls."""
    texts = [message["content"]] if message.get("content") else []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function["arguments"]
        spelled = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        texts.append(
            GENERIC.begin + GENERIC.head + function["name"] + GENERIC.between + spelled + GENERIC.tail + GENERIC.end
        )
    return "\n".join(texts)


def spelled_result(message: dict[str, Any]) -> str:
    """A tool message as plain text."""
    return f"<tool_response>\n{message['content']}\n</tool_response>"
