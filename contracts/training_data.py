"""Files of training data: JSONL, one example a line, as far as they can be checked without a tokenizer.

A line is `{"messages": [{"role", "content", "weight"?, "name"?}, ...]}`, as in OpenAI's format, where the model learns
the assistant's turns; or `{"text": "..."}`, where it learns all of it. Everything else is refused with its line number,
before anything starts. Gateway, command line and trainer use the same checks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, Final, NoReturn

from contracts.errors import InvalidRequest

#: Limits of a file, of its lines, and of a conversation.
MAX_FILE_BYTES: Final = 512 << 20
MAX_LINE_BYTES: Final = 8 << 20
MAX_LINES: Final = 1 << 20
MAX_MESSAGES: Final = 2048
ROLES: Final = ("system", "user", "assistant", "tool")
_PARAM, _CODE = "training_file", "invalid_training_file"
_BOM = "\ufeff"
#: Of what a message quotes from the file.
_QUOTED = 60


def refused(number: int, reason: str) -> InvalidRequest:
    """The error of line `number`; `reason` names the remedy too."""
    return InvalidRequest(f"line {number}: {reason}", param=_PARAM, code=_CODE)


def check_line(text: str | bytes, number: int) -> None:
    """Raise InvalidRequest, with the line's number (from 1) and the remedy, unless the line is an example."""
    parse_line(text, number)


def parse_line(text: str | bytes, number: int) -> dict[str, Any]:
    """The example of a line, checked. A line break at its end is allowed. Raises as `check_line`."""
    if len(text) > MAX_LINE_BYTES:
        raise refused(number, f"has more than {MAX_LINE_BYTES} bytes; split the example")
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError as e:
            raise refused(number, f"is not UTF-8 at byte {e.start}; save the file as UTF-8") from None
    if text.startswith(_BOM):
        raise refused(number, "begins with a byte order mark; save the file as UTF-8 without one")
    if not text.strip():
        raise refused(number, "is empty; remove it")
    example = _json(text, number)
    if not isinstance(example, dict):
        raise refused(number, f"is {_kind(example)}; give an object with messages or text")
    _check_keys(example, ("messages", "text"), "", number)
    if len(example) != 1:
        raise refused(number, "needs either messages or text; give one of them")
    if "text" in example:
        _check_text(example["text"], "text", number)
        if not example["text"]:
            raise refused(number, "text is empty; remove the line")
    else:
        _check_messages(example["messages"], number)
    return example


def read_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The numbered lines (from 1) of a file, without blank ones; it is never held as a whole. Raises InvalidRequest for
    a file that has none or is over a limit; checks no line's content."""
    number = size = found = 0
    while line := file.readline(MAX_LINE_BYTES + 2):
        number += 1
        size += len(line)
        if number > MAX_LINES:
            raise refused(number, f"is over the limit of {MAX_LINES} lines; split the file")
        if size > MAX_FILE_BYTES:
            raise refused(number, f"the file has more than {MAX_FILE_BYTES} bytes; split it")
        if line.strip():
            found += 1
            yield number, line
    if not found:
        raise InvalidRequest("the file is empty; give one JSON object a line", param=_PARAM, code=_CODE)


def check_lines(lines: Iterable[tuple[int, bytes]]) -> int:
    """Checks every line; returns their number. Raises InvalidRequest about the first one that is wrong."""
    count = 0
    for number, line in lines:
        check_line(line, number)
        count += 1
    return count


def _json(text: str, number: int) -> Any:
    def constant(name: str) -> NoReturn:
        raise refused(number, f"{name} is no JSON; write a number, or null")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            [(twice, _)] = Counter(key for key, _ in items).most_common(1)
            raise refused(number, f"the key {_quoted(twice)} is there twice; keep one")
        return found

    try:
        return json.loads(text, parse_constant=constant, object_pairs_hook=pairs)
    except json.JSONDecodeError as e:
        raise refused(number, f"is not JSON: {e.msg} at column {e.colno}; write one object on one line") from None
    except ValueError:  # Python's own limit of a number's digits
        raise refused(number, "holds a number with too many digits; shorten it") from None
    except RecursionError:
        raise refused(number, "is nested too deeply; an example is an object with a list of flat messages") from None


def _check_messages(messages: Any, number: int) -> None:
    if not isinstance(messages, list) or not messages:
        raise refused(number, "messages must be a list of at least one message; see OpenAI's chat format")
    if len(messages) > MAX_MESSAGES:
        raise refused(number, f"has {len(messages)} messages, and at most {MAX_MESSAGES} are taken; split the example")
    learnt = False
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise refused(number, f"{where} is {_kind(message)}; give an object with role and content")
        _check_keys(message, ("role", "content", "weight", "name"), f"{where}.", number)
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise refused(number, f"{where}.role = {_quoted(role)} must be one of {', '.join(ROLES)}")
        if "content" not in message:
            raise refused(number, f"{where}.content is missing; give its text")
        _check_text(message["content"], f"{where}.content", number)
        if "name" in message:
            _check_text(message["name"], f"{where}.name", number)
        learnt |= _weight(message, where, number) == 1
    if not learnt:
        raise refused(
            number,
            "has no assistant message to learn; add one, without weight 0"
            if any(message["role"] == "assistant" for message in messages)
            else "has no assistant message, so there is nothing to learn; add one",
        )


def _weight(message: dict[str, Any], where: str, number: int) -> int:
    """1 for a message that is learnt, else 0."""
    if message["role"] != "assistant":
        if "weight" in message:
            raise refused(number, f"{where}.weight is only for assistant messages; remove it")
        return 0
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, int) or weight not in (0, 1):
        raise refused(number, f"{where}.weight = {_quoted(weight)} must be 0 or 1")
    return weight


def _check_keys(given: dict[str, Any], known: tuple[str, ...], where: str, number: int) -> None:
    for key in given:
        if key not in known:
            raise refused(number, f"the key {where}{_quoted(key)} is unknown; remove it (known: {', '.join(known)})")


def _check_text(value: Any, where: str, number: int) -> None:
    if not isinstance(value, str):
        raise refused(number, f"{where} is {_kind(value)}; give a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise refused(number, f"{where} holds half of a surrogate pair, which is no character; remove it") from None


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _quoted(value: Any) -> str:
    """What a message quotes: short, and printable on one line."""
    if isinstance(value, str):
        return repr(value) if len(value) <= _QUOTED else repr(value[:_QUOTED]) + "..."
    return _kind(value)
