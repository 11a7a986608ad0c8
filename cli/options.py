"""Options of commands that take numbers: what is none is refused in plain words."""

from __future__ import annotations

from typing import Any

import typer


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number; give one such as 2") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number; give one such as 0.5") from None


def whole_option(text: str) -> Any:
    """A whole number; text: its help."""
    return typer.Option(parser=_whole, metavar="INT", help=text)


def number_option(text: str) -> Any:
    """A number; text: its help."""
    return typer.Option(parser=_number, metavar="NUMBER", help=text)
