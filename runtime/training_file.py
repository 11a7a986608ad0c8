"""Checks a whole training file, line by line, in little memory."""

from __future__ import annotations

from pathlib import Path

from contracts.training_data import check_lines, read_lines


def check_file(path: Path) -> int:
    """How many examples the file has. Raises InvalidRequest that names the first line that is wrong, OSError."""
    with path.open("rb") as file:
        return check_lines(read_lines(file))
