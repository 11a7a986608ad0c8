"""What of a request its grammar depends on, as it travels to the process that compiles it, and the grammar's text.

Writing that text reads and writes JSON of strangers: it is done where it may take long or fail (`worker.sampling.grammar_child`).
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

#: Of the answer's form (a schema or an expression) and `tools` together; the gateway takes less of each.
MOST_CHARACTERS = 1 << 19
_IN_A_LITERAL = re.compile(r"\\.|/|\n", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Wish:
    """A schema that the answer satisfies, functions that it may call, or both; or an expression that it matches. field: names the form."""

    dialect: Dialect
    schema: str | None
    use: ToolUse | None
    regex: str | None = None
    field: str = "response_format"

    @property
    def param(self) -> str:
        """The request's field that is named where no better is known."""
        return self.field if self.use is None else "tools"

    def packed(self) -> bytes:
        """Bytes that `unpacked` reads; equal wishes have equal ones."""
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
        """`(field, grammar)` of each schema by itself, to tell which of several cannot be enforced."""
        found = [] if self.schema is None else [(self.field, json_grammar(self.schema))]
        if self.use is not None and self.use.choice != "none":
            for i, tool in enumerate(json.loads(self.use.tools)):
                found.append((f"tools[{i}].function.parameters", f"start: {json_rule(parameters_of(tool))}\n"))
        return found


def unpacked(packed: bytes) -> Wish:
    """What `Wish.packed` wrote."""
    dialect, schema, use, regex, field = msgpack.unpackb(packed)
    return Wish(Dialect(**dialect), schema, None if use is None else ToolUse(**use), regex, field)


def regex_grammar(regex: str) -> str:
    """The grammar of an answer that matches `regex` as a whole."""

    def literal(found: re.Match[str]) -> str:
        escaped = found[0].removeprefix("\\")
        return "\\n" if escaped == "\n" else "\\" + escaped

    # What would end the literal is escaped; what is escaped stays so.
    return f"start: /{_IN_A_LITERAL.sub(literal, regex)}/\n"


def wish_of(request: GenerateRequest, dialect: Dialect) -> Wish | None:
    """None: the answer is free. Raises InvalidRequest for what is too large, or cannot be told apart in one answer."""
    use, schema, regex = request.tool_use, request.json_schema, request.regex
    if use is None and schema is None and regex is None:
        return None
    wish = Wish(dialect, schema, use, regex, request.form_field or "response_format")
    if regex is not None and (use is not None or schema is not None):
        raise unsupported(wish.field, "an expression goes with neither tools nor a schema")
    characters = len(schema or "") + len(regex or "") + len(use.tools if use is not None else "")
    if characters > MOST_CHARACTERS:
        raise unsupported(wish.param, f"it has {characters:,} characters, and at most {MOST_CHARACTERS:,} are enforced")
    if use is not None and use.choice == "auto" and schema is not None and not dialect.begin:
        raise InvalidRequest(
            f"{wish.field} cannot be combined with tool_choice 'auto' on this model, whose calls are JSON too; "
            "require a call, or leave one of both out",
            param=wish.field,
        )
    return wish


def unsupported(param: str, reason: str) -> InvalidRequest:
    """The refusal of a grammar."""
    return InvalidRequest(f"{param} cannot be enforced: {reason}", param=param, code="unsupported_schema")


def answer_of(grammar: str, bytes_: int) -> bytes:
    """What the child says of a grammar that may be compiled: its text, and the memory that it keeps."""
    packed: bytes = msgpack.packb([grammar, bytes_])
    return packed


def refusal_of(param: str, reason: str) -> bytes:
    """What the child says of one that may not."""
    packed: bytes = msgpack.packb([None, param, reason])
    return packed


def read_answer(packed: bytes) -> list[Any]:
    """`[grammar, bytes]`, or `[None, param, reason]`."""
    answer: list[Any] = msgpack.unpackb(packed)
    return answer
