"""How commands print: tables for a terminal or a pipe, JSON, and one line for an error."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from rich.console import Console

_PIPE_COLUMNS = 1000


def console() -> Console:
    """A console on stdout. In a pipe a row stays on one line, unless COLUMNS sets a width."""
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, markup=False, width=None if has_width else _PIPE_COLUMNS)


def print_json(data: Any) -> None:
    """Print `data` as indented JSON."""
    print(json.dumps(data, indent=2))


def fail(message: str, status: int) -> int:
    """Print an error on stderr; returns `status`."""
    print(f"upbeat: {message}", file=sys.stderr)
    return status
