"""The part of a request that its grammar depends on, as sent to the compiling process, and the grammar's text.

Writing that text processes untrusted JSON, so it runs in a process that may be slow or fail
(`worker.sampling.grammar_child`).
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

import msgpack

from contracts.errors import InvalidRequest
from contracts.request import GenerateRequest, ToolUse
from worker.core.tool_calls import Dialect, call_grammar, json_grammar, json_rule, parameters_of

#: Maximum size of the answer's form (schema or regular expression) and `tools` together. The gateway's limits for each
#: are lower.
MOST_CHARACTERS = 1 << 19
_IN_A_LITERAL = re.compile(r"\\.|/|\n", re.DOTALL)


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A schema for the answer, functions that it may call, or both; or a regular expression. field: the request's field
    that holds the form."""

    dialect: Dialect
    schema: str | None
    use: ToolUse | None
    regex: str | None = None
    field: str = "response_format"

    @property
    def param(self) -> str:
        """The request field to name in errors by default."""
        return self.field if self.use is None else "tools"

    def packed(self) -> bytes:
        """Bytes for `unpacked`; equal specs give equal bytes."""
        packed: bytes = msgpack.packb(
            [asdict(self.dialect), self.schema, None if self.use is None else asdict(self.use), self.regex, self.field]
        )
        return packed

    def grammar(self) -> str:
        """The grammar of the whole answer."""
        if self.regex is not None:
            return regex_grammar(self.regex)
        if self.use is None:
            assert self.schema is not None
            return json_grammar(self.schema)
        return call_grammar(self.dialect, self.use, self.schema)

    def parts(self) -> list[tuple[str, str]]:
        """`(field, grammar)` of each schema alone, to find which one cannot be enforced."""
        found = [] if self.schema is None else [(self.field, json_grammar(self.schema))]
        if self.use is not None and self.use.choice != "none":
            for i, tool in enumerate(json.loads(self.use.tools)):
                found.append((f"tools[{i}].function.parameters", f"start: {json_rule(parameters_of(tool))}\n"))
        return found


def unpacked(packed: bytes) -> GrammarSpec:
    """Inverse of `GrammarSpec.packed`."""
    dialect, schema, use, regex, field = msgpack.unpackb(packed)
    return GrammarSpec(Dialect(**dialect), schema, None if use is None else ToolUse(**use), regex, field)


def regex_grammar(regex: str) -> str:
    """The grammar of an answer that matches `regex` as a whole."""

    def literal(found: re.Match[str]) -> str:
        escaped = found[0].removeprefix("\\")
        return "\\n" if escaped == "\n" else "\\" + escaped

    # Escape what would end the literal; keep existing escapes.
    return f"start: /{_IN_A_LITERAL.sub(literal, regex)}/\n"


def spec_of(request: GenerateRequest, dialect: Dialect) -> GrammarSpec | None:
    """The request's grammar; None if the answer is unconstrained. Raises InvalidRequest if it is too large, or combines
    forms that one answer cannot hold."""
    use, schema, regex = request.tool_use, request.json_schema, request.regex
    if use is None and schema is None and regex is None:
        return None
    spec = GrammarSpec(dialect, schema, use, regex, request.form_field or "response_format")
    if regex is not None and (use is not None or schema is not None):
        raise unsupported(spec.field, "an expression goes with neither tools nor a schema")
    characters = len(schema or "") + len(regex or "") + len(use.tools if use is not None else "")
    if characters > MOST_CHARACTERS:
        raise unsupported(spec.param, f"it has {characters:,} characters, and at most {MOST_CHARACTERS:,} are enforced")
    if use is not None and use.choice == "auto" and schema is not None and not dialect.begin:
        raise InvalidRequest(
            f"{spec.field} cannot be combined with tool_choice 'auto' on this model, whose calls are JSON too; "
            "require a call, or leave one of both out",
            param=spec.field,
        )
    return spec


def unsupported(param: str, reason: str) -> InvalidRequest:
    """The error for a grammar that cannot be enforced."""
    return InvalidRequest(f"{param} cannot be enforced: {reason}", param=param, code="unsupported_schema")


def answer_of(grammar: str, bytes_: int) -> bytes:
    """The child's message for an accepted grammar: its text and memory."""
    packed: bytes = msgpack.packb([grammar, bytes_])
    return packed


def refusal_of(param: str, reason: str) -> bytes:
    """The child's message for a refused grammar."""
    packed: bytes = msgpack.packb([None, param, reason])
    return packed


def read_answer(packed: bytes) -> list[Any]:
    """Inverse of `answer_of` and `refusal_of`: `[grammar, bytes]`, or `[None, param, reason]`."""
    answer: list[Any] = msgpack.unpackb(packed)
    return answer
