"""Checks a whole training file, line by line, in little memory."""

from __future__ import annotations

from pathlib import Path

from contracts.errors import InvalidRequest
from contracts.training_data import check_line

#: Bytes of a line at most, and lines of a file.
MOST_LINE_BYTES, MOST_LINES = 4 << 20, 10_000_000


def check_file(path: Path) -> int:
    """How many examples the file has; empty lines are none. Raises InvalidRequest that names the first line that is
    wrong, OSError."""
    examples = 0
    with path.open("rb") as file:
        for number in range(1, MOST_LINES + 2):
            line = file.readline(MOST_LINE_BYTES + 1)
            if not line:
                break
            if len(line) > MOST_LINE_BYTES:
                raise InvalidRequest(f"line {number}: it has more than {MOST_LINE_BYTES} bytes; split the example")
            if number > MOST_LINES:
                raise InvalidRequest(f"line {number}: the file has more than {MOST_LINES} lines; split it")
            if line.strip():
                check_line(line, number)
                examples += 1
    if not examples:
        raise InvalidRequest("line 1: the file has no example; give a JSON object a line")
    return examples
